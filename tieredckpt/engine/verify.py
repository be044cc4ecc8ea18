"""Every byte of a tier, checked: what `verify` does.

A restore checks what it reads; damage in what nobody reads waits for the day when it is needed. `verify` reads all of it: the log
(`engine.log_check`), and for each live snapshot the manifest, receipts, upload manifest and every pack to the last byte of its
padding. It changes nothing and repairs nothing: restoring does, where another tier has good bytes.

What is wrong is a finding; several in one snapshot are all reported. A tier that does not answer is no finding: StoreError, and
the report is not given at all, because "no damage found" must mean that everything was read. Memory is bounded: as many packs as
there are threads.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from tieredckpt.engine.arena import ArenaPool
from tieredckpt.engine.log_check import CheckedLog, Finding, check_log
from tieredckpt.engine.pack_check import check_frames, check_pack, pieces_by_pack
from tieredckpt.engine.parts import Part, expected_here, has_part_of, writers_with_receipts
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import CorruptionError, FormatError, NotFoundError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, PackEntry, Piece
from tieredckpt.format.objects import MAX_LIST_BYTES, decode_receipt, decode_upload, receipt_of, upload_manifest_of
from tieredckpt.format.records import CommitRecord
from tieredckpt.model.ids import original_of
from tieredckpt.model.leaf import Leaf
from tieredckpt.settings import Settings
from tieredckpt.store.probe import PROBE_PREFIX

__all__ = ["CheckedSnapshot", "Finding", "Orphan", "Progress", "Verifier", "VerifyReport"]

Progress = Callable[[int], None]
"""Told of every number of bytes that has been checked; called by several threads."""


@dataclass(frozen=True, slots=True)
class CheckedSnapshot:
    """One live snapshot. `ok`: nothing is wrong with it. `objects`, `nbytes`: what was read for it, damaged packs aside."""

    snapshot: str
    step: int
    findings: tuple[Finding, ...]
    objects: int
    nbytes: int

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class Orphan:
    """A stored object of this format that no live snapshot names: left over or not collected yet. No damage."""

    key: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked on a tier, and what is wrong.

    quick        presence and sizes of packs only; their bytes were not read
    seq          the log's last record
    log          findings in format.json, node.json, the log and its indexes
    snapshots    the ones checked, oldest first
    orphans      and other_files (keys that are not of this format): information; empty if one snapshot was asked for
    objects, nbytes   what was read, all together
    """

    label: str
    run: str
    quick: bool
    seq: int
    log: tuple[Finding, ...]
    snapshots: tuple[CheckedSnapshot, ...]
    orphans: tuple[Orphan, ...]
    other_files: tuple[str, ...]
    objects: int
    nbytes: int

    @property
    def ok(self) -> bool:
        """No damage was found."""
        return not self.log and all(snapshot.ok for snapshot in self.snapshots)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them: of the log, then of each snapshot."""
        return (*self.log, *(finding for snapshot in self.snapshots for finding in snapshot.findings))


@dataclass(slots=True)
class _Snapshot:
    """A `CheckedSnapshot` in the making."""

    record: CommitRecord
    findings: list[Finding] = field(default_factory=list)
    objects: int = 0
    nbytes: int = 0

    def find(self, key: str, invariant: str, what: str) -> None:
        self.findings.append(Finding(key, invariant, what))

    def count(self, nbytes: int) -> None:
        self.objects += 1
        self.nbytes += nbytes

    def done(self) -> CheckedSnapshot:
        return CheckedSnapshot(self.record.snapshot, self.record.step, tuple(self.findings), self.objects, self.nbytes)


@dataclass(frozen=True, slots=True)
class _Work:
    """What all snapshots share. `named`: the packs of every manifest that could be read, filled as they are."""

    listing: Mapping[str, int]
    log: CheckedLog
    pool: Executor
    quick: bool
    named: dict[str, frozenset[str]] = field(default_factory=dict)


class Verifier:
    """Verifies one tier. `progress` may be called from several threads."""

    def __init__(self, tier: OpenTier, env: Env, settings: Settings, progress: Progress | None = None) -> None:
        self._tier, self._store = tier, tier.store
        self._env = env
        self._threads = settings.upload_threads
        self._arenas = ArenaPool(env, self._threads)
        self._progress = progress

    def verify(self, snapshots: Collection[str] | None = None, *, quick: bool = False) -> VerifyReport:
        """Check the log, and all live snapshots or only those with the ids given. StoreError if the tier does not answer."""
        listing = {stat.key: stat.size for stat in self._store.list("")}
        with self._env.executor("verify", self._threads) as pool:
            log = check_log(self._tier, listing, pool)
            work = _Work(listing, log, pool, quick)
            records = [record for name, record in log.live.items() if snapshots is None or name in snapshots]
            checked = [self._check_snapshot(record, work) for record in records]
        checked = self._without_retired(checked, log)
        everything = snapshots is None
        return VerifyReport(
            label=self._store.label,
            run=self._tier.run,
            quick=quick,
            seq=log.state.seq,
            log=tuple(log.findings),
            snapshots=tuple(checked),
            orphans=tuple(_orphans(work)) if everything else (),
            other_files=tuple(key for key in listing if not _is_ours(key)) if everything else (),
            objects=log.objects + sum(snapshot.objects for snapshot in checked),
            nbytes=log.nbytes + sum(snapshot.nbytes for snapshot in checked),
        )

    def _without_retired(self, checked: list[CheckedSnapshot], log: CheckedLog) -> list[CheckedSnapshot]:
        """What a collector took away while it was being verified is not damaged."""
        if not log.whole or all(snapshot.ok for snapshot in checked):
            return checked
        live = self._tier.log.refresh().live
        return [snapshot for snapshot in checked if snapshot.ok or snapshot.snapshot in live]

    # ---------------------------------------------------------------------------------------- one snapshot

    def _check_snapshot(self, record: CommitRecord, work: _Work) -> CheckedSnapshot:
        checked = _Snapshot(record)
        manifest = self._check_manifest(checked)
        if manifest is None:
            return checked.done()
        named = work.named[record.snapshot] = frozenset(pack.key for pack in manifest.packs)
        for key in sorted(named & work.log.state.condemned_packs):
            checked.find(key, "I8", "a live snapshot names this pack, and a sweep has condemned it")
        part = self._part(record, manifest)
        for writer in sorted(part.writers):
            self._check_receipt(checked, manifest, writer)
        self._check_upload(checked, manifest, work.listing)
        packs = [number for number, pack in enumerate(manifest.packs) if pack.key in part.packs]
        for pack, problem in zip(map(manifest.packs.__getitem__, packs), self._check_packs(manifest, packs, work), strict=True):
            if problem:
                checked.find(pack.key, "I1", problem)
            elif not work.quick:
                checked.count(pack.nbytes)
        return checked.done()

    def _part(self, record: CommitRecord, manifest: Manifest) -> Part:
        """What of a snapshot belongs to this tier: all of it, unless several nodes have saved it and this is one of their disks."""
        packs = frozenset(pack.key for pack in manifest.packs)
        if self._tier.is_remote or not has_part_of(record):
            return Part(frozenset(manifest.writers), packs)
        return Part(writers_with_receipts(self._store, manifest), expected_here(self._store, packs))

    def _check_packs(self, manifest: Manifest, packs: Sequence[int], work: _Work) -> list[str]:
        """What is wrong with each of these packs, "" for nothing."""
        pieces = pieces_by_pack(manifest)
        jobs = [
            work.pool.submit(self._check_pack, manifest.packs[n], pieces[n], manifest.leaves, work.listing, work.quick)
            for n in packs
        ]
        try:
            return [job.result() for job in jobs]
        except BaseException:  # an outage, or an interrupt: do not read the rest first
            for job in jobs:
                job.cancel()
            raise

    def _check_manifest(self, checked: _Snapshot) -> Manifest | None:
        """Its digest, and everything that `check_manifest` asks, I4 among it."""
        record = checked.record
        key = keys.manifest_key(record.snapshot)
        try:
            manifest, stored = read_manifest(self._store, record)
        except FormatError as error:
            checked.find(key, "I1" if isinstance(error, CorruptionError) else "I4", str(error))
            return None
        checked.count(len(stored))
        if manifest.run != self._tier.run:
            checked.find(key, "I2", f"it is of run {manifest.run}, and {keys.FORMAT_KEY} names run {self._tier.run}")
        if differing := _differing(record, manifest, len(stored)):
            checked.find(key, "I1", f"the commit record says something else about it: {', '.join(differing)}")
        return manifest

    def _check_receipt(self, checked: _Snapshot, manifest: Manifest, writer: int) -> None:
        key = keys.receipt_key(checked.record.snapshot, writer)
        try:
            data = self._store.get(key, max_bytes=MAX_LIST_BYTES)
            receipt = decode_receipt(data)
        except NotFoundError:
            checked.find(key, "I3", "this receipt is missing, and the snapshot is committed")
            return
        except FormatError as error:
            checked.find(key, "I3", str(error))
            return
        checked.count(len(data))
        nodes = checked.record.nodes or ("",)
        if receipt.node not in nodes or receipt != receipt_of(manifest, writer, receipt.node):
            checked.find(key, "I3", "this receipt does not say what the manifest and the commit record say")

    def _check_upload(self, checked: _Snapshot, manifest: Manifest, listing: Mapping[str, int]) -> None:
        """Where it is: a tier that was copied from a local one has none, and readers need none."""
        key = keys.upload_key(manifest.snapshot)
        if key not in listing:
            return
        try:
            data = self._store.get(key, max_bytes=MAX_LIST_BYTES)
            upload = decode_upload(data)
        except (NotFoundError, FormatError) as error:
            checked.find(key, "I3", str(error))
            return
        checked.count(len(data))
        if upload != upload_manifest_of(manifest, checked.record.manifest_digest):
            checked.find(key, "I3", "this upload manifest does not say what the manifest says")

    # ---------------------------------------------------------------------------------------- one pack

    def _check_pack(
        self, pack: PackEntry, pieces: Sequence[Piece], leaves: Sequence[Leaf], listing: Mapping[str, int], quick: bool
    ) -> str:
        """What is wrong with it; "" if it is good to the last byte (`quick`: if it is there and has the right size)."""
        listed = listing.get(pack.key)
        size = listed if listed is not None else self._size(pack.key)  # a listing may lag
        if size is None:
            return "it is missing"
        if size != pack.nbytes:
            return f"it has {size} bytes and should have {pack.nbytes}"
        return "" if quick else self._read_and_check(pack, pieces, leaves)

    def _size(self, key: str) -> int | None:
        stat = self._store.stat(key)
        return None if stat is None else stat.size

    def _read_and_check(self, pack: PackEntry, pieces: Sequence[Piece], leaves: Sequence[Leaf]) -> str:
        with self._arenas.acquire(pack.nbytes) as arena:
            try:
                self._store.read_into(pack.key, 0, arena.view)
                check_frames(pack, pieces, leaves, arena.view)
                check_pack(pack, pieces, arena.view)
            except NotFoundError:
                return "it disappeared while it was being verified"
            except CorruptionError as error:
                return str(error).removeprefix(f"{pack.key}: ")
            except StoreError as error:
                if not _is_media_error(error):
                    raise
                return str(error)
        if self._progress is not None:
            self._progress(pack.nbytes)
        return ""


def _differing(record: CommitRecord, manifest: Manifest, stored_bytes: int) -> list[str]:
    """Fields of the commit record, by which `ls` and the policies go, that the manifest contradicts."""
    own = sum(pack.nbytes for pack in manifest.packs if pack.snapshot == manifest.snapshot)
    expected: dict[str, object] = {
        "manifest_bytes": stored_bytes,
        "saved_at": manifest.created_at,
        "continues": manifest.continues,
        "parent": manifest.parent,
        "rebase_of": manifest.rebase_of,
        "packs": len(manifest.packs),
        "bytes_total": sum(piece.raw_bytes(manifest.leaves[piece.leaf]) for piece in manifest.pieces),
        "bytes_new": own,
    }
    differing = [name for name, value in expected.items() if getattr(record, name) != value]
    if original_of(record.predecessors[0]) != original_of(manifest.predecessor):
        differing.append("predecessors")
    return differing


def _is_media_error(error: StoreError) -> bool:
    """The disk says that it cannot read these bytes any more: damage, unlike a tier that does not answer."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO


def _orphans(work: _Work) -> Iterator[Orphan]:
    """Packs that no live manifest names (one that cannot be read may name its own), and files of snapshots that are not live."""
    live, named = work.log.live, work.named
    wanted = frozenset().union(*named.values())
    for key, nbytes in work.listing.items():
        pack = keys.parse_pack_key(key)
        owner = pack.snapshot if pack else keys.parse_snapshot_of(key)
        if owner is None:
            continue
        unreadable = owner in live and owner not in named
        if (key not in wanted and not unreadable) if pack else owner not in live:
            yield Orphan(key, nbytes)


def _is_ours(key: str) -> bool:
    single = (keys.FORMAT_KEY, keys.NODE_KEY, keys.LATEST_KEY)
    parsers = (keys.parse_record_key, keys.parse_index_key, keys.parse_pack_key, keys.parse_manifest_key)
    more = (keys.parse_receipt_key, keys.parse_upload_key)
    return key in single or key.startswith(PROBE_PREFIX) or any(parse(key) is not None for parse in (*parsers, *more))

"""Does the world keep its promises? Asked after every step, and more thoroughly at the end of a life.

Outside of the library: the auditor reads both tiers itself, knows every byte that was saved and everything that anybody was told, and
judges by the guarantees (I1, I2, I3, I5 to I9) and not by what the library thinks of itself. What somebody damaged on purpose is
left out of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import zstandard

from tests.engine.chainkit import State, Tensor
from tests.sim.ledger import Ledger, Moment
from tests.sim.process import Story
from tieredckpt.engine.commit import ForeignObject
from tieredckpt.errors import FormatError, NotFoundError, OutcomeUnknownError, SaveError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.format.records import CommitRecord, ResumeRecord, RetireRecord, decode_record
from tieredckpt.model.ids import original_of, parse_snapshot_id
from tieredckpt.model.leaf import DTYPE_BYTES
from tieredckpt.store.base import QUARANTINE_DIRECTORY, TEMP_DIRECTORY, ObjectStat

_MOST_BYTES = 1 << 30


class Reading(Protocol):
    """What the auditor needs of a place."""

    def get(self, key: str, *, max_bytes: int) -> bytes: ...

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]: ...


@dataclass(frozen=True, slots=True)
class Files:
    """A local tier, read as the files that it is."""

    root: Path

    def get(self, key: str, *, max_bytes: int) -> bytes:
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError as error:
            raise NotFoundError(key) from error

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        base = self.root / prefix
        for directory, directories, names in os.walk(base):
            directories.sort()
            below = os.path.relpath(directory, self.root)
            for name in sorted(names):
                key = name if below == "." else f"{below}/{name}"
                if not key.startswith((f"{TEMP_DIRECTORY}/", f"{QUARANTINE_DIRECTORY}/")):
                    yield ObjectStat(key, os.stat(os.path.join(directory, name)).st_size)


@dataclass(slots=True)
class Place:
    """A bucket or a disk. `store`: as it is now. `hurt`: keys that somebody has damaged or lost there; `repaired` are taken out."""

    name: str
    store: Callable[[], Reading]
    ledger: Ledger
    hurt: dict[str, bytes] = field(default_factory=dict)
    ever_hurt: set[str] = field(default_factory=set)
    seen: dict[str, bytes] = field(default_factory=dict)
    """Key → digest of its bytes, when they were read first."""
    whole: set[str] = field(default_factory=set)
    """Live snapshots that were compared with what was saved."""
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Snapshot → key → bytes that its manifest names, of everything that was ever committed here and could be read."""
    acknowledged: set[str] = field(default_factory=set)
    """Originals that somebody was told are committed here."""

    @property
    def is_remote(self) -> bool:
        return self.name == "remote"


class Auditor:
    """`look` says what is broken. Places: "remote", and the nodes by their names."""

    def __init__(self, story: Story, places: dict[str, Place]) -> None:
        self._story = story
        self.places = places
        self._judged: set[int] = set()
        self._given_up: set[str] = set()
        self._evictions_seen: dict[str, int] = {}

    def look(self, *, thoroughly: bool = False) -> list[str]:
        found = list(self._story.broken)
        for place in self.places.values():
            found += self._read_log(place)
        for place in self.places.values():
            found += self._look_at_objects(place, thoroughly)
        found += self._look_at_acknowledgements()
        for place in self.places.values():
            found += self._look_at_restores(place)
            found += self._look_at_line(place)
        return found

    def forget(self, place: Place) -> None:
        """The power was cut there: what nobody was told may be gone. Everything is read again."""
        place.ledger = Ledger(place.name)
        self._evictions_seen.pop(place.name, None)
        place.whole.clear()

    # ---------------------------------------------------------------------------------------- the log

    def _read_log(self, place: Place) -> list[str]:
        found, ledger, store = [], place.ledger, place.store()
        while True:
            seq = len(ledger.records) + 1
            try:
                data = store.get(keys.record_key(seq), max_bytes=_MOST_BYTES)
                record = decode_record(data, seq)
            except NotFoundError:
                return found
            except FormatError as error:
                return [*found, f"I5 {place.name}: {error}"]
            packs: dict[str, int] = {}
            if isinstance(record, CommitRecord):
                packs, text = self._packs_of(place, record)
                found += text
                if bad := packs.keys() & ledger.condemned:
                    found.append(f"I8 {place.name}: {record.snapshot} is committed and names the condemned {min(bad)}")
                ledger.packs[record.snapshot] = frozenset(packs)
            found += ledger.add(data, record)

    def _packs_of(self, place: Place, record: CommitRecord) -> tuple[dict[str, int], list[str]]:
        """What its manifest names. It may be gone again, if the snapshot is: whoever is live is looked at below."""
        try:
            manifest = self._manifest(place, record)
        except NotFoundError:
            return {}, []
        except FormatError as error:
            if keys.manifest_key(record.snapshot) in place.hurt:
                return {}, []
            return {}, [f"I1 {place.name}: the manifest of {record.snapshot}: {error}"]
        place.sizes[record.snapshot] = {pack.key: pack.nbytes for pack in manifest.packs}
        return place.sizes[record.snapshot], []

    def _manifest(self, place: Place, record: CommitRecord) -> Manifest:
        data = place.store().get(keys.manifest_key(record.snapshot), max_bytes=_MOST_BYTES)
        return decode_manifest(data, record.manifest_digest)

    # ---------------------------------------------------------------------------------------- what lies there

    def _look_at_objects(self, place: Place, thoroughly: bool) -> list[str]:
        found = []
        store, ledger = place.store(), place.ledger
        self._forget_repaired(place)
        listed = {stat.key: stat.size for stat in store.list("")}
        for snapshot, record in ledger.live.items():
            needed = {**place.sizes.get(snapshot, {}), keys.manifest_key(snapshot): record.manifest_bytes}
            if needed.keys() & place.hurt.keys():
                continue
            for key, nbytes in needed.items():
                if listed.get(key) != nbytes:
                    found.append(f"I1 {place.name}: {key} of the live {snapshot} has {listed.get(key)} bytes, not {nbytes}")
            if not found and (thoroughly or snapshot not in place.whole):
                found += self._compare(place, record)
                place.whole.add(snapshot)
        if thoroughly:
            found += self._compare_with_before(place, listed)
        if len(ledger.records) != sum(key.startswith(keys.LOG_PREFIX) for key in listed):
            found.append(f"{place.name}: the log has a gap behind record {len(ledger.records)}")
        return found

    def _forget_repaired(self, place: Place) -> None:
        for key, good in list(place.hurt.items()):
            try:
                if place.store().get(key, max_bytes=_MOST_BYTES) == good:
                    del place.hurt[key]
            except NotFoundError:
                continue

    def _compare(self, place: Place, record: CommitRecord) -> list[str]:
        """Bit for bit with what was saved."""
        original = original_of(record.snapshot)
        try:
            manifest = self._manifest(place, record)
            loaded = self._load(place, manifest)
        except (NotFoundError, FormatError, zstandard.ZstdError, ValueError) as error:
            return [f"I1 {place.name}: {record.snapshot} cannot be read: {error}"]
        saved = self._story.saves.get(original)
        if saved is None:
            return [f"{place.name}: nobody has saved {original}"]
        return [] if loaded == saved.state else [f"I1 {place.name}: {record.snapshot} is not what was saved"]

    def _load(self, place: Place, manifest: Manifest) -> State:
        bytes_of = {number: self._read(place, pack.key) for number, pack in enumerate(manifest.packs)}
        arrays = [np.zeros(leaf.shape, dtype=f"V{DTYPE_BYTES[leaf.dtype]}") for leaf in manifest.leaves]
        for piece in manifest.pieces:
            stored = bytes_of[piece.pack][piece.start : piece.start + piece.nbytes]
            raw = zstandard.ZstdDecompressor().decompress(stored) if piece.codec == "zstd" else stored
            box = tuple(slice(at, at + extent) for at, extent in zip(piece.offset, piece.shape, strict=True))
            arrays[piece.leaf][box] = np.frombuffer(raw, dtype=arrays[piece.leaf].dtype).reshape(piece.shape)
        return _state(manifest, arrays)

    def _read(self, place: Place, key: str) -> bytes:
        data = place.store().get(key, max_bytes=_MOST_BYTES)
        place.seen.setdefault(key, _digest(data))
        return data

    def _compare_with_before(self, place: Place, listed: dict[str, int]) -> list[str]:
        """I2: what was read once has the same bytes for ever."""
        found = []
        store = place.store()
        for seq, (data, _) in enumerate(place.ledger.records, 1):
            if store.get(keys.record_key(seq), max_bytes=_MOST_BYTES) != data:
                found.append(f"I2 {place.name}: record {seq} has other bytes than before")
        for key in sorted(place.seen.keys() & listed.keys() - place.hurt.keys()):
            if _digest(store.get(key, max_bytes=_MOST_BYTES)) != place.seen[key]:
                found.append(f"I2 {place.name}: {key} has other bytes than before")
        return found

    # ---------------------------------------------------------------------------------------- what somebody was told

    def _look_at_acknowledgements(self) -> list[str]:
        found = []
        remote = self.places["remote"]
        for handle, first in self._story.handles:
            place = self.places[first]
            for outcome, where in ((handle.local, place), (handle.remote, remote)):
                if not outcome.done():
                    continue
                if (error := outcome.failure()) is None:
                    if outcome.result() is not None:
                        where.acknowledged.add(handle.snapshot_id)
                    continue
                if where is place and handle.snapshot_id in where.ledger.committed and _says_no(error):
                    found.append(f"I6 {where.name}: {handle.snapshot_id} was told to have failed, and is committed: {error}")
                if isinstance(error.__cause__, ForeignObject):
                    found.append(f"C24 {where.name}: {handle.snapshot_id}: its own object was taken for a foreign one: {error}")
        for place in self.places.values():
            lost = place.acknowledged - place.ledger.committed.keys()
            found += [f"{place.name}: {name} was acknowledged and is not committed" for name in sorted(lost)]
        return found

    def look_at_given_up(self) -> list[str]:
        """Where everything is sent, a snapshot that nobody will send (its future says None) needs no sending: C49, C60.

        Something later of its line is in the bucket, or the run has left its line.
        """
        found = []
        remote = self.places["remote"].ledger
        for handle, first in self._story.handles:
            if first == "remote" or not handle.has_remote or handle.snapshot_id in self._given_up:
                continue
            if not handle.remote.done() or handle.remote.failure() is not None or handle.remote.result() is not None:
                continue
            self._given_up.add(handle.snapshot_id)
            here = self.places[first].ledger
            if handle.snapshot_id not in here.line(here.tip) or handle.snapshot_id in remote.committed:
                continue
            later = any(here.is_behind(handle.snapshot_id, name) for name in remote.committed)
            continues = remote.tip is None or here.is_behind(remote.tip, handle.snapshot_id)
            if continues and not later:
                found.append(f"C49 {handle.snapshot_id} will not be sent, and nothing later of its line is in the bucket")
        return found

    def look_at_evicted(self) -> list[str]:
        """I9, C48: where everything is sent, what leaves a disk is in the bucket, or something later of its line is.

        Tools are told what to keep by whoever calls them.
        """
        found = []
        remote = self.places["remote"].ledger
        for place in self.places.values():
            ledger = place.ledger
            for seq in range(self._evictions_seen.get(place.name, 0), len(ledger.records)):
                record, before = ledger.records[seq][1], ledger.moments[seq]
                if place.is_remote or not isinstance(record, RetireRecord) or record.session is None:
                    continue
                for snapshot in record.snapshots:
                    name = original_of(snapshot)
                    sent = any(ledger.is_behind(name, other) for other in remote.committed)
                    wanted = name in ledger.line(before.tip) and (remote.tip is None or ledger.is_behind(remote.tip, name))
                    if wanted and not sent and not self._is_suspect(place, snapshot):
                        found.append(f"I9 {place.name}: {name} is retired, and neither it nor anything later is in the bucket")
            self._evictions_seen[place.name] = len(ledger.records)
        return found

    def _look_at_line(self, place: Place) -> list[str]:
        """I9: what was acknowledged is there, or something newer of its line is."""
        alive = {original_of(name) for name in place.ledger.live}
        for name in place.ledger.line(place.ledger.tip):
            if name in alive:
                break
            if name in place.acknowledged and name not in place.ledger.gone:
                return [f"I9 {place.name}: {name} was acknowledged, and neither it nor anything newer of its line is live"]
        return []

    # ---------------------------------------------------------------------------------------- restores

    def _look_at_restores(self, place: Place) -> list[str]:
        """An automatic choice goes on from the furthest that it may have."""
        found, ledger = [], place.ledger
        for seq, (_, record) in enumerate(ledger.records, 1):
            if not isinstance(record, ResumeRecord) or record.how != "auto" or id(record) in self._judged:
                continue
            self._judged.add(id(record))
            if place.is_remote:
                found += self._revives(ledger, ledger.moments[seq - 1].last_resume, original_of(record.target))
                continue
            best = self._best_here(place, seq, record)
            if best is not None and not ledger.is_behind(best, original_of(record.target)):
                found.append(f"{place.name}: record {seq} resumes {record.target}, and {best} was there")
        return found

    def _revives(self, ledger: Ledger, last: ResumeRecord | None, target: str) -> list[str]:
        """What the run was set back behind is resumed by nothing automatic."""
        saved = self._story.saves.get(target)
        if last is None or saved is None or ledger.is_behind(target, original_of(last.target)):
            return []
        name = parse_snapshot_id(target)
        since = name.session == last.session and name.counter >= last.next_save
        return (
            []
            if since or last.session in saved.continues
            else [f"{target} was given up, and an automatic restart goes on from it"]
        )

    def _best_here(self, place: Place, seq: int, record: ResumeRecord) -> str | None:
        """The furthest snapshot on this disk that the session had to take, None if it is not known for sure."""
        before = place.ledger.moments[seq - 1]
        there = self._remote_before(record)
        if record.remote and there is None:
            return None
        alive = {original_of(name): (name, commit) for name, commit in before.live.items()}
        for name in place.ledger.line(before.tip):
            if name not in alive or name in before.failed:
                continue
            snapshot, commit = alive[name]
            if self._is_suspect(place, snapshot):
                return None
            if there is None or self._continues(place, there, name, commit):
                return name
        return None

    def _remote_before(self, record: ResumeRecord) -> Moment | None:
        """None where it is not known, or where a user has chosen: a roll-back that failed half way is gone on with."""
        if not record.remote:
            return None
        ledger = self.places["remote"].ledger
        seq = ledger.resumes.get((record.session, record.number))
        if seq is None:
            return None
        _, there = ledger.records[seq - 1]
        return ledger.moments[seq - 1] if isinstance(there, ResumeRecord) and there.how == "auto" else None

    def _continues(self, place: Place, there: Moment, name: str, commit: CommitRecord) -> bool:
        """Does the local `name` go on where the bucket's line ends, with nobody in between?"""
        last = there.last_resume
        if last is None:
            return True
        if there.head is not None and not place.ledger.is_behind(there.head, name):
            return False
        target = original_of(last.target)
        mine = commit.origin == last.session and parse_snapshot_id(name).counter >= last.next_save
        if not place.ledger.is_behind(target, name) or not (mine or last.session in commit.continues):
            return False
        tip = there.tip or target
        return place.ledger.is_behind(tip, name)

    def _is_suspect(self, place: Place, snapshot: str) -> bool:
        """Was anything of it ever damaged or lost on purpose?"""
        known = place.sizes.get(snapshot)
        return known is None or bool((known.keys() | {keys.manifest_key(snapshot)}) & place.ever_hurt)


def garbage(place: Place) -> Iterator[str]:
    """Stored keys that no live snapshot needs."""
    named = {key for snapshot in place.ledger.live for key in place.sizes.get(snapshot, ())}
    for stat in place.store().list(keys.DATA_PREFIX):
        if stat.key not in named:
            yield stat.key
    for stat in place.store().list(keys.SNAPSHOTS_PREFIX):
        if keys.parse_snapshot_of(stat.key) not in place.ledger.live:
            yield stat.key


def _says_no(error: BaseException) -> bool:
    """Does it say that the save was surely not committed?"""
    return isinstance(error, SaveError) and not isinstance(error.__cause__, OutcomeUnknownError)


def _state(manifest: Manifest, arrays: list[np.ndarray]) -> State:
    found = {}
    for index, leaf in enumerate(manifest.leaves):
        source = index if leaf.alias_of < 0 else leaf.alias_of
        alias = None if leaf.alias_of < 0 else manifest.leaves[leaf.alias_of].path
        found[leaf.path] = Tensor(leaf.dtype, leaf.shape, arrays[source].tobytes(), alias)
    return found


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()

"""`Tier`: one tier to look at, load from, verify and collect, without a trainer.

The reading face, next to `Checkpointer`. It opens no session, so it fences nobody; it creates nothing, and a read-only directory and
credentials that may only read are enough for everything but `gc`, `pin` and `unpin`. These append to the log, so that they probe a
bucket before the first record, as a trainer does: one that ignores conditional puts would let two records take the same position. It
imports no torch until tensors are loaded, so that the command line starts in no time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from types import TracebackType
from typing import Self

from tieredckpt.arguments import check_reason
from tieredckpt.engine.arena import ArenaPool
from tieredckpt.engine.collector import Collected, Collector, usage_of
from tieredckpt.engine.handle import SnapshotInfo
from tieredckpt.engine.landing import Lander
from tieredckpt.engine.pins import append_everywhere
from tieredckpt.engine.probe_cache import Prover
from tieredckpt.engine.snapshots import describe, list_snapshots, read_manifest
from tieredckpt.engine.tier import OpenTier, TierName, open_existing
from tieredckpt.engine.verify import Progress, Verifier, VerifyReport
from tieredckpt.env import Env
from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.format import keys as stored_keys
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import CommitRecord, PinRecord, Record, UnpinRecord
from tieredckpt.format.tree_json import decode_tree
from tieredckpt.model.ids import is_snapshot_id
from tieredckpt.plan.gc import GcPlan
from tieredckpt.plan.keep import Keep
from tieredckpt.plan.lineage import current_line
from tieredckpt.plan.log import LogState
from tieredckpt.plan.policies import Retention
from tieredckpt.plan.reading import landed_pieces, plan_reading
from tieredckpt.plan.uploads import must_be_kept
from tieredckpt.plan.usage import Usage
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.local import LocalStore
from tieredckpt.store.multipart import UnfinishedUpload, has_multipart
from tieredckpt.store.url import open_store

_log = logging.getLogger(__name__)

_ABORT_ROUNDS = 3
"""Parts that were on their way can arrive after an upload was aborted."""


class Tier:
    """One tier of a run. Make it with `Tier.open`; use it as a context manager, or `close` it.

    Every method reads the log to its end first, so answers are as of the call. They raise StoreError when the tier does not answer,
    and CorruptionError or FormatError for damage in what they had to read.
    """

    def __init__(self, tier: OpenTier, env: Env, settings: Settings, *, allow_unfenced: bool = False) -> None:
        self._tier = tier
        self._env = env
        self._settings = settings
        self._allow_unfenced = allow_unfenced
        self._proven = not tier.is_remote

    @classmethod
    def open(
        cls,
        url_or_path: str | os.PathLike[str],
        storage_options: Mapping[str, object] | None = None,
        *,
        allow_unfenced: bool = False,
    ) -> Self:
        """The tier at a directory or URL; `storage_options` and `allow_unfenced` as for `Checkpointer`.

        NotFoundError where there is no `format.json`; UsageError for what cannot be a tier; UnsupportedVersionError for a newer format.
        """
        env, settings = Env(), Settings()
        store = open_store(url_or_path, storage_options, settings=settings, env=env, create=False)
        try:
            return cls(open_existing(_name_of(store), store, env, settings), env, settings, allow_unfenced=allow_unfenced)
        except BaseException:
            store.close()
            raise

    @property
    def name(self) -> TierName:
        """Which of the two it is: "local" for a directory that is a node's own, otherwise "remote"."""
        return self._tier.name

    @property
    def label(self) -> str:
        """Where it is, without secrets."""
        return self._tier.store.label

    @property
    def run(self) -> str:
        """The run that lives here. Two tiers with the same one belong together."""
        return self._tier.run

    def state(self) -> LogState:
        """What the log says now: for tools."""
        return self._tier.log.refresh()

    # ---------------------------------------------------------------------------------------- snapshots

    def snapshots(self, all: bool = False) -> list[SnapshotInfo]:
        """Live snapshots of the current lineage, oldest first; `all`: of the other lineages too (`current` tells them apart)."""
        return list_snapshots(*self._both(self.state()), everything=all)

    def latest(self) -> SnapshotInfo | None:
        """The head: the live snapshot furthest along the current lineage. Else the newest live one, else None."""
        state = self.state()
        newest = state.head or state.newest_live
        return None if newest is None else self._describe(state.live[newest], state)

    def find(self, snapshot: str | None = None, step: int | None = None) -> SnapshotInfo:
        """The live snapshot with this id (or a rebase of it), or the newest of `step` on the current lineage, or the latest.

        NotFoundError if there is none, UsageError for both or for a text that is no id.
        """
        state = self.state()
        return self._describe(_find(state, snapshot, step, self.label), state)

    def records(self, after: int = 0) -> Iterator[Record]:
        """The log's records behind number `after`, in order."""
        return self._tier.log.records(after)

    def manifest(self, snapshot: str) -> Manifest:
        """What a live snapshot consists of. NotFoundError if it is not live here."""
        return self._manifest(_find(self.state(), snapshot, None, self.label))

    def load(self, snapshot: str | None = None, step: int | None = None, keys: Sequence[str] | None = None) -> object:
        """The state of a snapshot, chosen as by `find`: the tree with whole tensors on the CPU, every byte verified.

        keys  path patterns of the part to load, e.g. ["model/*"]; UsageError for one that names nothing
        """
        # The one place of this module that needs torch: everything else has to work, and start quickly, without it.
        from tieredckpt.pytorch.whole import select, wanted_leaves, whole_tree

        manifest = self._manifest(_find(self.state(), snapshot, step, self.label))
        tree: object = decode_tree(manifest.tree)
        if keys is not None:
            tree = select(tree, keys)
        plan = plan_reading(manifest, wanted_leaves(tree, manifest.leaves))
        with (
            ArenaPool(self._env, 1).acquire(plan.arena_bytes) as arena,
            self._env.executor("load", self._settings.upload_threads) as pool,
        ):
            self._lander(manifest, pool).land(plan, arena.view)
            return whole_tree(tree, manifest.leaves, landed_pieces(plan, arena.view), pool)

    # ---------------------------------------------------------------------------------------- verify, collect

    def verify(
        self, snapshots: Collection[str] | None = None, *, quick: bool = False, progress: Progress | None = None
    ) -> VerifyReport:
        """Check every byte of the log and of all live snapshots, or of those with the ids given (NotFoundError if not live).

        quick     of packs, presence and sizes only
        progress  told of each number of bytes as they are checked, from several threads

        Damage is in the report, never raised. StoreError if the tier does not answer: then nothing is known.
        """
        for snapshot in snapshots or ():
            if not is_snapshot_id(snapshot):
                raise UsageError(f"not a snapshot id: {snapshot[:120]!r}; `tieredckpt ls` shows them")
        report = Verifier(self._tier, self._env, self._settings, progress).verify(snapshots, quick=quick)
        missing = set(snapshots or ()) - {checked.snapshot for checked in report.snapshots}
        if missing:
            raise NotFoundError(f"{self.label} has no live snapshot {min(missing)}")
        return report

    def plan_gc(self, retention: Retention | Keep, remote: Tier | None = None) -> GcPlan:
        """What a collection would retire, condemn and delete, and why. Changes nothing.

        remote  the other tier of a local one. Without it nothing of a run that has a bucket is retired on a local tier, because
                what the bucket still lacks is not known here (I9).
        """
        return self._collector(retention, remote).plan()

    def gc(self, plan: GcPlan) -> Collected:
        """Execute a plan of `plan_gc`. What the log does not admit any more is left out; nothing live can be deleted (I8).

        StoreError, with nothing done, for a bucket that ignores conditional puts, unless it was opened with `allow_unfenced`.
        """
        if plan.tier != self.name:
            raise UsageError(f"this plan is for a {plan.tier} tier, and {self.label} is a {self.name} one")
        if not plan.empty:
            self._prove()
        return self._collector(Retention(), None).execute(plan)

    def usage(self) -> Usage:
        """Whose bytes are stored: logical, unique, shared and reclaimable ones, by snapshot and together.

        Reads the log, live manifests and a listing. CorruptionError or FormatError if a live manifest cannot be read.
        """
        return usage_of(self._tier)

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        """Multipart uploads that other tools have left below this root, which no listing shows; () where there is no such thing.

        This library makes none. StoreError where the bucket cannot or may not say.
        """
        store = self._tier.store
        return tuple(store.unfinished_uploads()) if has_multipart(store) else ()

    def abort_uploads(self, uploads: Sequence[UnfinishedUpload]) -> tuple[UnfinishedUpload, ...]:
        """Throw these away; returns what is left of them. One that another tool is sending right now fails there. StoreError."""
        store = self._tier.store
        if not has_multipart(store):
            raise UsageError(f"{self.label} has no multipart uploads")
        for _ in range(_ABORT_ROUNDS):
            for upload in uploads:
                store.abort_upload(upload)
            there = frozenset(upload.upload_id for upload in store.unfinished_uploads())
            uploads = [upload for upload in uploads if upload.upload_id in there]
        return tuple(uploads)

    # ---------------------------------------------------------------------------------------- pin

    def pin(self, snapshot: str, reason: str = "") -> None:
        """Keep a live snapshot on this tier, whatever retention says, until it is unpinned. A pinned one stays as it was pinned.

        NotFoundError if it is not live here, UsageError for a text that is no id or a reason that a record cannot hold; StoreError,
        before anything is appended, for a bucket that ignores conditional puts, unless it was opened with `allow_unfenced`.
        """
        self._append(snapshot, reason, lambda found: PinRecord(snapshot=found, reason=reason))

    def unpin(self, snapshot: str, reason: str = "") -> None:
        """Let retention decide about the snapshot again; nothing happens to one that is not pinned. Errors as for `pin`."""
        self._append(snapshot, reason, lambda found: UnpinRecord(snapshot=found, reason=reason))

    def _append(self, snapshot: str, reason: str, record: Callable[[str], PinRecord | UnpinRecord]) -> None:
        check_reason(reason)
        _named(self.state(), snapshot, self.label)  # what cannot be pinned needs no probe
        self._prove()
        append_everywhere((self._tier,), snapshot, record)

    def _prove(self) -> None:
        """StoreError for a bucket whose conditional puts a log must not stand on. Asked once, before the first record of this tool."""
        if not self._proven:
            proven = Prover(self._env, None, allow_unfenced=self._allow_unfenced).prove(self._tier.store)
            for warning in proven.warnings:
                _log.warning("%s", warning)
            self._proven = True

    def _collector(self, retention: Retention | Keep, remote: Tier | None) -> Collector:
        if remote is not None and (self.name != "local" or remote.name != "remote" or remote.run != self.run):
            raise UsageError(f"{remote.label} is not the remote tier of {self.label}")
        policy = retention
        if isinstance(policy, Retention):
            policy = policy.local if self.name == "local" else policy.remote

        def protected(state: LogState) -> Mapping[str, str]:
            if remote is not None:
                return dict.fromkeys(must_be_kept(state, remote.state(), "all"), "not in the bucket yet")
            if self.name == "local" and state.last_resume is not None and state.last_resume.remote is not None:
                return dict.fromkeys(state.live, "the run has a bucket, and what that still lacks is not known here")
            return {}

        return Collector(self._tier, policy, session=None, protected=protected, env=self._env)

    def close(self) -> None:
        """Release connections and descriptors. Idempotent."""
        self._tier.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Tier({self.name}, {self.label}, run {self.run})"

    def _manifest(self, record: CommitRecord) -> Manifest:
        manifest, _ = read_manifest(self._tier.store, record, self._tier.run)
        return manifest

    def _lander(self, manifest: Manifest, pool: Executor) -> Lander:
        local, remote = (None, self._tier) if self._tier.is_remote else (self._tier, None)
        return Lander(manifest=manifest, local=local, remote=remote, verify="digest", remote_out_of_reach=False, pool=pool)

    def _both(self, state: LogState) -> tuple[LogState | None, LogState | None]:
        """The state in its place of (local, remote)."""
        return (None, state) if self._tier.is_remote else (state, None)

    def _describe(self, record: CommitRecord, state: LogState) -> SnapshotInfo:
        return describe(record, *self._both(state))


def _name_of(store: ObjectStore) -> TierName:
    """A directory may be either tier (`file:///…`): a local one has a node, whose identity is in `node.json`."""
    own = isinstance(store, LocalStore) and store.stat(stored_keys.NODE_KEY) is not None
    return "local" if own else "remote"


def _find(state: LogState, snapshot: str | None, step: int | None, label: str) -> CommitRecord:
    if snapshot is not None and step is not None:
        raise UsageError("give snapshot= or step=, not both")
    if snapshot is not None:
        return _named(state, snapshot, label)
    if step is not None:
        line = current_line(state)
        found = next((name for name in line if state.live[name].step == step), None)
        if found is None:
            raise NotFoundError(f"{label} has no live snapshot of step {step} on the current lineage{_elsewhere(state, step)}")
        return state.live[found]
    newest = state.head or state.newest_live
    if newest is None:
        raise NotFoundError(f"{label} has no live snapshot")
    return state.live[newest]


def _named(state: LogState, snapshot: str, label: str) -> CommitRecord:
    if not is_snapshot_id(snapshot):
        raise UsageError(f"not a snapshot id: {snapshot[:120]!r}; `tieredckpt ls` shows them")
    found = state.live_as(snapshot)
    if found is not None:
        return state.live[found]
    if state.known(snapshot):
        raise NotFoundError(f"{label}: snapshot {snapshot} was retired; its data may be deleted already")
    raise NotFoundError(f"{label}: snapshot {snapshot} was never committed here")


def _elsewhere(state: LogState, step: int) -> str:
    others = [name for name, record in state.live.items() if record.step == step]
    return f"; of other lineages: {', '.join(others[:5])}" if others else ""

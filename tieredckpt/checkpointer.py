"""`Checkpointer`: what a training script holds. Wires torch values (`pytorch`) to the engine, and checks every argument.

The order of a save can be read in `save`, the order of a restore in `restore`; everything behind them that needs no torch is
`engine.run.Run`.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from tieredckpt.engine.collector import Collected
from tieredckpt.engine.handle import SaveHandle, SnapshotInfo
from tieredckpt.engine.restorer import Fresh, Landed
from tieredckpt.engine.run import STALLED_AFTER_S, Run, RunOptions, RunStatus
from tieredckpt.env import Env
from tieredckpt.errors import MismatchError, NotYetAvailableError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import metrics_to_json
from tieredckpt.model.ids import MAX_STEP
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.gc import GcPlan
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.policies import Every, Retention
from tieredckpt.plan.reading import landed_pieces
from tieredckpt.preemption import Preemption
from tieredckpt.pytorch.capture import capture
from tieredckpt.pytorch.load import load
from tieredckpt.pytorch.match import Match, match
from tieredckpt.pytorch.ranks import world_size
from tieredckpt.pytorch.stage import copy_out
from tieredckpt.pytorch.whole import select, wanted_leaves, whole_tree
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.url import open_store

_log = logging.getLogger(__name__)

Level = Literal["strict", "training", "weights"]

_AFTER_EXCEPTION_S = 60.0


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What `restore` did.

    step         completed optimizer steps: where to go on; 0 when fresh
    snapshot     id of the restored snapshot; None when fresh
    fresh        nothing was restored: the run is new, or begins anew
    state        the whole restored tree; None when fresh
    sources      raw bytes read from each tier: {"local": …, "remote": …}
    offline      the bucket was out of reach, and the local tier decided
    rejected     snapshots that were passed over, each with the reason
    differences  allowed by name, hyper-parameters that were overwritten, buffers that no state dict covers, and the environment's
    timings      seconds: "landed" (chosen, read and verified), "loaded"
    """

    step: int
    snapshot: str | None
    fresh: bool
    state: object
    level: Level
    sources: Mapping[str, int]
    offline: bool
    rejected: tuple[tuple[str, str], ...]
    differences: tuple[str, ...]
    timings: Mapping[str, float] = field(default_factory=dict)


class Checkpointer:
    """Saves and restores the state of one training run on a local and a remote tier. See the README for the ten lines.

    local            directory on a fast disk, created if missing; None: remote only
    remote           URL of the durable tier (`s3://bucket/prefix`, `file:///…`, `memory://name`); None: local only
    state            what `save` and `restore` take if they are given no state: a `TrainState`, or any nesting of dicts, lists and
                     tuples with tensors, arrays, plain values and objects that have `state_dict` and `load_state_dict`
    every            when `maybe_save` saves
    retention        what each tier keeps
    storage_options  as in fsspec: endpoint_url, key, secret, token, profile, client_kwargs
    node             a name for this node, for people
    upload           "all" snapshots, the "latest" when behind, or those that an `Every` picks
    start            "restore", or "fresh": the first `restore` starts a new lineage even if there are snapshots
    max_staged       staged copies at a time; a further save waits
    verify           "digest" (cryptographic) or "crc" on restore
    on_save_error    "raise" at the next call, or "warn"
    allow_unfenced   accept a bucket without conditional puts: nothing keeps two jobs apart then

    Opens or creates both tiers (StoreError, UsageError); the session opens, and fences every earlier one, at the first `restore`
    or `save`. One thread at a time uses it; in a forked child (a data loader's worker) every call raises UsageError.
    """

    def __init__(
        self,
        local: str | os.PathLike[str] | None,
        remote: str | None = None,
        *,
        state: object = None,
        every: Every | None = None,
        retention: Retention | None = None,
        incremental: object = None,
        storage_options: Mapping[str, object] | None = None,
        process_group: object = None,
        node: str | None = None,
        upload: Literal["all", "latest"] | Every = "all",
        uploader: Literal["thread", "external"] = "thread",
        start: Literal["restore", "fresh"] = "restore",
        max_staged: int = 1,
        verify: Literal["digest", "crc"] = "digest",
        on_save_error: Literal["raise", "warn"] = "raise",
        allow_unfenced: bool = False,
        settings: Settings | None = None,
    ) -> None:
        _refuse_later_work(incremental=incremental, process_group=process_group, uploader=uploader)
        _check_choice("upload", upload, ("all", "latest"), Every)
        _check_choice("start", start, ("restore", "fresh"))
        _check_choice("verify", verify, ("digest", "crc"))
        _check_choice("on_save_error", on_save_error, ("raise", "warn"))
        _check_choice("every", every, (None,), Every)
        _check_choice("retention", retention, (None,), Retention)
        self._env = Env()
        self._settings = settings or Settings()
        self._state = state
        self._every = every
        self._warn = on_save_error == "warn"
        self._pid = os.getpid()
        self._closed = False
        options = RunOptions(
            retention=retention or Retention(),
            upload=upload,
            start=start,
            max_staged=max_staged,
            verify=verify,
            allow_unfenced=allow_unfenced,
            node_name=node or "",
            settings=self._settings,
        )
        stores = self._open_stores(local, remote, storage_options)
        try:
            self._run = Run(*stores, options, self._env)
        except BaseException:
            for store in stores:
                if store is not None:
                    store.close()
            raise
        self._last_step = 0
        self._last_save = self._env.monotonic()
        _unclosed[id(self._run)] = self._run

    def _open_stores(
        self, local: str | os.PathLike[str] | None, remote: str | None, storage_options: Mapping[str, object] | None
    ) -> tuple[ObjectStore | None, ObjectStore | None]:
        if remote is None and storage_options:
            raise UsageError("storage_options= belong to the remote tier, and there is none")
        here = None if local is None else open_store(local, None, settings=self._settings, env=self._env)
        there = None if remote is None else open_store(remote, storage_options, settings=self._settings, env=self._env)
        if here is not None and there is not None and here.label == there.label:
            raise UsageError(f"both tiers are in the same place: {here.label}")
        return here, there

    # ---------------------------------------------------------------------------------------- save

    def save(
        self,
        step: int,
        state: object = None,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        blocking: bool = False,
    ) -> SaveHandle:
        """Save the state at `step` (completed optimizer steps). Returns when it is staged: it may change at once.

        blocking  return when the snapshot is durable on the first tier, and raise if it is not
        metrics   numbers by name, tags: words; shown by `ls` and used by retention

        UsageError for a state that cannot be stored, naming the path, before anything is written. FencedError when a later session
        owns the run. A failure of an earlier save in the background is raised here, once, before anything else is done.
        """
        self._check_usable()
        self._tell_failure()
        _check_step(step)
        _check_labels(metrics, tags)
        began, saved_at = self._env.monotonic(), self._env.wall_time()
        captured = capture(self._target(state))
        layout = lay_out(captured.content.leaves, self._settings)
        handle = self._run.begin_save(step, began)
        arena = self._run.stage(layout)
        handle.timings["waited"] = self._env.monotonic() - began
        try:
            copy_out(captured, layout, arena.view, self._run.copying)
        except BaseException:
            arena.release()
            raise
        handle.timings["staged"] = self._env.monotonic() - began
        self._run.submit(handle, captured.content, layout, arena, saved_at=saved_at, metrics=metrics or {}, tags=tuple(tags))
        self._last_step, self._last_save = step, self._env.monotonic()
        if blocking:
            handle.local.result()
        return handle

    def should_save(self, step: int) -> bool:
        """Is a save due at `step`, by the policy given as `every=`?"""
        self._check_usable()
        if self._every is None:
            raise UsageError("maybe_save and should_save need every=, for example Checkpointer(..., every=Every(steps=500))")
        seconds = self._env.monotonic() - self._last_save
        return self._every.due(last_step=self._last_step, step=step, seconds_since_save=seconds)

    def maybe_save(
        self, step: int, state: object = None, *, metrics: Mapping[str, float] | None = None, tags: Sequence[str] = ()
    ) -> SaveHandle | None:
        """`save`, if it is due; otherwise None."""
        return self.save(step, state, metrics=metrics, tags=tags) if self.should_save(step) else None

    # ---------------------------------------------------------------------------------------- restore

    def restore(
        self,
        state: object = None,
        *,
        step: int | None = None,
        snapshot: str | None = None,
        level: Level = "strict",
        allow: Sequence[str] = (),
        keys: Sequence[str] | None = None,
        rehydrate: bool = True,
        streaming: bool = False,
    ) -> RestoreReport:
        """Go on from the newest snapshot of the run (or of `step`, or from `snapshot`), all or nothing.

        level      "strict": every component bit for bit, else MismatchError with all differences; "training": without RNG and data;
                   "weights": models only
        allow      path patterns of differences to accept; keys: path patterns to restrict restoring to
        rehydrate  fill the local tier again with what came from the bucket

        Tensors and arrays of the target are overwritten in place once every byte is verified; a restore that fails before that
        leaves the target as it was. On a run without snapshots the report is `fresh`, with step 0. An outage is never taken for an
        empty run: StoreError, unless the local tier can go on (`report.offline`). May be called again: a roll-back.
        """
        self._check_usable()
        if streaming:
            raise NotYetAvailableError("restore(streaming=True) is not there yet")
        wanted = Wanted(step=step, snapshot=snapshot)
        target = state if state is not None else self._state
        _check_level(level)
        began = self._env.monotonic()
        matching = _Matching(target, level, allow, keys)
        result = self._run.restore(wanted, matching)
        if isinstance(result, Fresh):
            return self._restored(RestoreReport(0, None, True, None, level, {}, False, tuple(result.rejected), ()))
        landed_at = self._env.monotonic()
        try:
            restored = matching.load(result)
        except BaseException:
            result.arena.release()
            raise
        timings = {"landed": landed_at - began, "loaded": self._env.monotonic() - landed_at}
        self._run.refill(result, rehydrate=rehydrate)
        return self._restored(
            RestoreReport(
                step=result.manifest.step,
                snapshot=result.candidate.snapshot,
                fresh=False,
                state=restored,
                level=level,
                sources=dict(result.landing.sources),
                offline=self._run.session.offline,
                rejected=tuple(result.rejected),
                differences=matching.remarks(),
                timings=timings,
            )
        )

    def _restored(self, report: RestoreReport) -> RestoreReport:
        self._last_step, self._last_save = report.step, self._env.monotonic()
        return report

    # ---------------------------------------------------------------------------------------- everything else

    def wait(self, tier: Literal["local", "remote"] = "remote", timeout: float | None = None) -> None:
        """Until everything saved so far is on `tier` (a run without remote: local). StoreError after `timeout` seconds."""
        self._check_usable()
        _check_choice("tier", tier, ("local", "remote"))
        self._run.wait(tier, timeout)
        self._tell_failure()

    def snapshots(self, all: bool = False) -> list[SnapshotInfo]:
        """Live snapshots of the current lineage, oldest first; `all`: of the other lineages too (`current` tells them apart)."""
        self._check_usable()
        return self._run.snapshots(everything=all)

    def status(self) -> RunStatus:
        """Where this run stands: session, staged copies, newest snapshot and lag of each tier, what goes wrong."""
        self._check_usable()
        return self._run.status()

    def gc(self, dry_run: bool = False) -> dict[str, GcPlan | Collected]:
        """Collect both tiers now, by the retention policy; `dry_run`: only say what would be done and why."""
        self._check_usable()
        return self._run.gc(dry_run=dry_run)

    def pin(self, snapshot: str, reason: str = "") -> None:
        """Keep a snapshot on every tier that has it until it is unpinned. NotFoundError if none has."""
        self._check_usable()
        self._run.pin(snapshot, reason)

    def unpin(self, snapshot: str) -> None:
        """Let retention decide about the snapshot again."""
        self._check_usable()
        self._run.unpin(snapshot)

    def preemption(self, signals: Sequence[int] | None = None, grace_s: float = 30.0) -> Preemption:
        """A context manager that turns a signal into a flag and a deadline; it never saves inside the handler."""
        self._check_usable()
        return Preemption(self._env, signals, grace_s)

    def close(self, timeout: float | None = None) -> None:
        """Finish what was saved, then release everything.

        What is staged becomes local in any case; then the bucket is waited for as long as something arrives there every 5 minutes,
        at most `timeout` seconds (StoreError that names what is missing; the next process goes on with it).
        """
        self._close(STALLED_AFTER_S, timeout)

    def _close(self, patience_s: float, timeout_s: float | None) -> None:
        if self._closed:
            return
        self._check_usable()
        try:
            self._run.wait("local")
            self._run.wait_while_moving(patience_s, timeout_s)
        finally:
            self._closed = True
            _unclosed.pop(id(self._run), None)
            self._run.close()
        self._tell_failure()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return self.close()
        try:
            self._close(_AFTER_EXCEPTION_S, _AFTER_EXCEPTION_S)
        except Exception as problem:  # the first exception is the one to see
            error.add_note(f"tieredckpt, while closing: {type(problem).__name__}: {problem}")
        return None

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("this Checkpointer belongs to the parent process: do not use it in a forked child")
        if self._closed:
            raise UsageError("this Checkpointer is closed")

    def _target(self, state: object) -> object:
        target = state if state is not None else self._state
        if target is None:
            raise UsageError("give a state: Checkpointer(..., state=...) or save(step, state)")
        return target

    def _tell_failure(self) -> None:
        failure = self._run.take_failure()
        if failure is None:
            return
        if not self._warn:
            raise failure
        _log.warning("%s", failure)


@dataclass(slots=True)
class _Matching:
    """Compares a target with whichever snapshot the engine chooses, and loads it in the end. Without a target: the tree alone."""

    target: object
    level: Level
    allow: Sequence[str]
    keys: Sequence[str] | None
    found: Match | None = None
    tree: object = None

    def __call__(self, manifest: Manifest, tree: object) -> Sequence[int]:
        if self.target is None:
            self.tree = tree if self.keys is None else select(tree, self.keys)
            return wanted_leaves(self.tree, manifest.leaves)
        self.found = match(self.target, manifest, tree, level=self.level, allow=self.allow, keys=self.keys)
        if self.found.differences:
            raise MismatchError(
                f"snapshot {manifest.snapshot} does not fit: {self.found.summary()}", [str(d) for d in self.found.differences]
            )
        return self.found.wanted

    def load(self, landed: Landed) -> object:
        pieces = landed_pieces(landed.plan, landed.arena.view)
        if self.found is None:
            return whole_tree(self.tree, landed.manifest.leaves, pieces)
        return load(self.found, pieces)

    def remarks(self) -> tuple[str, ...]:
        if self.found is None:
            return ()
        found = self.found
        return (
            *(f"allowed: {difference}" for difference in found.allowed),
            *(f"overwritten: {path}" for path in found.overwritten),
            *(f"not in any state dict, left as it is: {path}" for path in found.uncovered),
            *(f"environment: {difference}" for difference in found.environment_differences),
        )


def _check_choice(name: str, value: object, choices: tuple[object, ...], kind: type | None = None) -> None:
    if kind is not None and isinstance(value, kind):
        return
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        allowed = [repr(choice) for choice in choices] + ([kind.__name__] if kind is not None else [])
        raise UsageError(f"{name}= takes {', '.join(allowed)}; got {value!r}")


def _check_level(level: str) -> None:
    _check_choice("level", level, ("strict", "training", "weights"))


def _check_step(step: int) -> None:
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise UsageError(f"a step is an int from 0 to {MAX_STEP} (completed optimizer steps), got {step!r}")


def _check_labels(metrics: Mapping[str, float] | None, tags: Sequence[str]) -> None:
    if isinstance(tags, str) or any(not isinstance(tag, str) for tag in tags):
        raise UsageError(f"tags= takes a sequence of strings, got {tags!r}")
    metrics_to_json(metrics or {})


def _refuse_later_work(*, incremental: object, process_group: object, uploader: str) -> None:
    """What the interface has and this version does not."""
    if incremental is not None:
        raise NotYetAvailableError("incremental= is not there yet: every save is a full one")
    if process_group is not None or world_size() > 1:
        raise NotYetAvailableError("many ranks are not there yet: this version saves and restores one process")
    if uploader == "external":
        raise NotYetAvailableError('uploader="external" is not there yet: this process uploads in a thread')
    _check_choice("uploader", uploader, ("thread",))


_unclosed: dict[int, Run] = {}
_process = os.getpid()


@atexit.register
def _finish_local_work() -> None:
    """A Checkpointer that nobody closed: staged saves become local; the bucket is not waited for."""
    if os.getpid() != _process:  # a forked child has its parent's entries and none of its threads
        return
    for run in list(_unclosed.values()):
        run.wait("local")
        while (failure := run.take_failure()) is not None:
            _log.error("%s", failure)

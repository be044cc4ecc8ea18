"""`Checkpointer`: what a training script holds. Wires torch values (`pytorch`) to the engine, and checks every argument.

The order of a save can be read in `save`, the order of a restore in `restore`; everything behind them that needs no torch is
`engine.run.Run`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Literal, Self

from torch.distributed import ProcessGroup

from tieredckpt import unclosed
from tieredckpt.arguments import (
    check_choice,
    check_kind,
    check_labels,
    check_reason,
    check_seconds,
    check_step,
    check_uploader,
    refuse_late_ranks,
)
from tieredckpt.engine.collector import Collected
from tieredckpt.engine.handle import SaveHandle, SnapshotInfo
from tieredckpt.engine.joint_run import JointRun
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.restorer import Fresh
from tieredckpt.engine.run import STALLED_AFTER_S, Run
from tieredckpt.engine.run_options import RunOptions, RunStatus
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import CapacityError, NotYetAvailableError, TieredCheckpointError, UsageError, in_short
from tieredckpt.matching import Matching
from tieredckpt.opening import open_board, open_stores
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.gc import GcPlan
from tieredckpt.plan.layout import SaveLayout
from tieredckpt.plan.policies import Every, Incremental, Retention
from tieredckpt.preemption import Preemption
from tieredckpt.pytorch.capture import Captured, capture
from tieredckpt.pytorch.cycles import cycle_collection_paused
from tieredckpt.pytorch.objects import LEVELS, Level
from tieredckpt.pytorch.per_rank import OnResize
from tieredckpt.pytorch.ranks import world_size
from tieredckpt.pytorch.stage import copy_out
from tieredckpt.restored import RestoreReport
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore

_log = logging.getLogger(__name__)

_AFTER_EXCEPTION_S = 60.0
_LEAST_PATIENCE_S = 1.0


class Checkpointer:
    """Saves and restores the state of one training run on a local and a remote tier. See the README for the ten lines.

    local            directory on a fast disk, created if missing; None: remote only
    remote           URL of the durable tier (`s3://bucket/prefix`, `file:///…`, `memory://name`); None: local only
    state            what `save` and `restore` take if they are given no state: a `TrainState`, or any nesting of dicts, lists and
                     tuples with tensors, arrays, plain values and objects that have `state_dict` and `load_state_dict`
    every            when `maybe_save` saves
    retention        what each tier keeps
    incremental      an `Incremental`: pieces that have not changed since the last save are not written again
    storage_options  as in fsspec: endpoint_url, key, secret, token, profile, client_kwargs
    node             a name for this node, for people
    upload           "all" snapshots, the "latest" when behind, or those that an `Every` picks
    uploader         "thread": of this process; "external": `tieredckpt uploader LOCAL REMOTE`, a process beside it that outlives it.
                     This one then asks the bucket now and then what has arrived; give that one the same `upload`
    start            "restore", or "fresh": the first `restore` starts a new lineage even if there are snapshots
    max_staged       staged copies at a time; a further save waits
    verify           "digest" (cryptographic) or "crc" on restore
    on_save_error    "raise" at the next call, or "warn": `status` counts them
    allow_unfenced   accept a bucket without conditional puts: nothing keeps two jobs apart then, which is said wherever it shows
    settings         sizes, digests, parallelism and deadlines

    process_group    whose ranks are the job; None: the default one of torch.distributed if it is initialized, else this process alone

    In a job of several ranks, all make it, and all make the same calls of `restore`, `save` (or `maybe_save`) and `close` in the same
    order. Ranks with the same `local` directory are a node. RankFailedError names the ranks that failed or were not heard of within
    `Settings.rank_timeout_s`; it fails that call, or that save, alone.

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
        retention: Retention = Retention(),
        incremental: Incremental | None = None,
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
        settings: Settings = Settings(),
    ) -> None:
        self._env = Env()
        timeout_s = settings.rank_timeout_s if isinstance(settings, Settings) else Settings().rank_timeout_s
        board = open_board(process_group, timeout_s, self._env)
        self._alone_by_default = board is None and process_group is None
        self._rank, self._ranks = (0, 1) if board is None else (board.rank, board.size)
        self._group = process_group if isinstance(process_group, ProcessGroup) else None

        def stores() -> tuple[ObjectStore | None, ObjectStore | None]:
            check_kind("settings", settings, Settings, optional=False)
            check_kind("local", local, str, os.PathLike)
            check_kind("remote", remote, str)
            check_kind("every", every, Every)
            check_kind("retention", retention, Retention, optional=False)
            check_kind("incremental", incremental, Incremental)
            check_kind("storage_options", storage_options, Mapping)
            check_kind("node", node, str)
            check_kind("allow_unfenced", allow_unfenced, bool, optional=False)
            check_choice("upload", upload, ("all", "latest"), kind=Every)
            check_uploader(uploader, local, remote)
            check_choice("start", start, ("restore", "fresh"))
            check_choice("verify", verify, ("digest", "crc"))
            check_choice("on_save_error", on_save_error, ("raise", "warn"))
            return open_stores(local, remote, storage_options, settings, self._env)

        self._state = state
        self._every = every
        self._warn = on_save_error == "warn"
        self._pid = os.getpid()
        self._closed = False
        self._last_status: RunStatus | None = None
        self._turn = threading.Lock()
        options = RunOptions(
            retention=retention,
            upload=upload,
            uploader=uploader,
            start=start,
            max_staged=max_staged,
            every=every,
            verify=verify,
            incremental=incremental,
            allow_unfenced=allow_unfenced,
            node_name=node or "",
            settings=settings,
        )
        self._run = Run.open(stores, options, self._env) if board is None else JointRun(stores, options, self._env, board)
        self._last_step = 0
        self._has_gone_back = False
        self._last_save = self._env.monotonic()
        unclosed.note(self._run)

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
        metrics   numbers by name, tags: words; shown by `ls` and used by retention. Of many ranks those of rank 0 count

        UsageError for a state that cannot be stored, naming the path, before anything is written. FencedError when a later session
        owns the run. CapacityError for want of memory or of room on the local tier, before anything is copied. A failure of an
        earlier save in the background is raised here, once, before anything else is done.
        """
        with self._alone("save"):
            earlier = self._next_failure()
            if earlier is not None and self._ranks == 1:
                raise earlier
            try:
                with self._told_to_ranks(self._run.refuse_save):
                    check_step(step)
                    check_labels(metrics, tags)
                handle = self._save_now(step, state, blocking, metrics=metrics or {}, tags=tuple(tags))
            except BaseException as error:
                if earlier is not None and error is not earlier:  # nobody will be told of it again
                    error.add_note(f"tieredckpt, in the background: {type(earlier).__name__}: {earlier}")
                raise
            if earlier is not None:  # not before: the others are told of this save, or would wait for this rank
                raise earlier
        if blocking:
            handle.local.result()
        return handle

    def _save_now(
        self, step: int, state: object, blocking: bool, *, metrics: Mapping[str, float], tags: tuple[str, ...]
    ) -> SaveHandle:
        began, saved_at = self._env.monotonic(), self._env.wall_time()
        if self._ranks == 1:  # what cannot be saved opens no session
            captured, layout = self._look_at(state)
            handle = self._run.begin_save(step, began)
        else:  # all ranks count their saves alike, also those that fail
            self._last_step, self._last_save = step, began
            handle = self._run.begin_save(step, began)
            with self._told_to_ranks(partial(self._run.cannot_save, handle)):
                captured, layout = self._look_at(state)
        with self._told_to_ranks(partial(self._run.cannot_save, handle)):
            self._last_step, self._last_save = step, began  # also of one that is refused: the next one is due when it is due
            try:
                arena = self._run.stage(layout, self._run.volume(captured.content, layout))
            except CapacityError as error:
                if blocking or not self._warn:
                    raise
                self._run.cannot_save(handle, error)
                return self._run.refused(handle, error)
            handle.timings["waited"] = self._env.monotonic() - began
            try:
                copy_out(captured, layout, arena.view, self._run.copying)
            except BaseException:
                arena.release()
                raise
        handle.timings["staged"] = self._env.monotonic() - began
        self._run.submit(handle, captured.content, layout, arena, saved_at=saved_at, metrics=metrics, tags=tags)
        self._last_save = self._env.monotonic()
        return handle

    def _look_at(self, state: object) -> tuple[Captured, SaveLayout]:
        with cycle_collection_paused():
            captured = capture(self._target(state), self._rank, self._ranks, self._group)
            if self._ranks == 1:
                captured.content.refuse_incomplete()
            return captured, self._run.lay_out(captured.content.leaves, captured.content.held)

    @contextmanager
    def _told_to_ranks(self, refuse: Callable[[BaseException], None]) -> Iterator[None]:
        """A call that all ranks make, and that fails on this one before it takes part, is told to the others, who would wait for it."""
        try:
            yield
        except BaseException as error:
            refuse(error)
            raise

    def should_save(self, step: int) -> bool:
        """Is a save due at `step`, by the policy given as `every=`? Steps count on from `restore().step`: none is due before it."""
        self._check_usable()
        check_step(step)
        if self._every is None:
            raise UsageError("maybe_save and should_save need every=, for example Checkpointer(..., every=Every(steps=500))")
        if step < self._last_step and not self._has_gone_back:
            self._has_gone_back = True
            _log.warning("nothing is saved at step %d: the run stands at step %d, go on from there", step, self._last_step)
        seconds = self._env.monotonic() - self._last_save
        return self._run.is_due(last_step=self._last_step, step=step, seconds_since_save=seconds)

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
        on_resize: OnResize | Mapping[str, OnResize] | None = None,
        rehydrate: bool = True,
        streaming: bool = False,
    ) -> RestoreReport:
        """Go on from the newest snapshot of the run (or of `step`, or from `snapshot`), all or nothing.

        level      "strict": every component bit for bit, else MismatchError with all differences; "training": without RNG and data;
                   "weights": models only
        allow      path patterns of differences to accept; keys: path patterns to restrict restoring to
        on_resize  what to do with state of single ranks (`PerRank`, random number generators) that other ranks have stored than this job
                   has: "refuse", "drop" (keep the target's), "by_index", or a function; for all, or by path pattern. See `PerRank`
        state      the target; without one, here and at construction, the tree alone is restored, into the report
        rehydrate  fill the local tier again with what came from the bucket
        streaming  belongs to a later version: NotYetAvailableError

        Tensors and arrays of the target are overwritten in place once every byte is verified; a restore that fails before that
        leaves the target as it was. On a run without snapshots the report is `fresh`, with step 0. An outage is never taken for an
        empty run: StoreError, unless the local tier can go on (`report.offline`). May be called again: a roll-back.

        NotFoundError if what was asked for is not there; CorruptionError for damage that no tier can make good (of the snapshot
        that was named, or of all); ConflictError or FencedError if another session opens or owns the run.
        """
        with self._alone("restore"):
            began = self._env.monotonic()
            with self._told_to_ranks(self._run.refuse_restore):
                if streaming:
                    raise NotYetAvailableError(
                        "restore(streaming=True) is not there yet: leave it out, what is restored lands in memory first"
                    )
                if step is not None:
                    check_step(step)
                check_kind("snapshot", snapshot, str)
                check_choice("level", level, LEVELS)
                wanted = Wanted(step=step, snapshot=snapshot)
                target = state if state is not None else self._state
                matching = Matching(target, level, allow, keys, on_resize, self._rank, self._ranks)
            result = self._run.restore(wanted, matching)
            if isinstance(result, Fresh):
                rejected = (*self._run.remarks, *result.rejected)
                return self._restored(
                    RestoreReport(0, None, True, None, level, {}, False, rejected, (), unfenced=self._run.unfenced)
                )
            return self._restored(self._load(result, matching, began, rehydrate=rehydrate))

    def _load(self, result: Landed, matching: Matching, began: float, *, rehydrate: bool) -> RestoreReport:
        """Everything has landed and is verified: into the target with it. `began`: the call of `restore`."""
        landed_at = self._env.monotonic()
        restored = self._run.load(result, lambda: matching.load(result, self._run.copying))
        timings = {"landed": landed_at - began, "loaded": self._env.monotonic() - landed_at}
        self._run.refill(result, rehydrate=rehydrate)
        matching.warn(result.manifest.snapshot)
        return RestoreReport(
            step=result.manifest.step,
            snapshot=result.candidate.snapshot,
            fresh=False,
            state=restored,
            level=matching.level,
            sources=dict(result.landing.sources),
            offline=self._run.session.offline,
            rejected=(*self._run.remarks, *result.rejected),
            differences=matching.remarks(),
            timings=timings,
            unfenced=self._run.unfenced,
        )

    def _restored(self, report: RestoreReport) -> RestoreReport:
        self._last_step, self._last_save = report.step, self._env.monotonic()
        return report

    # ---------------------------------------------------------------------------------------- everything else

    def wait(self, tier: Literal["local", "remote"] = "remote", timeout: float | None = None) -> None:
        """Until everything saved so far is on `tier` (a run without remote: local). StoreError after `timeout` seconds."""
        self._check_usable()
        check_choice("tier", tier, ("local", "remote"))
        check_seconds("timeout", timeout)
        self._run.wait(tier, timeout)
        self._tell_failure()

    def snapshots(self, all: bool = False) -> list[SnapshotInfo]:
        """Live snapshots of the current lineage, oldest first; `all`: of the other lineages too (`current` tells them apart)."""
        self._check_usable()
        return self._run.snapshots(everything=all)

    def status(self) -> RunStatus:
        """Where this run stands: session, staged copies, newest snapshot and lag of each tier, what goes wrong.

        From what this process knows, without asking the bucket; from any thread. Of a closed one: as it was at the end.
        """
        self._check_process()
        return self._last_status or self._run.status()

    def gc(self, dry_run: bool = False) -> dict[str, GcPlan | Collected]:
        """Collect both tiers now, by the retention policy; `dry_run`: only say what would be done and why.

        UsageError before the first `restore` or `save` (a dry run may come earlier), StoreError for a tier that does not answer,
        FencedError when another session owns the run.
        """
        self._check_usable()
        return self._run.gc(dry_run=dry_run)

    def pin(self, snapshot: str, reason: str = "") -> None:
        """Keep a snapshot on every tier that has it until it is unpinned. NotFoundError if none has."""
        self._check_usable()
        check_kind("snapshot", snapshot, str, optional=False)
        check_reason(reason)
        self._run.pin(snapshot, reason)

    def unpin(self, snapshot: str) -> None:
        """Let retention decide about the snapshot again."""
        self._check_usable()
        check_kind("snapshot", snapshot, str, optional=False)
        self._run.unpin(snapshot)

    def preemption(self, signals: Sequence[int] | None = None, grace_s: float = 30.0) -> Preemption:
        """A context manager that turns a signal into a flag and a deadline; it never saves inside the handler."""
        self._check_usable()
        return Preemption(self._env, signals, grace_s)

    def close(self, timeout: float | None = None) -> None:
        """Finish what was saved, then release everything.

        What is staged becomes local in any case; then the bucket is waited for as long as something arrives there every 5 minutes,
        at most `timeout` seconds (StoreError that names what is missing; the next process goes on with it). An external uploader is
        not waited for: it goes on without this process. Rank 0 of many waits for the others to close, at most `rank_timeout_s`.
        """
        check_seconds("timeout", timeout)
        self._close(STALLED_AFTER_S, timeout)

    def _close(self, patience_s: float, timeout_s: float | None, why: str = "") -> None:
        if self._closed:
            return
        with self._alone("close"):
            deadline = Deadline(self._env, timeout_s)
            try:
                self._run.wait("local")
                self._run.wait_while_moving(patience_s, deadline.remaining())
            except TieredCheckpointError as error:
                self._add_failures(error)
                raise
            finally:
                self._closed = True
                self._last_status = self._run.status()
                unclosed.forget(self._run)
                left = deadline.remaining()
                self._run.close(None if left is None else max(left, _LEAST_PATIENCE_S), why)
            self._tell_failure()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return self.close()
        try:
            self._close(_AFTER_EXCEPTION_S, _AFTER_EXCEPTION_S, in_short(error))
        except Exception as problem:  # the first exception is the one to see
            if problem is not error:  # it may be the very same: a run that was overtaken says so wherever it is asked
                for note in (
                    f"tieredckpt, while closing: {type(problem).__name__}: {problem}",
                    *getattr(problem, "__notes__", ()),
                ):
                    error.add_note(note)
        return None

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """One call at a time: one from inside another (a signal handler) would store or load half a step, or wait for itself (C19)."""
        self._check_usable()
        if call != "close" and self._alone_by_default:
            refuse_late_ranks(world_size())
        if not self._turn.acquire(blocking=False):
            raise UsageError(
                f"{call}: this Checkpointer is in the middle of another call, in another thread or around a signal handler; "
                "call it between steps and from one thread (preemption() turns signals into a flag)"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise UsageError("this Checkpointer is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("this Checkpointer belongs to the parent process: do not use it in a forked child")

    def _target(self, state: object) -> object:
        target = state if state is not None else self._state
        if target is None:
            raise UsageError("give a state: Checkpointer(..., state=...) or save(step, state)")
        return target

    def _tell_failure(self) -> None:
        """Raise the first failure that nobody was told yet, or log all of them. What a closed one cannot tell later is added as notes."""
        if (failure := self._next_failure()) is not None:
            if self._closed:
                self._add_failures(failure)
            raise failure

    def _next_failure(self) -> BaseException | None:
        """The first failure that nobody was told yet, for its caller to raise; None where all of them are logged instead."""
        while (failure := self._run.take_failure()) is not None:
            if not self._warn:
                return failure
            _log.warning("%s", failure)
        return None

    def _add_failures(self, error: BaseException) -> None:
        """Nobody will ask again: whatever else went wrong becomes a note of `error`."""
        while (failure := self._run.take_failure()) is not None:
            if failure is not error:
                error.add_note(f"tieredckpt, in the background: {type(failure).__name__}: {failure}")

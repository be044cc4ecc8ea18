"""One run in one process: its tiers, its session, its background work. Everything a `Checkpointer` does that needs no torch.

Between the public face and the parts of the engine. Threads: the caller's (restore, staging), one *drain* that makes saves durable
in the order of the calls, one that refills the local tier after a restore, the *uploader*, and the pools that hash, write, read and
send.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

from tieredckpt.engine.arena import Arena, ArenaPool
from tieredckpt.engine.background import Background, Duties, Outcomes
from tieredckpt.engine.base import Bases, KnownBases
from tieredckpt.engine.collector import Collected
from tieredckpt.engine.handle import SaveHandle, SnapshotInfo
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.pins import append_everywhere
from tieredckpt.engine.refill import Filler, Refiller
from tieredckpt.engine.restorer import Check, Fresh, Restorer, Restores
from tieredckpt.engine.run_options import RunOptions, RunStatus
from tieredckpt.engine.run_view import RunView
from tieredckpt.engine.saver import Drains, SaveJob, Saver, save_error
from tieredckpt.engine.session import How, Session
from tieredckpt.engine.space import BucketView, Space, is_measured
from tieredckpt.engine.stale import StaleAlarm
from tieredckpt.engine.tier import OpenTier, RemoteLink, TierOpener
from tieredckpt.engine.waiting import Refills, TierWait, Waiter
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import CapacityError, FencedError, SaveError, StoreError, UsageError
from tieredckpt.format.records import PinRecord, UnpinRecord
from tieredckpt.model.box import Box
from tieredckpt.model.fields import utc_text
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Node
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.content import Content
from tieredckpt.plan.gc import GcPlan
from tieredckpt.plan.layout import SaveLayout, lay_out
from tieredckpt.plan.space import Volume
from tieredckpt.store.base import ObjectStore

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

STALLED_AFTER_S = 300.0
"""`close` waits for the bucket as long as something arrives there at least this often."""


class Run:
    """See the module's docstring. Methods are called by one thread at a time, except `status`."""

    def __init__(self, local: ObjectStore | None, remote: ObjectStore | None, options: RunOptions, env: Env) -> None:
        """Opens, and where needed creates, both tiers, at least one. No session opens, nobody is fenced."""
        settings = options.settings
        self._options, self._env = options, env
        self._stores = [store for store in (local, remote) if store is not None]
        self.local, self._link = self._open_tiers_first(local, remote)
        self.remarks: tuple[tuple[str, str], ...] = ()
        if self.local is not None and self.local.remark:
            self.remarks = ((self.local.store.label, self.local.remark),)
        self.session = self._new_session()
        self.arenas = ArenaPool(env, options.max_staged)
        self._pools = {
            "hash": env.executor("hash", settings.copy_threads),
            "write": env.executor("write", settings.copy_threads),
            "read": env.executor("read", settings.copy_threads),
            "send": env.executor("send", settings.upload_threads),
            "drain": env.executor("drain", 1),
            "refill": env.executor("refill", 1),
            "look": env.executor("look", 1),
        }
        self.copying = self._pools["hash"]
        self.outcomes = Outcomes(env)
        self._bases = self._new_bases()
        self.background = self._new_background()
        self._alarm = StaleAlarm(settings)
        self._saver = self._new_saver()
        self._view = RunView(self.session, self.local, self._link, self.arenas, self.outcomes, self.background)
        self._space = self._measure()
        self._refills = Refills(self.outcomes, self._pools["refill"])
        self._waiter = Waiter(
            session=self.session,
            background=self.background,
            outcomes=self.outcomes,
            refills=self._refills,
            has_remote=remote is not None,
            env=env,
        )

    @classmethod
    def open(cls, stores: Callable[[], tuple[ObjectStore | None, ObjectStore | None]], options: RunOptions, env: Env) -> Run:
        """A run on the local and the remote store that `stores` opens."""
        opened = stores()
        try:
            return cls(*opened, options, env)
        except BaseException:
            for store in opened:
                if store is not None:
                    store.close()
            raise

    def _open_tiers_first(
        self, local: ObjectStore | None, remote: ObjectStore | None
    ) -> tuple[OpenTier | None, RemoteLink | None]:
        options = self._options
        opener = TierOpener(self._env, options.settings, options.allow_unfenced, options.node_name)
        opened_local, tier = opener.open(local, remote)
        if remote is None:
            return opened_local, None
        opened = tier or opened_local
        assert opened is not None  # one of them, or `open` raises
        return opened_local, RemoteLink(remote, opener, opened.run, tier, local)

    def _new_session(self) -> Session:
        return Session(self.local, self._link, self._env, self._options.node_name)

    def _new_bases(self) -> KnownBases:
        return Bases(self._options.incremental, self._options.settings)

    def _new_saver(self) -> Drains:
        settings, pools = self._options.settings, self._pools
        assert isinstance(self._bases, Bases)
        return Saver(self.session, self._env, settings, pools["hash"], pools["write"], self._bases, self._alarm)

    def _new_background(self) -> Background:
        options = self._options
        return Background(
            session=self.session,
            local=self.local,
            remote=self._link,
            retention=options.retention,
            upload=options.upload,
            external=options.uploader == "external",
            sending=self._pools["send"],
            outcomes=self.outcomes,
            distrust=self._bases.distrust,
            duties=self._duties(),
            env=self._env,
            settings=options.settings,
        )

    def _duties(self) -> Duties:
        return Duties()

    def _measure(self) -> Space | None:
        """The room of the local tier, if there is one and it can say."""
        tier = self.local
        if tier is None or not is_measured(tier.store):
            return None
        return Space(
            tier,
            tier.store,
            collector=lambda: self.background.collector(tier),
            bucket=BucketView(self._link, self._pools["look"]),
            refilled=lambda: self._refills.moved,
            bases=self._bases,
            settings=self._options.settings,
            env=self._env,
        )

    # ---------------------------------------------------------------------------------------- restore

    def restore(self, wanted: Wanted, check: Check) -> Landed | Fresh:
        """Land what the run goes on from; see `engine.restorer`. The session opens here the first time."""
        self.wait("local")
        try:
            result = self._restore(wanted, check)
        except FencedError as error:
            self.outcomes.note_fenced(error)
            raise
        self._start_background()
        return result

    def _restore(self, wanted: Wanted, check: Check) -> Landed | Fresh:
        first = self.session.resumed is None
        self._open_session()
        if not first and self.session.offline:
            self._go_online_if_possible()
        if self.session.offline and wanted.explicit:
            raise StoreError(
                "going back to an earlier snapshot needs the bucket in reach, and it is not: try again later, "
                "or call restore() without step= and snapshot= to go on from the newest snapshot of this node",
                retryable=True,
            )
        if first and self._options.start == "fresh" and not wanted.explicit:
            return self._start_fresh("user")
        result = self._restorer().restore(wanted, check)
        if isinstance(result, Landed):
            self._bases.distrust(result.bad_here)
            self._alarm.note(self._alarm.look(result.manifest, cast(Node, result.tree))[0])
        self._goes_on_from(result)
        return result

    def _goes_on_from(self, result: Landed | Fresh) -> None:
        if isinstance(result, Landed):
            self._bases.resumed(result.manifest)

    def _start_fresh(self, how: How) -> Fresh:
        """StoreError with the bucket out of reach: its head would refuse whatever this lineage saves, long after."""
        if self.session.offline:
            raise StoreError(
                "beginning anew needs the bucket in reach, and it is not: try again later, "
                "or call restore() to go on from the newest snapshot of this node",
                retryable=True,
            )
        return self._restorer().start_fresh(how)

    def load(self, landed: Landed, into_target: Callable[[], _T]) -> _T:
        """What `into_target` gives. If it fails the landed memory is given back, and nothing is saved before another restore."""
        try:
            return into_target()
        except BaseException:
            self.session.loaded = False
            landed.release()
            raise

    def refill(self, landed: Landed, *, rehydrate: bool) -> None:
        """Make the local tier whole again in the background. The landed memory is given back here, or when that is done."""
        tier = self._link.tier if self._link is not None else None
        if self.local is None or tier is None or self.session.offline:
            landed.release()
            return
        refill = self._refill_of(Filler(self.local, tier, self._pools["read"], self._refills.note_moved))
        job = partial(refill, landed, rehydrate=rehydrate)
        self._refills.submit(job if self._space is None else self._space.promise_refill(landed, job))

    def _refill_of(self, filler: Filler) -> Callable[..., object]:
        return Refiller(filler, self.session, self._env, self._options.settings).refill

    def _restorer(self) -> Restores:
        return Restorer(
            session=self.session,
            local=self.local,
            remote=self._link.tier if self._link is not None else None,
            arenas=self.arenas,
            reading=self._pools["read"],
            env=self._env,
            verify=self._options.verify,
        )

    def _open_session(self) -> None:
        if self.session.resumed is None:
            self.session.open()

    def _go_online_if_possible(self) -> None:
        uploader = self.background.uploader
        if uploader is None or self._link is None:
            return
        try:
            uploader.catch_up()
        except StoreError as error:
            if not error.retryable:
                raise
            return
        self.session.go_online()

    def _start_background(self) -> None:
        if self.background.worker is not None:
            self.background.worker.start()
            self.background.worker.wake()

    # ---------------------------------------------------------------------------------------- save

    def begin_save(self, step: int, began: float) -> SaveHandle:
        """The handle of a new save. FencedError when another session owns the run; UsageError where `restore` has to come first."""
        if self.outcomes.fenced is not None:
            raise self.outcomes.fenced
        if self.session.resumed is None:
            self._begin_without_restore()
        self._require_ready()
        return SaveHandle(self.session.next_snapshot_id(step), step, began)

    def _require_ready(self) -> None:
        if self.outcomes.fenced is not None:
            raise self.outcomes.fenced
        if not self.session.loaded:
            raise UsageError(
                f"a restore has failed after this run was set to go on from {self.session.resumed}, which is not what is in memory "
                "now: call restore() again before save()"
            )
        newest = self.session.primary.log.refresh().newest if self.local is not None else self.session.id
        if newest != self.session.id:
            error = FencedError(f"session {newest} has opened this run after this one: it owns the run now")
            self.outcomes.note_fenced(error)
            raise error

    def refuse_save(self, error: BaseException) -> None:
        """A save is not even begun, as its caller is told: ranks that were asked for it with other arguments hear of it."""

    def refuse_restore(self, error: BaseException) -> None:
        """As `refuse_save`, of a restore."""

    def cannot_save(self, handle: SaveHandle, error: BaseException) -> None:
        """A save that was begun will not be submitted, as its caller is told. A process that is alone has nobody else to tell."""

    def is_due(self, *, last_step: int, step: int, seconds_since_save: float) -> bool:
        """Is a save due at `step`, by the policy of the run?"""
        every = self._options.every
        assert every is not None
        return every.due(last_step=last_step, step=step, seconds_since_save=seconds_since_save)

    def lay_out(self, leaves: Sequence[Leaf], held: Mapping[int, tuple[Box, ...]] | None = None) -> SaveLayout:
        """Where the pieces of a save lie in its staging memory, cut as in the save that it is likely to be compared with."""
        return lay_out(leaves, self._options.settings, self._bases.boxes, held)

    def stage(self, layout: SaveLayout, volume: Volume | None = None) -> Arena:
        """Memory for a staged copy, and room for it on the local tier, or CapacityError; waits for earlier saves (I11).

        volume: see `volume`; of the layout, if it is not given.
        """
        arena = self.arenas.acquire(layout.arena_bytes)
        try:
            if self._space is not None:
                self._space.make_room(layout, volume)
        except BaseException as error:
            arena.release()
            if isinstance(error, FencedError):
                self.outcomes.note_fenced(error)
            raise
        return arena

    def volume(self, content: Content, layout: SaveLayout) -> Volume:
        """What a save writes to the local tier."""
        return Volume.of(layout)

    def refused(self, handle: SaveHandle, error: CapacityError) -> SaveHandle:
        """The handle of a save that there was no memory or no room for, where that shall not stop the trainer."""
        failure = save_error(handle, self.session.primary.name, error)
        failure.__cause__ = error
        _log.warning("%s", failure)
        self.outcomes.note_failed(failure)
        handle.fail(failure)
        return handle

    def submit(
        self, handle: SaveHandle, content: Content, layout: SaveLayout, arena: Arena, *,
        saved_at: float, metrics: Mapping[str, float], tags: tuple[str, ...],
    ) -> None:  # fmt: skip
        """The state is staged: make it durable in the background, and visible."""
        staged = self._staged_info(handle, layout, saved_at, metrics, tags)
        if self._space is not None:
            self._space.promise(handle.snapshot_id, layout, self.volume(content, layout))
        self.outcomes.add(handle)  # from here on somebody waits for it: nothing may fail before the drain has it
        handle.staged.succeed(staged)
        if self._link is None:
            handle.has_remote = False
            handle.remote.succeed(None)
        job = SaveJob(handle, content, layout, arena, saved_at, metrics, tags)
        self._pools["drain"].submit(self._drain, job)

    def _staged_info(
        self, handle: SaveHandle, layout: SaveLayout, saved_at: float, metrics: Mapping[str, float], tags: tuple[str, ...]
    ) -> SnapshotInfo:
        return SnapshotInfo(
            snapshot_id=handle.snapshot_id,
            step=handle.step,
            session=self.session.id,
            created_at=utc_text(saved_at),
            tiers=(),
            current=True,
            parent=None,
            predecessor=self.session.primary.log.state.tip or "",
            bytes_total=layout.bytes_total,
            bytes_new=layout.bytes_total,
            tags=tags,
            metrics=dict(metrics),
            pinned=False,
            suspect=False,
            unfenced=self.unfenced,
        )

    def _drain(self, job: SaveJob) -> None:
        handle = job.handle
        try:
            record = self._saver.drain(job)
            self.background.committed(handle, record)
        except FencedError as error:
            self.outcomes.note_fenced(error)
            handle.fail(error)
        except SaveError as error:
            _log.error("%s", error)
            self.outcomes.note_failed(error)
            self.background.failed(handle, error)
        except BaseException as error:  # a panic in native code is no Exception; whoever waits for this save must hear of it
            _log.exception("save of step %d failed", handle.step)
            failed = save_error(handle, self.session.primary.name, error)
            self.outcomes.note_failed(failed)
            handle.fail(failed)
        finally:
            if self._space is not None:
                failure = handle.local.failure()
                was_short = failure is not None and isinstance(failure.__cause__, CapacityError)
                self._space.settle(handle.snapshot_id, was_short=was_short)
            self.outcomes.moved()

    def _begin_without_restore(self) -> None:
        fresh = self._options.start == "fresh"
        if not fresh and self._has_snapshots():
            raise UsageError(
                "this run has snapshots: call restore() before save(), so that the run goes on from them, "
                'or construct the Checkpointer with start="fresh" to begin anew'
            )
        self._open_session()
        self._start_fresh("user" if fresh else "auto")
        self._start_background()

    def _has_snapshots(self) -> bool:
        """On any tier. A bucket that is out of reach is not an empty one: StoreError then (C99)."""
        if self.session.offline:
            raise StoreError(
                "the bucket is out of reach, so it is not known if this run has snapshots there; call restore() first",
                retryable=True,
            )
        tiers = (self.local, self._link.tier if self._link is not None else None)
        return any(tier is not None and tier.log.refresh().live for tier in tiers)

    # ---------------------------------------------------------------------------------------- wait, look, close

    def take_failure(self) -> BaseException | None:
        """The next failure of background work that nobody was told yet; it counts as told."""
        return self.outcomes.take_failure()

    def wait(self, tier: TierWait, timeout_s: float | None = None) -> None:
        """See `Waiter.wait`."""
        if tier == "remote" and self.background.worker is not None:
            self.background.worker.wake()  # who waits should not wait for a pause between two tries
        self._waiter.wait(tier, timeout_s)

    def wait_while_moving(self, patience_s: float, timeout_s: float | None = None) -> None:
        """See `Waiter.wait_while_moving`."""
        self._waiter.wait_while_moving(patience_s, timeout_s)

    def snapshots(self, *, everything: bool) -> list[SnapshotInfo]:
        """What the tiers in reach hold, oldest first."""
        return self._view.snapshots(everything=everything)

    def status(self) -> RunStatus:
        """Without asking the bucket: what this process knows."""
        return self._view.status()

    @property
    def unfenced(self) -> bool:
        """Is there a tier without create-if-absent, which the user accepts?"""
        return self._view.unfenced

    def gc(self, *, dry_run: bool) -> dict[str, GcPlan | Collected]:
        """Collect each tier in reach, or say what would be done."""
        if not (dry_run or self.session.opened):
            raise UsageError("call restore() or save() before gc(): only the session that owns the run collects")
        tiers = self._tiers_to_collect()
        for tier in tiers:
            tier.log.refresh()  # what may go locally depends on what is remote
        collectors = {tier.name: self.background.collector(tier) for tier in tiers}
        return {name: one.plan() if dry_run else one.collect() for name, one in collectors.items()}

    def _tiers_to_collect(self) -> list[OpenTier]:
        if self.session.offline and self.session.opened:
            self._go_online_if_possible()  # the bucket does not know this session yet
        return self._open_tiers()

    def pin(self, snapshot: str, reason: str) -> None:
        append_everywhere(self._open_tiers(), snapshot, lambda found: PinRecord(snapshot=found, reason=reason))

    def unpin(self, snapshot: str) -> None:
        append_everywhere(self._open_tiers(), snapshot, lambda found: UnpinRecord(snapshot=found))

    def _open_tiers(self) -> list[OpenTier]:
        remote = self._link.connect() if self._link is not None else None
        return [tier for tier in (self.local, remote) if tier is not None]

    def close(self, patience_s: float | None = None, why: str = "") -> None:
        """Stop the threads and release everything. Call `wait` first; what is not sent yet is sent by the next process.

        Saves are finished. A request to the bucket that is under way is waited for `patience_s` seconds (None: the request timeout),
        then left to itself. `why`: what has ended the work, in words that other ranks are told.
        """
        self._pools["drain"].shutdown()
        deadline = Deadline(self._env, self._options.settings.request_timeout_s if patience_s is None else patience_s)
        worker = self.background.worker
        if worker is not None:
            worker.stop(timeout_s=deadline.remaining())
        self._waiter.wait_for_refills(deadline)
        for name, pool in self._pools.items():  # the others may hang in a request
            pool.shutdown(wait=name in ("hash", "write"))
        for store in self._stores:
            store.close()

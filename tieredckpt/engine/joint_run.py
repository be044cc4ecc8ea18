"""One run in a job of many ranks, as one of them sees it: a `Run` whose opening, restores and saves are made together.

What differs from a process that is alone: the ranks open their tiers together (`rendezvous`), they are one session
(`joint_session`), restore the same snapshot (`joint_restore`), and make one snapshot of what each has staged (`joint_save`). Only the
leader of a node uploads and collects, and the others hear of it (`listener`). Calls that change the run are made by all ranks, in the
same order; where one of them fails before it can take part, it tells the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from tieredckpt.engine.announcements import Announcements
from tieredckpt.engine.arena import Arena
from tieredckpt.engine.background import Duties
from tieredckpt.engine.board import Board
from tieredckpt.engine.council import Council, Decision
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.joint_refill import JointRefiller
from tieredckpt.engine.joint_restore import JointRestorer
from tieredckpt.engine.joint_save import JointSaver
from tieredckpt.engine.joint_session import JointSession
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.listener import Listener
from tieredckpt.engine.news import UploadNews
from tieredckpt.engine.rank_bases import RankBases
from tieredckpt.engine.refill import Filler
from tieredckpt.engine.rendezvous import Rendezvous, Stores
from tieredckpt.engine.restorer import Check, Fresh
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.session import How
from tieredckpt.engine.space import Space
from tieredckpt.engine.tier import OpenTier, RemoteLink, TierOpener
from tieredckpt.env import Env
from tieredckpt.errors import StoreError
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.content import Content
from tieredckpt.plan.layout import SaveLayout
from tieredckpt.plan.log import LogState
from tieredckpt.plan.space import Volume, node_volume
from tieredckpt.store.base import ObjectStore
from tieredckpt.version import __version__

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class JointRun(Run):
    """See the module's docstring."""

    def __init__(self, stores: Callable[[], Stores], options: RunOptions, env: Env, board: Board) -> None:
        """Opens the tiers of all ranks. `stores` opens those of this one; what it raises is told to all."""
        self._board = board
        self._council = Council(board)
        opener = TierOpener(env, options.settings, options.allow_unfenced, options.node_name)
        kept: list[Stores] = []

        def keep() -> Stores:
            kept.append(stores())
            return kept[0]

        try:
            self._opened = Rendezvous(self._council, opener, lambda: _alike(options)).open(keep)
            self._ranks = self._opened.ranks
            self._whole: str | None = None
            super().__init__(*kept[0], options, env)
            self._listener, self._announcements = self._listen()
        except BaseException:
            for store in kept[0] if kept else ():
                if store is not None:
                    store.close()
            self._council.close()
            raise

    # ---------------------------------------------------------------------------------------- the parts

    def _open_tiers_first(
        self, local: ObjectStore | None, remote: ObjectStore | None
    ) -> tuple[OpenTier | None, RemoteLink | None]:
        return self._opened.local, self._opened.link

    def _new_session(self) -> JointSession:
        return JointSession(self._opened, self._env, self._options.node_name)

    def _new_bases(self) -> RankBases:
        return RankBases(self._options.incremental, self._options.settings)

    def _new_saver(self) -> JointSaver:
        return JointSaver(
            session=self._joint,
            env=self._env,
            settings=self._options.settings,
            hashing=self._pools["hash"],
            writing=self._pools["write"],
            bases=self._rank_bases,
            alarm=self._alarm,
            whole=self._note_whole,
            late=self._note_late,
        )

    def _duties(self) -> Duties:
        ranks = self._ranks
        collects = [name for name, mine in (("local", ranks.is_leader), ("remote", ranks.is_coordinator)) if mine]
        return Duties(
            uploads=ranks.is_leader,
            collects=frozenset(collects),
            undoes=False,
            sender=f"rank {ranks.here[0]}, the leader of this node",
            news=UploadNews(self._board) if ranks.is_leader else None,
            kept=self._kept,
        )

    def _measure(self) -> Space | None:
        """The leader makes room for all ranks of its node."""
        return super()._measure() if self._ranks.is_leader else None

    def volume(self, content: Content, layout: SaveLayout) -> Volume:
        ranks = self._ranks
        return node_volume(content.leaves, layout, content.held, len(ranks.here), nodes=len(ranks.nodes))

    def _listen(self) -> tuple[Listener, Announcements | None]:
        every = self._options.every
        announcements = None
        if every is not None and every.minutes is not None:
            announcements = Announcements(every, self._board, epoch="0")
        listener = Listener(
            self._board,
            self.outcomes,
            leader=self._ranks.here[0],
            timeout_s=self._options.settings.rank_timeout_s,
            news=self.background.news,
            announcements=announcements,
        )
        return listener, announcements

    @property
    def _joint(self) -> JointSession:
        assert isinstance(self.session, JointSession)
        return self.session

    @property
    def _rank_bases(self) -> RankBases:
        assert isinstance(self._bases, RankBases)
        return self._bases

    @property
    def _joint_saver(self) -> JointSaver:
        assert isinstance(self._saver, JointSaver)
        return self._saver

    # ---------------------------------------------------------------------------------------- restore

    def restore(self, wanted: Wanted, check: Check) -> Landed | Fresh:
        """As `Run.restore`. `check` is a `JointCheck`."""
        self._joint.begin_together("restore", lambda: self.wait("local"))
        return super().restore(wanted, check)

    def _restorer(self) -> JointRestorer:
        return JointRestorer(
            session=self._joint,
            local=self.local,
            remote=self._link.tier if self._link is not None else None,
            arenas=self.arenas,
            reading=self._pools["read"],
            env=self._env,
            verify=self._options.verify,
        )

    def _goes_on_from(self, result: Landed | Fresh) -> None:
        """From here on no save before counts, nor an announcement of one."""
        assert self.session.resumed is not None
        self._whole = self.session.resumed
        self._joint_saver.resumed(self._whole, result.manifest if isinstance(result, Landed) else None)
        if self._announcements is not None:
            self._announcements.reset(str(self._joint.calls))

    def load(self, landed: Landed, into_target: Callable[[], _T]) -> _T:
        """As `Run.load`: where it fails on one rank it has failed on all."""
        loaded: list[_T] = []
        try:
            self._together("load", lambda: loaded.append(super(JointRun, self).load(landed, into_target)))
        except BaseException:
            self.session.loaded = False
            landed.release()
            raise
        return loaded[0]

    def _refill_of(self, filler: Filler) -> Callable[..., object]:
        told = self._space.narrow_refill if self._space is not None else lambda _: None
        return JointRefiller.of(filler, self._joint, self._env, self._options.settings, told).refill

    def _start_fresh(self, how: How) -> Fresh:
        fresh = super()._start_fresh(how)
        self._goes_on_from(fresh)
        return fresh

    def _go_online_if_possible(self) -> None:
        """The coordinator tries, and tells."""

        def decide(_: Mapping[int, bytes]) -> Decision:
            super(JointRun, self)._go_online_if_possible()
            tier = None if self._link is None or self.session.offline else self._link.connect()
            return Decision(b"" if tier is None else b"unfenced" if tier.unfenced else b"online")

        told = self._council.exchange(self._joint.topic("online"), lambda: b"", decide).common
        if told and not self._ranks.is_coordinator and self._link is not None:
            self._link.accept(unfenced=told == b"unfenced")
            self.session.go_online()

    # ---------------------------------------------------------------------------------------- save

    def begin_save(self, step: int, began: float) -> SaveHandle:
        """As `Run.begin_save`. The save has its number from here on, on this rank as on all others: whoever cannot go on says so."""
        if self.session.resumed is None:
            self._begin_without_restore()
        handle = SaveHandle(self.session.next_snapshot_id(step), step, began)
        try:
            self._require_ready()
        except BaseException as error:
            self.cannot_save(handle, error)
            raise
        return handle

    def refuse_save(self, error: BaseException) -> None:
        """As `Run.refuse_save`. It counts, as it does on the other ranks; before a first restore it is in their way to the session."""
        if self.session.resumed is None:
            self.refuse_restore(error)
        else:
            self.cannot_save(SaveHandle(self.session.next_snapshot_id(0), 0, self._env.monotonic()), error)

    def refuse_restore(self, error: BaseException) -> None:
        """As `Run.refuse_restore`."""

        def mine() -> bytes:
            raise error

        self._joint.begin()
        try:
            self._council.exchange(self._joint.topic("before"), mine, lambda _: Decision())
        except BaseException as told:
            _log.warning("a call that all ranks make is refused on this one: %s", told)

    def cannot_save(self, handle: SaveHandle, error: BaseException) -> None:
        """Tell the others, who wait for this rank, behind the saves before."""
        self._pools["drain"].submit(self._joint_saver.tell_failure, handle.snapshot_id, error)

    def is_due(self, *, last_step: int, step: int, seconds_since_save: float) -> bool:
        """As `Run.is_due`, the same on all ranks: by the clock of the coordinator."""
        if self._announcements is None:
            return super().is_due(last_step=last_step, step=step, seconds_since_save=seconds_since_save)
        return self._announcements.due(last_step=last_step, step=step, seconds_since_save=seconds_since_save)

    def submit(
        self, handle: SaveHandle, content: Content, layout: SaveLayout, arena: Arena, *,
        saved_at: float, metrics: Mapping[str, float], tags: tuple[str, ...],
    ) -> None:  # fmt: skip
        super().submit(handle, content, layout, arena, saved_at=saved_at, metrics=metrics, tags=tags)
        self._listener.wake()

    def _begin_without_restore(self) -> None:
        self._joint.begin_together("save", lambda: None)
        super()._begin_without_restore()

    def _has_snapshots(self) -> bool:
        """On any tier of any node; the coordinator looks at the bucket."""

        def mine() -> bytes:
            if self._ranks.is_coordinator:
                return b"yes" if super(JointRun, self)._has_snapshots() else b""
            return b"yes" if self.local is not None and self._ranks.is_leader and self.local.log.refresh().live else b""

        def decide(said: Mapping[int, bytes]) -> Decision:
            return Decision(b"yes" if any(said.values()) else b"")

        return bool(self._council.exchange(self._joint.topic("look"), mine, decide).common)

    def _start_background(self) -> None:
        super()._start_background()
        self._listener.start()

    def _note_whole(self, snapshot: str) -> None:
        self._whole = snapshot

    def _note_late(self) -> None:
        if self._announcements is not None:
            self._announcements.was_late()

    def _kept(self, state: LogState) -> Mapping[str, str]:
        """The newest snapshot that all nodes have, and what came after: one that only some have cannot take its place (I9)."""
        whole = None if self._whole is None else state.live_as(self._whole)
        if len(self._ranks.nodes) == 1 or whole is None:
            return {}
        is_after = partial(state.ancestry.is_ancestor, whole)
        return {name: "the newest that all nodes have, or after it" for name in state.live if is_after(name)}

    # ---------------------------------------------------------------------------------------- everything else

    def _tiers_to_collect(self) -> list[OpenTier]:
        """Each tier is collected by one rank."""
        tiers = [self.local] if self.local is not None and self._ranks.is_leader else []
        if tiers and self._link is not None and not self.session.offline:
            self._link.connect().log.refresh()  # what may go locally depends on what is remote
        if self._ranks.is_coordinator and self._link is not None and not self.session.offline:
            tiers.append(self._link.connect())
        return tiers

    def close(self, patience_s: float | None = None, why: str = "") -> None:
        """As `Run.close`, and `leave`."""
        super().close(patience_s, why)
        if self.background.uploader is not None:
            self.background.resolve()  # what has arrived in the meantime: nobody else tells the ranks beside this one
        self._listener.stop()
        self.leave(patience_s, why)
        self._council.close()

    def leave(self, patience_s: float | None = None, why: str = "") -> None:
        """The last word. The coordinator, with whom the store of the ranks may end, waits until the others need it no more."""
        try:
            self._board.leave(why)
            if self._ranks.is_coordinator:
                patience_s = self._board.timeout_s if patience_s is None else min(patience_s, self._board.timeout_s)
                self._board.await_leaving(range(1, self._ranks.size), self._board.deadline(patience_s))
        except StoreError as error:
            _log.info("the other ranks were not waited for: %s", error)

    def _together(self, what: str, action: Callable[[], object]) -> None:
        """All ranks have done it, or all raise."""

        def mine() -> bytes:
            action()
            return b""

        self._council.exchange(self._joint.topic(what), mine, lambda _: Decision())


def _alike(options: RunOptions) -> dict[str, str]:
    """What must be the same on all ranks, by the name that users know."""
    settings = options.settings
    return {
        "version": __version__,
        "start": options.start,
        "every": repr(options.every),
        "incremental": repr(options.incremental),
        "upload": repr(options.upload),
        "uploader": options.uploader,
        "retention": repr(options.retention),
        "digest": settings.digest,
        "piece_bytes": str(settings.piece_bytes),
        "pack_bytes": str(settings.pack_bytes),
    }

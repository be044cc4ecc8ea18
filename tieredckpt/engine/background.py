"""What goes on behind the trainer: sending, collecting, refilling, and telling handles how their saves ended.

Between the run and its workers. The uploader's thread sends, and collects both tiers after it; the drain's thread collects where it
has committed. With an external uploader this process collects all the same, when it learns that something has arrived: it has the
policies and the session that collects, and so the uploader needs no right to delete. Nothing here raises into the trainer: failures
end in a handle, or in `problems`, and are told once (I12).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from tieredckpt.engine.collector import Collector
from tieredckpt.engine.follower import Follower
from tieredckpt.engine.handle import SaveHandle, SnapshotInfo
from tieredckpt.engine.news import UploadNews
from tieredckpt.engine.session import Session
from tieredckpt.engine.snapshots import describe
from tieredckpt.engine.tier import OpenTier, RemoteLink
from tieredckpt.engine.uploader import Lag, LostHere, Uploader, fenced
from tieredckpt.engine.worker import Worker, is_outage
from tieredckpt.env import Env
from tieredckpt.errors import ConflictError, FencedError, OutcomeUnknownError, SaveError, TieredCheckpointError
from tieredckpt.format.records import CommitRecord
from tieredckpt.model.ids import original_of
from tieredckpt.plan.log import EMPTY, LogState
from tieredckpt.plan.policies import Retention
from tieredckpt.plan.uploads import UploadPolicy, must_be_kept
from tieredckpt.settings import Settings

_log = logging.getLogger(__name__)


class Outcomes:
    """The handles whose story is not over, and failures that no handle can tell. Thread-safe."""

    def __init__(self, env: Env) -> None:
        self.changed = env.condition()
        self._handles: list[SaveHandle] = []
        self._problems: list[Exception] = []
        self.fenced: FencedError | None = None
        self.failed_saves = 0
        self.last_failure = ""
        self.told_remote: str | None = None
        """The last snapshot that another rank has told to be in the bucket, whose log this one does not read."""
        self.tell_fenced: Callable[[SaveHandle, FencedError], None] = lambda _handle, _error: None
        """Told of each handle that waits when another session is found to own the run, whoever finds it."""

    def add(self, handle: SaveHandle) -> None:
        with self.changed:
            self._handles.append(handle)

    def open(self) -> list[SaveHandle]:
        """Handles with an outcome to come, or a failure that nobody was told yet."""
        with self.changed:
            return list(self._handles)

    def note_failed(self, error: BaseException) -> None:
        """A save has failed on the first tier, which its handle will tell: it is counted before, for `status`."""
        with self.changed:
            self.failed_saves += 1
            self.last_failure = str(error)

    def note_problem(self, error: Exception) -> None:
        with self.changed:
            if str(error) not in [str(known) for known in self._problems]:
                self._problems.append(error)
            self.changed.notify_all()

    def note_fenced(self, error: FencedError) -> None:
        """Another session owns the run: no save of this one will get any further. Told once, by a handle if there is one."""
        with self.changed:
            known, self.fenced = self.fenced is not None, self.fenced or error
        waiting = [handle for handle in self.open() if not (handle.local.done() and handle.remote.done())]
        for handle in waiting:
            handle.fail(error)
            self.tell_fenced(handle, error)
        if not known and not waiting:
            self.note_problem(error)
        self.moved()

    def raise_hopeless(self, *, problems: bool) -> None:
        """Raises what makes further waiting pointless: another session owns the run, or (`problems`) a failure nobody was told yet."""
        with self.changed:
            if self.fenced is not None:
                self._problems = [problem for problem in self._problems if problem is not self.fenced]
                for handle in self._handles:
                    handle.count_as_fenced()
                raise self.fenced
            if problems and self._problems:
                raise self._problems.pop(0)

    def moved(self) -> None:
        """Something has happened that somebody may wait for."""
        with self.changed:
            self.changed.notify_all()

    def take_failure(self) -> BaseException | None:
        """The next failure that nobody was told yet; it counts as told."""
        with self.changed:
            failures = (error for handle in self._handles if (error := handle.take_undelivered()) is not None)
            failure = next(failures, None) or (self._problems.pop(0) if self._problems else None)
            self._handles = [handle for handle in self._handles if not _is_over(handle)]
        return failure


def _is_over(handle: SaveHandle) -> bool:
    outcomes = (handle.staged, handle.local, handle.remote)
    return all(outcome.done() for outcome in outcomes) and not any(outcome.undelivered for outcome in outcomes)


@dataclass(frozen=True, slots=True)
class Duties:
    """What a process does for the run. One that is alone does everything; of many ranks each has a part of it, see `ranks`.

    uploads        it sends what is on the local tier, if nobody external does
    collects       the tiers that it collects
    undoes         what a failed save has left is its own to delete; with many ranks only the logs can say
    sender         who sends, for people, if this process does not
    news           where it tells other ranks what becomes of each snapshot
    kept           live local snapshots that may not go, whatever the policy says, with the reason
    """

    uploads: bool = True
    collects: frozenset[str] = frozenset(("local", "remote"))
    undoes: bool = True
    sender: str = "`tieredckpt uploader`, which has to be running"
    news: UploadNews | None = None
    kept: Callable[[LogState], Mapping[str, str]] = lambda _state: {}


class Background:
    """The uploader with its worker, and the collectors of both tiers. `distrust` is told of local packs that turn out damaged."""

    def __init__(
        self,
        *,
        session: Session,
        local: OpenTier | None,
        remote: RemoteLink | None,
        retention: Retention,
        upload: UploadPolicy,
        external: bool,
        sending: Executor,
        outcomes: Outcomes,
        distrust: Callable[[Iterable[str]], None],
        env: Env,
        settings: Settings,
        duties: Duties = Duties(),
    ) -> None:
        self._session = session
        self._local = local
        self._remote = remote
        self._retention = retention
        self._upload = upload
        self.sent_elsewhere = external or not duties.uploads
        """By another process, for which this one does not wait."""
        self.sender = duties.sender
        self._outcomes = outcomes
        outcomes.tell_fenced = self._tell_ranks
        self._distrust = distrust
        self._env = env
        self._duties = duties
        self._lock = threading.Lock()
        self._told: set[type[Exception]] = set()
        """Kinds of permanent failure that the user was told since the last step that went well."""
        self._owed: set[SaveHandle] = set()
        """Saves that failed here after this node had committed them. Ranks beside this one may have heard that they did not."""
        self._collectors: dict[str, Collector] = {}
        self._commits_seen: int | None = None
        """In the bucket's log, since the first look."""
        self.uploader: Uploader | None = None
        """Of an external one's trainer: sends nothing, but knows the lag and opens the session in the bucket."""
        self.worker: Worker | None = None
        if local is not None and remote is not None and duties.uploads:
            self.uploader = Uploader(
                local, remote, policy=upload, sending=sending, env=env, settings=settings, report=self._cannot_be_sent
            )
            if external:
                self._follower = Follower(local, remote, self.uploader, policy=upload, env=env)
                self.worker = Worker(
                    "follower", self.look, env, on_error=self._upload_failed, on_idle=outcomes.moved, rest_s=self._follower.rest_s
                )
            else:
                self.worker = Worker(
                    "uploader", self.step, env, on_error=self._upload_failed, on_idle=outcomes.moved, rest_s=self.uploader.rest_s
                )

    # ---------------------------------------------------------------------------------------- the uploader's thread

    def step(self) -> bool:
        """One unit of remote work; what the uploader's thread repeats."""
        assert self.uploader is not None
        worked = self.uploader.step()
        self.uploader.note_error(None)
        self._told.clear()
        self.resolve()
        commits, seen = len(self._remote_state().commits), self._commits_seen
        self._commits_seen = commits
        if worked or (
            seen is not None and commits > seen
        ):  # of a snapshot of many nodes, another one may have sent the last part
            self._collect_both()
        else:
            self._refuse_if_followed()
        return worked

    def look(self) -> bool:
        """What has an external uploader brought to the bucket? What the follower's thread repeats."""
        arrived = self._follower.step()
        self.resolve()
        if arrived:
            self._told.clear()
            self._collect_both()
        else:
            self._refuse_if_followed()
        return arrived

    def _refuse_if_followed(self) -> None:
        """FencedError if another session has opened the local log after this one.

        What is left is sent for that one, once it has resumed: it may have died before, and then waiting here would have no end.
        """
        assert self._local is not None
        newest = self._local.log.state.newest
        if newest != self._session.id:
            raise fenced(
                f"session {newest} has opened {self._local.store.label} after session {self._session.id}: it owns the run now"
            )

    def _collect_both(self) -> None:
        assert self._remote is not None
        assert self._local is not None
        self.collect(self._remote.connect())
        self.collect(self._local)  # what has just been sent may go, before the next save needs its room

    def resolve(self) -> None:
        """Tell the handles whose snapshots are remote by now, or will never be."""
        assert self.uploader is not None
        assert self._local is not None
        local, remote = self._local.log.state, self._remote_state()
        waiting = {original_of(name) for name in self.uploader.queue(local, remote)}
        with self._lock:
            owed = tuple(self._owed)
        open_here = (handle for handle in self._outcomes.open() if handle.local.done() and not handle.remote.done())
        for handle in (*(handle for handle in open_here if handle.local.failure() is None), *owed):
            found = remote.live_as(handle.snapshot_id)
            if found is not None:
                handle.timings["remote"] = self._env.monotonic() - handle.began
                info = describe(remote.live[found], local, remote)
                handle.remote.succeed(info)
                self._tell_ranks(handle, info)
            elif handle.snapshot_id not in waiting and (remote.known(handle.snapshot_id) or local.known(handle.snapshot_id)):
                handle.remote.succeed(None)
                self._tell_ranks(handle, None)
        self._outcomes.moved()

    def _tell_ranks(self, handle: SaveHandle, outcome: SnapshotInfo | TieredCheckpointError | None) -> None:
        with self._lock:
            self._owed.discard(handle)
        if self._duties.news is not None:
            self._duties.news.tell(handle.snapshot_id, outcome)

    def _cannot_be_sent(self, snapshot: str, error: SaveError) -> None:
        if isinstance(error.__cause__, LostHere):
            self._distrust(error.__cause__.packs)
        for handle in self._outcomes.open():
            if handle.snapshot_id == original_of(snapshot):
                handle.remote.fail(error)
                self._tell_ranks(handle, error)
                self._outcomes.moved()
                return
        self._outcomes.note_problem(error)

    def _upload_failed(self, error: Exception) -> bool:
        """An outage is waited out; being fenced ends the uploader; anything else is told once, while it lasts, and tried again."""
        assert self.uploader is not None
        if isinstance(error, FencedError):
            _log.error("%s", error)
            self._outcomes.note_fenced(error)
            return False
        self.uploader.note_error(error)
        if not is_outage(error) and type(error) not in self._told:
            self._told.add(type(error))
            what = "asking the bucket what has arrived" if self.sent_elsewhere else "uploading"
            _log.error("%s fails: %s", what, error, exc_info=not isinstance(error, TieredCheckpointError))
            self._outcomes.note_problem(error)
        self._outcomes.moved()
        return True

    # ---------------------------------------------------------------------------------------- the drain's thread

    def failed(self, handle: SaveHandle, error: SaveError) -> None:
        """A save has failed on the first tier. What it left must not take the room of the next one, if it is known to be nobody's."""
        if self.uploader is not None and not self._duties.undoes:
            self.uploader.doubtful.add(handle.snapshot_id)
            self.uploader.note_waiting()
            if self.worker is not None and self.uploader.is_committed_here(handle.snapshot_id):
                with self._lock:
                    self._owed.add(handle)
                self.worker.wake()
        handle.fail(error)
        self._outcomes.moved()
        primary = self._session.primary
        if primary.name not in self._duties.collects:
            return
        if _is_decided(error):
            self._try_to_collect(primary, lambda collector: collector.abandon(handle.snapshot_id))
            if not self._duties.undoes:  # another rank may still be writing
                self.collector(primary).expect_leftovers()
        else:
            self.collector(primary).expect_leftovers()

    def committed(self, handle: SaveHandle, record: CommitRecord) -> None:
        """A save is committed on the first tier."""
        handle.timings["local"] = self._env.monotonic() - handle.began
        local = None if self._local is None else self._local.log.state
        info = describe(record, local, None if self._remote is None else self._remote.state)
        if self._session.primary.name not in info.tiers:  # another rank has committed it: the log here was read before
            info = replace(info, tiers=(self._session.primary.name, *info.tiers), current=True)
        if self._local is not None and self.worker is not None and self.uploader is not None:
            self.uploader.note_waiting()  # first: whoever has waited for the save finds it in the lag
        handle.local.succeed(info)
        if self._local is None:
            handle.remote.succeed(info)
        elif self.uploader is not None and self.worker is not None:
            self.worker.wake()
        elif self._remote is None:
            handle.remote.succeed(None)
        self._outcomes.moved()
        if (
            record.rebase_of is not None and self._duties.undoes
        ):  # it was written a second time, and what the first time left is of no use
            self.collector(self._session.primary).expect_leftovers()
        self.collect(self._session.primary)

    # ---------------------------------------------------------------------------------------- collection

    def collector(self, tier: OpenTier) -> Collector:
        """The collector of a tier, on behalf of this session."""
        with self._lock:
            if tier.name not in self._collectors:
                self._collectors[tier.name] = Collector(
                    tier,
                    self._retention.remote if tier.is_remote else self._retention.local,
                    session=self._session.id,
                    protected=self._protected if self._local is tier else _nothing,
                    env=self._env,
                )
            return self._collectors[tier.name]

    def collect(self, tier: OpenTier) -> None:
        """After a commit."""
        if tier.name in self._duties.collects:
            self._try_to_collect(tier, Collector.tidy)

    def _try_to_collect(self, tier: OpenTier, act: Callable[[Collector], object]) -> None:
        """Never fails a save: what cannot be collected now is collected later (C22, C73)."""
        try:
            act(self.collector(tier))
        except FencedError as error:
            self._outcomes.note_fenced(error)
        except TieredCheckpointError as error:
            _log.warning("%s: collection is put off: %s", tier.name, error)
        except Exception as error:
            _log.exception("%s: collection failed", tier.name)
            self._outcomes.note_problem(error)

    def _protected(self, state: LogState) -> Mapping[str, str]:
        """Local snapshots that may not be evicted (I9)."""
        if self._remote is None:
            return self._duties.kept(state)
        unsendable = self.uploader.unsendable if self.uploader is not None else ()
        return dict(self._duties.kept(state)) | dict.fromkeys(
            must_be_kept(state, self._remote_state(), self._upload, unsendable), "it still has to be sent"
        )

    def _remote_state(self) -> LogState:
        return EMPTY if self._remote is None else self._remote.state

    @property
    def news(self) -> UploadNews | None:
        """Where the other ranks are told what becomes of each snapshot."""
        return self._duties.news

    @property
    def lag(self) -> Lag:
        """How far the bucket is behind."""
        return self.uploader.lag if self.uploader is not None else Lag()


def _is_decided(error: SaveError) -> bool:
    """Is it certain that this save is not committed, and that what lies under its id is its own?

    Not where nobody foresaw how it failed, nor after a conflict: another's objects may be there.
    """
    cause = error.__cause__
    if isinstance(cause, (OutcomeUnknownError, ConflictError)):
        return False
    return cause is None or isinstance(cause, TieredCheckpointError)


def _nothing(_state: LogState) -> Mapping[str, str]:
    return {}

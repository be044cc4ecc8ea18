"""The uploader as a process of its own: beside a trainer, after it, or for a moment by hand.

The local tier is the queue, so this needs nothing of the trainer but the directory: it waits for the directory, acts for the newest
session there that has resumed, goes on across restarts of the trainer, and never opens a session of its own. It creates and deletes
nothing locally; in the bucket it appends and puts, and collects nothing: that is the trainer's, who has the policies.

The failures it exists for: a trainer that is killed right after its last save, whose machine is gone before anybody has started it
again (C60); and an uploader that ends at the first bad answer, so that days later nobody finds a snapshot (C50, C137). So it ends
only when it is told to, and when there is nothing that it may do any more: the run is another node's, the place is another run's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from tieredckpt.engine.tier import OpenTier, RemoteLink, TierOpener, find_local
from tieredckpt.engine.uploader import LostHere, Stopped, Uploader, Watch
from tieredckpt.engine.worker import IDLE_S, backoff_s, is_outage
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    SaveError,
    StoreError,
    TieredCheckpointError,
    UnsupportedVersionError,
    UsageError,
)
from tieredckpt.format import keys
from tieredckpt.format.records import CommitRecord, FailedRestoreRecord
from tieredckpt.plan.log import LogState
from tieredckpt.plan.uploads import UploadPolicy, queue
from tieredckpt.settings import MIB, Settings
from tieredckpt.store.base import ObjectStore

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_TELL_AGAIN_S = 60.0
_PATIENCE_S = 30.0
"""`push` goes on through outages as long as something arrives at least this often."""

Kind = Literal["waiting", "found", "progress", "sent", "arrived", "lost", "error", "recovered", "stopped"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something to tell. `message` for people; `fields` for programs, JSON values by name."""

    kind: Kind
    message: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Queue:
    """The local tier as it is open now, and what sends from it."""

    local: OpenTier
    link: RemoteLink
    uploader: Uploader


class Uploading(Watch):
    """Uploads from the directory that `open_local` opens to `remote`.

    open_local  raises NotFoundError as long as there is no directory; its stores are closed here
    tell        told of events, from several threads
    stopped     asked between packs, and at least every half second: True ends the work after the packs in flight
    """

    def __init__(
        self,
        open_local: Callable[[], ObjectStore],
        remote: ObjectStore,
        *,
        policy: UploadPolicy,
        env: Env,
        settings: Settings,
        allow_unfenced: bool,
        tell: Callable[[Event], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._open_local = open_local
        self._remote = remote
        self._policy = policy
        self._env = env
        self._settings = settings
        self._opener = TierOpener(env, settings, allow_unfenced)
        self._tell = tell
        self._stopped = stopped
        self._sending = env.executor("send", settings.upload_threads)
        self._queue: _Queue | None = None
        self._failures = 0
        self._looked_afresh = False
        self._told = ""
        self._tell_again = Deadline(env, 0)
        self._untold: dict[str, tuple[str, ...]] = {}
        """Snapshots whose damage the local log does not say yet, with the packs."""
        self.lost: dict[str, str] = {}
        """Snapshots that can never be sent, with the reason."""
        self.sent: list[str] = []
        """Local snapshots that this process has committed remotely."""
        self.sent_bytes = 0

    # ---------------------------------------------------------------------------------------- the two ways to run

    def run(self) -> None:
        """Until told to stop. FencedError when another node has the run; UsageError, UnsupportedVersionError for what cannot be."""
        while not self._stopped():
            try:
                worked = self._step()
            except Stopped:
                break
            except FencedError:
                if self._looked_afresh:
                    raise
                self._looked_afresh = True  # a local log that was begun anew looks like that to who has read the old one
                self._close_queue()
            except (UsageError, UnsupportedVersionError):  # do not go away while this process runs, whatever it tries
                raise
            except Exception as error:
                self._failed(error)
                self._rest(Deadline(self._env, backoff_s(self._failures, self._env)), until_more=False)
            else:
                self._succeeded()
                if not worked:
                    rest_s = IDLE_S if self._queue is None else self._queue.uploader.rest_s()
                    self._rest(Deadline(self._env, rest_s), until_more=True)

    def push(self) -> tuple[str, ...]:
        """Until nothing waits any more, or told to stop; the ids that still wait then.

        NotFoundError where there is no local tier; StoreError when nothing has arrived for half a minute, or asking again is of no
        use; ConflictError if what waits cannot be sent before a trainer has resumed; and as `run`. `lost` says what never can be.
        """
        if self._open() is None:
            raise NotFoundError("there is no local tier to send from")
        patience, seen = Deadline(self._env, _PATIENCE_S), 0
        while not self._stopped():
            try:
                if not self._step():
                    return self._left()
            except Stopped:
                break
            except StoreError as error:
                if not is_outage(error) or patience.expired:
                    raise
                self._failed(error)
                self._rest(Deadline(self._env, backoff_s(self._failures, self._env)), until_more=False)
            else:
                self._succeeded()
            if self._queue is not None and self._queue.uploader.progress != seen:
                patience, seen = Deadline(self._env, _PATIENCE_S), self._queue.uploader.progress
        return () if self._queue is None else self._queue.uploader.lag.waiting

    def close(self) -> None:
        """Release what `open_local` opened. A request that hangs is left to itself."""
        self._sending.shutdown(wait=False)
        self._close_queue()

    # ---------------------------------------------------------------------------------------- one unit of work

    def _step(self) -> bool:
        opened = self._open()
        if opened is None:
            self._say_once("waiting", "waiting for a trainer to begin a run in the local directory")
            return False
        try:
            worked = self._send(opened)
        except Exception:
            self._tell_of_damage(opened.local)  # of what was found earlier: the local log alone is needed for it
            raise
        untold = self._tell_of_damage(opened.local)
        if untold is not None and not worked:
            raise untold
        return worked

    def _send(self, opened: _Queue) -> bool:
        if opened.link.tier is None:
            opened.local.log.refresh()
            opened.uploader.note_waiting()  # what waits is known without the bucket, and told if nothing more comes of it
            self._connect(opened)
        return opened.uploader.step()

    def _connect(self, opened: _Queue) -> None:
        try:
            tier = opened.link.connect()
        except ConflictError as error:
            raise UsageError(str(error)) from error
        self._tell(
            Event(
                "found",
                f"sending from {opened.local.store.label} to {tier.store.label}",
                {"local": opened.local.store.label, "remote": tier.store.label, "run": tier.run},
            )
        )

    def _open(self) -> _Queue | None:
        """The queue; None as long as no trainer has made one."""
        if self._queue is not None:
            return self._queue
        try:
            store = self._open_local()
        except NotFoundError:
            return None
        try:
            local = find_local(store, self._env, self._settings)
        except BaseException:
            store.close()
            raise
        if local is None:
            store.close()
            return None
        link = RemoteLink(self._remote, self._opener, local.run, None, store)
        uploader = Uploader(
            local,
            link,
            policy=self._policy,
            sending=self._sending,
            env=self._env,
            settings=self._settings,
            report=self._cannot_be_sent,
            watch=self,
            shared=True,
        )
        self._queue = _Queue(local, link, uploader)
        return self._queue

    def _left(self) -> tuple[str, ...]:
        """Nothing is left to do here. What still waits does so for other nodes, or, an error, for a trainer that has not resumed."""
        assert self._queue is not None
        state = self._queue.local.log.state
        if state.newest is not None and state.newest not in state.resumes:
            waiting = queue(state, self._queue.link.connect().log.refresh(), self._policy, self.lost)
            if waiting:
                raise ConflictError(
                    f"session {state.newest} has begun on {self._queue.local.store.label} and not said yet what it goes on from: "
                    f"{', '.join(waiting[:3])} can be sent when it has"
                )
        return self._queue.uploader.lag.waiting

    # ---------------------------------------------------------------------------------------- failures and rests

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if not isinstance(error, TieredCheckpointError):
            _log.error("uploading fails unexpectedly", exc_info=error)
        code = error.code if isinstance(error, TieredCheckpointError) else "internal"
        waiting = 0 if self._queue is None else len(self._queue.uploader.lag.waiting)
        self._say_once("error", f"{error}; trying again", {"code": code, "waiting": waiting})
        if not is_outage(error):
            self._close_queue()  # the directory may have been emptied, or its log been begun anew: look at it afresh

    def _succeeded(self) -> None:
        if self._failures:
            self._tell(Event("recovered", "going on"))
            self._told = ""
        self._failures = 0
        self._looked_afresh = False

    def _say_once(self, kind: Kind, message: str, fields: Mapping[str, object] | None = None) -> None:
        """And again every minute while it lasts."""
        if message != self._told or self._tell_again.expired:
            self._told, self._tell_again = message, Deadline(self._env, _TELL_AGAIN_S)
            self._tell(Event(kind, message, fields or {}))

    def _rest(self, until: Deadline, *, until_more: bool) -> None:
        while not (self._stopped() or until.expired or (until_more and self._has_more())):
            self._env.sleep(min(_LOOK_EVERY_S, until.remaining() or 0.0))

    def _has_more(self) -> bool:
        """Has the local log a record that was not there at the last step? The one behind the last is looked for, nothing is listed."""
        try:
            if self._queue is None:
                return self._open() is not None
            return self._queue.local.store.stat(keys.record_key(self._queue.local.log.state.seq + 1)) is not None
        except TieredCheckpointError:
            return True  # the next step finds out what is wrong

    def _close_queue(self) -> None:
        if self._queue is not None:
            self._queue.local.store.close()
            self._queue = None

    # ---------------------------------------------------------------------------------------- told by the uploader

    def stopping(self) -> bool:
        return self._stopped()

    def progress(self, record: CommitRecord, done_bytes: int, total_bytes: int) -> None:
        fields = {"snapshot": record.snapshot, "step": record.step, "bytes": done_bytes, "bytes_total": total_bytes}
        done_mib, total_mib = done_bytes / MIB, total_bytes / MIB
        self._tell(Event("progress", f"step {record.step}: {done_mib:.1f} of {total_mib:.1f} MiB sent", fields))

    def arrived(self, record: CommitRecord, sent_bytes: int, *, by_another: bool) -> None:
        self.sent_bytes += sent_bytes
        assert self._queue is not None
        waiting = max(0, len(self._queue.uploader.lag.waiting) - 1)
        fields = {"snapshot": record.snapshot, "step": record.step, "bytes": sent_bytes, "waiting": waiting}
        if by_another:
            self._tell(Event("arrived", f"another uploader has sent step {record.step}: {record.snapshot}", fields))
            return
        self.sent.append(record.snapshot)
        self._tell(Event("sent", f"step {record.step} is in the bucket: {record.snapshot}, {waiting} more waiting", fields))

    def _cannot_be_sent(self, snapshot: str, error: SaveError) -> None:
        if snapshot not in self.lost:
            self._tell(Event("lost", str(error), {"snapshot": snapshot, "step": error.step}))
        self.lost[snapshot] = str(error)
        if isinstance(error.__cause__, LostHere) and error.__cause__.damaged:
            self._untold[snapshot] = tuple(key for key in error.__cause__.damaged if keys.parse_pack_key(key) is not None)

    def _tell_of_damage(self, local: OpenTier) -> TieredCheckpointError | None:
        """The trainer cannot see what is found here, and would refer to these packs in every save to come: the log tells it.

        As a restore would: they are damaged here, and the bucket lacks them. Every snapshot that they keep from being sent is named,
        or the trainer would wait for it. What could not be told stays, and is tried again; why is returned.
        """
        for snapshot, packs in list(self._untold.items()):
            try:
                local.log.append(partial(_damage_of, snapshot, packs))
            except TieredCheckpointError as error:
                _log.warning("%s: %s; damage of %s is noted there at the next try", local.store.label, error, snapshot)
                return error
            del self._untold[snapshot]
        return None


def _damage_of(snapshot: str, packs: tuple[str, ...], state: LogState) -> FailedRestoreRecord | None:
    """In the name of the newest session, the only one that may append. None if the log says it, or nobody needs the snapshot."""
    if state.newest is None or snapshot not in state.live or (state.marked(snapshot) and state.damaged_packs >= frozenset(packs)):
        return None
    return FailedRestoreRecord(session=state.newest, snapshot=snapshot, packs=packs, reason="cannot be sent: damaged here")

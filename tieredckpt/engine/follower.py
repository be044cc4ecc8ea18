"""Learning from the bucket's log what another process has sent there.

In the trainer, in place of the uploader's thread. Nobody tells a trainer that an external uploader has arrived somewhere, and it may
be gone for good; so the log is asked now and then, only while something waits, and less and less often while nothing comes.

What the uploader cannot send is known here by the record of damage that it has appended to the local log, for every snapshot that it
concerns: such a save has failed. What it has passed over by its policy (which may be another one than the trainer's), by a later
snapshot of the same lineage in the bucket, because uploaders send the oldest one first: such a one gives None. Neither has to be sent
any longer, or holds back its handle or its room (I9).
"""

from __future__ import annotations

from tieredckpt.engine.tier import OpenTier, RemoteLink
from tieredckpt.engine.uploader import Uploader, fenced
from tieredckpt.engine.worker import IDLE_S
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import CorruptionError
from tieredckpt.format.records import FailedRestoreRecord
from tieredckpt.model.ids import original_of
from tieredckpt.plan.log import LogState
from tieredckpt.plan.uploads import UploadPolicy, must_be_kept, queue

_FIRST_LOOK_S = 2.0
_LONGEST_PAUSE_S = 30.0
_LEAST_REST_S = 0.1


class Follower:
    """Used by one thread. `uploader` is the run's own, which sends nothing; what is learned is noted there."""

    def __init__(self, local: OpenTier, link: RemoteLink, uploader: Uploader, *, policy: UploadPolicy, env: Env) -> None:
        self._local = local
        self._link = link
        self._uploader = uploader
        self._policy = policy
        self._env = env
        self._pause_s = _FIRST_LOOK_S
        self._next: Deadline | None = None
        """When to look; None while nothing waits."""
        self._commits_seen = 0
        self._read_to: int | None = None
        self._damaged: set[str] = set()
        """Originals that a `failed-restore` has named. The state forgets them at the next commit, which may come between two looks."""

    def step(self) -> bool:
        """True if something has arrived in the bucket, where the newest local session is known.

        StoreError while that is out of reach, FencedError when the run is another's.
        """
        local = self._local.log.refresh()
        if self._read_to is None:
            self._read_to, self._damaged = local.seq, set(local.failed)
        self._uploader.note_waiting()
        if not queue(local, self._link.state, self._policy, self._uploader.unsendable):
            self._next, self._pause_s = None, _FIRST_LOOK_S
            self._uploader.note_error(None)  # somebody else has got an answer; `wait` would name the error for ever
        elif self._next is None:
            self._next = Deadline(self._env, self._pause_s)
        elif self._next.expired:
            self._pause_s = min(self._pause_s * 1.5, _LONGEST_PAUSE_S)
            self._next = Deadline(self._env, self._pause_s)
            self._look(local)
        return self._has_arrived(local)

    def rest_s(self) -> float:
        """Until the next look."""
        left = None if self._next is None else self._next.remaining()
        return IDLE_S if left is None else max(left, _LEAST_REST_S)

    def _look(self, local: LogState) -> None:
        remote = self._link.connect().log.refresh()
        self._uploader.note_error(None)
        _refuse_if_overtaken(local, remote, self._link)
        self._look_for_damage()
        kept = must_be_kept(local, remote, self._policy, self._uploader.unsendable)
        for name in queue(local, remote, self._policy, self._uploader.unsendable):
            if original_of(name) in self._damaged:
                why = "the uploader has found it damaged on the local tier"
                self._uploader.cannot_send(local.live[name], why, CorruptionError(why))
            elif name not in kept:
                self._uploader.unsendable[name] = "the uploader has passed it over: the bucket has a later one of its lineage"
        self._uploader.note_waiting()

    def _look_for_damage(self) -> None:
        for record in self._local.log.records(self._read_to or 0):
            self._read_to = record.seq
            if isinstance(record, FailedRestoreRecord):
                self._damaged.add(original_of(record.snapshot))

    def _has_arrived(self, local: LogState) -> bool:
        """Whoever has read the bucket's log since the last time: the run's user may have."""
        remote = self._link.state
        if remote.newest != local.newest or len(remote.commits) <= self._commits_seen:
            return False
        self._commits_seen = len(remote.commits)
        self._pause_s = _FIRST_LOOK_S
        if self._next is not None:
            self._next = Deadline(self._env, self._pause_s)
        return True


def _refuse_if_overtaken(local: LogState, remote: LogState, link: RemoteLink) -> None:
    """FencedError if nothing of the newest local session can be committed remotely any more."""
    session = local.newest
    if session is None or remote.newest in (None, session):
        return
    if session in remote.opens or remote.newest not in local.opens[session].continues:
        raise fenced(f"session {remote.newest} has opened {link.label} after session {session}: it owns the run now")

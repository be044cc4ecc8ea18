"""From the local tier to the bucket, in the background.

The local tier is the queue: what is committed there and not here is work, computed from the two logs before every unit of it. So a
restart, or another process, goes on where the last one stopped, several may run, and there is nothing to lose. `step` does one
unit; the thread is a loop around it (`engine.worker`).

Before every record the local log is read, and its newest session that has resumed is acted for, never another one. An outage is not a
failure: the work stays, and the lag grows and is reported all the while. What can never be sent (damaged here, refused there) is told
once and stepped over, so that it does not hold up the saves behind it. Fenced, and not by a session of this node, it stops and deletes
nothing; by one of this node that has not resumed yet, it waits for what that will go on from.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from tieredckpt.engine.arena import scratch
from tieredckpt.engine.commit import UNSEALED, Committer, ForeignObject, Prepared
from tieredckpt.engine.late_session import late_open, late_resume
from tieredckpt.engine.log import Appended, NotAppended
from tieredckpt.engine.pack_check import check_pack, pieces_by_pack
from tieredckpt.engine.parts import Part, doomed_packs, is_condemned, is_of_many_nodes, missing_receipts, part_of
from tieredckpt.engine.progress import Progress
from tieredckpt.engine.rebase import Rebaser, read_new_pack, record_of
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier, RemoteLink
from tieredckpt.engine.worker import IDLE_S
from tieredckpt.env import Env
from tieredckpt.errors import ConflictError, CorruptionError, FencedError, NotFoundError, SaveError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, PackEntry
from tieredckpt.format.records import CommitRecord, OpenRecord, ResumeRecord
from tieredckpt.plan.choose import resume_is_missing
from tieredckpt.plan.lineage import predecessors_of
from tieredckpt.plan.log import Facts, LogState, RefusalReason
from tieredckpt.plan.rebase import NewPack
from tieredckpt.plan.uploads import UploadPolicy, must_be_kept, queue
from tieredckpt.settings import Settings

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0

_NEVER_HERE = frozenset({RefusalReason.BROKEN_CHAIN})
"""A snapshot refused for one of these will be refused for ever. A condemned id or pack is none: it is written again (`engine.rebase`)."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the bucket is behind. `waiting`: snapshot ids, oldest first; `bytes_waiting`: of their packs; `last_error`: "" if none."""

    waiting: tuple[str, ...] = ()
    bytes_waiting: int = 0
    last_error: str = ""


class LostHere(CorruptionError):
    """The local copy of something that has to be sent is damaged, missing or unreadable for good, or condemned where it should go.

    `packs`: keys of all packs that were found so; `key` is the first. `damaged`: of these, the ones that are proven to be gone: missing,
    or other than their digests say.
    """

    def __init__(self, message: str, *, key: str | None, packs: Iterable[str] = (), damaged: Iterable[str] = ()) -> None:
        super().__init__(message, key=key)
        self.packs = tuple(packs)
        self.damaged = tuple(damaged)


class Stopped(Exception):
    """The uploader was told to stop, and did between two packs."""


class Watch:
    """What may be asked and told while snapshots are sent, on any of the uploader's threads. This one neither asks nor listens."""

    def stopping(self) -> bool:
        """Asked before each pack: True ends the upload with `Stopped`; the packs in flight are finished."""
        return False

    def progress(self, record: CommitRecord, done_bytes: int, total_bytes: int) -> None:
        """Told now and then, while the packs of a snapshot are sent."""

    def arrived(self, record: CommitRecord, sent_bytes: int, *, by_another: bool) -> None:
        """The local snapshot is committed remotely. `sent_bytes`: of its packs, by this uploader, whoever committed it."""


class Uploader:
    """Sends from `local` to what `link` leads to. `report` is told once of each snapshot (id) that cannot be sent.

    `shared`: other uploaders are likely to send the same packs at this moment. Each takes them in an order of its own and looks before
    it sends, so that together they send little more than once what is large.
    """

    def __init__(
        self,
        local: OpenTier,
        link: RemoteLink,
        *,
        policy: UploadPolicy,
        sending: Executor,
        env: Env,
        settings: Settings,
        report: Callable[[str, SaveError], None],
        watch: Watch | None = None,
        shared: bool = False,
    ) -> None:
        self._local = local
        self._link = link
        self._policy = policy
        self._sending = sending
        self._env = env
        self._settings = settings
        self._report = report
        self._watch = watch or Watch()
        self._shared = shared
        self._rebaser = Rebaser(env, settings)
        self._lock = threading.Lock()
        self._progress = 0
        self._pause_s = _FIRST_PAUSE_S
        self._lag_seq = 0
        self._delivered: dict[str, Manifest] = {}
        """Snapshots of many nodes whose part from here is in the bucket, with its receipts, and those of others were not."""
        self.doubtful: set[str] = set()
        """Snapshots committed here by a save that has failed: other nodes may not have them. They are sent last, and nobody waits."""
        self.unsendable: dict[str, str] = {}
        self.lag = Lag()

    @property
    def progress(self) -> int:
        """Grows with every pack and record that arrives: for waits that go on as long as something moves."""
        return self._progress

    def step(self) -> bool:
        """One unit of work: True if a snapshot was sent or dealt with, False if there is nothing to do now.

        StoreError while the bucket is out of reach or does not take what is sent, FencedError when another session owns the run.
        """
        self._waiting(self._local.log.refresh(), self._link.state)  # the lag is known without the bucket
        caught_up = self.catch_up()
        if caught_up is None:
            return False
        remote, session, local_state, remote_state = caught_up
        waiting = self._waiting(local_state, remote_state)
        if not waiting:
            return False
        record = self._next(remote, waiting, local_state)
        if record is None:
            self._waiting(local_state, remote_state)
            return False
        try:
            self._send(remote, session, record, local_state, remote_state)
        except ForeignObject as error:
            self.cannot_send(record, str(error), error)
        except LostHere as error:
            if record.snapshot in self._local.log.refresh().live:  # else it was evicted meanwhile, and needs no sending
                self.cannot_send(record, str(error), error)
        return True

    def _next(self, remote: OpenTier, waiting: Sequence[str], local: LogState) -> CommitRecord | None:
        """The oldest that has something to be sent from here, else one whose other nodes have sent theirs; None to wait for those."""
        self._delivered = {name: manifest for name, manifest in self._delivered.items() if name in waiting}
        name = next((name for name in waiting if name not in self._delivered), None)
        if name is None:
            state = remote.log.state
            over = (n for n, m in self._delivered.items() if is_condemned(m, state) or not missing_receipts(remote.store, m))
            name = next(over, None)
        return None if name is None else local.live[name]

    def catch_up(self) -> tuple[OpenTier, str, LogState, LogState] | None:
        """The remote tier with the newest local session that has resumed open and resumed there, that session, and both logs.

        None before any has, and while a later one of this node has opened remotely and has not: then nobody may append, and what it
        resumes decides what is sent.
        """
        remote = self._link.connect()
        local_state = self._local.log.refresh()
        if local_state.last_resume is None:
            return None
        session = local_state.last_resume.session
        remote_state = self._ensure_session(remote, session, local_state)
        return None if remote_state is None else (remote, session, local_state, remote_state)

    def rest_s(self) -> float:
        """Until a step may find something again: soon where only other nodes are awaited, later and later while nothing comes."""
        if not any(name in self._delivered for name in self.lag.waiting):
            return IDLE_S
        pause, self._pause_s = self._pause_s, min(self._pause_s * 1.5, _LONGEST_PAUSE_S)
        return pause

    def note_error(self, error: Exception | None) -> None:
        """For `status()`: why nothing moves."""
        with self._lock:
            self.lag = replace(self.lag, last_error="" if error is None else f"{type(error).__name__}: {error}")

    def is_committed_here(self, snapshot: str) -> bool:
        return self._local.log.state.known(snapshot)

    def note_waiting(self) -> None:
        """For `status()`: something was committed locally. A request that hangs may keep `step` from seeing it for minutes."""
        self._waiting(self._local.log.state, self._link.state)

    def queue(self, local: LogState, remote: LogState) -> tuple[str, ...]:
        """Ids to send, in this order: of saves that have succeeded, as far as is known, and then of the others."""
        sure = queue(local, remote, self._policy, {*self.unsendable, *self.doubtful})
        return tuple(dict.fromkeys((*sure, *queue(local, remote, self._policy, self.unsendable))))

    def _waiting(self, local: LogState, remote: LogState) -> tuple[str, ...]:
        """Ids to send. Noted as the lag are those that can arrive: not what other nodes seem not to have."""
        passed_over = {*self.unsendable, *self.doubtful}
        sure = queue(local, remote, self._policy, passed_over)
        kept = must_be_kept(local, remote, self._policy, passed_over)
        awaited = tuple(name for name in sure if name in kept or name not in self._delivered)
        with self._lock:
            if local.seq >= self._lag_seq:  # threads overtake each other
                self._lag_seq = local.seq
                nbytes = sum(local.live[name].bytes_new for name in awaited)
                self.lag = replace(self.lag, waiting=awaited, bytes_waiting=nbytes)
        return self.queue(local, remote)

    # ---------------------------------------------------------------------------------------- the session, remotely

    def _ensure_session(self, remote: OpenTier, session: str, local: LogState) -> LogState | None:
        """Make up for what a session that began offline could not append. The remote state afterwards; None to wait, see `catch_up`.

        FencedError if the run belongs to a session that this node does not know as a later one.
        """
        state = remote.log.refresh()
        resumed = local.resumes.get(session)
        loaded = frozenset() if resumed is None else frozenset({resumed.target})
        facts = Facts(live_elsewhere=local.live.keys() | loaded)  # what it has loaded may have been retired since, on both tiers
        if session not in state.opens and not self._append(remote, session, late_open(session, local, remote), facts):
            return None
        missing = resume_is_missing(remote.log.state, local, session)
        if missing and not self._append(remote, session, late_resume(session, local), facts):
            return None
        state = remote.log.state
        if state.newest == session:
            return state
        if self._is_followed(session, state.newest):
            return None
        raise fenced(f"session {state.newest} has opened {remote.store.label} after session {session}: it owns the run now")

    def _append(
        self, remote: OpenTier, session: str, draft: Callable[[LogState], OpenRecord | ResumeRecord], facts: Facts
    ) -> bool:
        """False if it was refused for the sake of a later session of this node."""
        outcome = remote.log.append(draft, lambda _state, _record: facts)
        if isinstance(outcome, NotAppended):
            if self._is_followed(session, outcome.state.newest):
                return False
            raise fenced(outcome.why)
        self._moved()
        return True

    def _is_followed(self, session: str, newest: str | None) -> bool:
        """Has `newest` opened the local log after `session`? Read again: it opens here first, and that may have been just now."""
        opens = list(self._local.log.refresh().opens)
        return newest in opens[opens.index(session) + 1 :]

    # ---------------------------------------------------------------------------------------- one snapshot

    def _send(self, remote: OpenTier, session: str, record: CommitRecord, local: LogState, there: LogState) -> None:
        with _reading_here(keys.manifest_key(record.snapshot)):
            manifest, stored = read_manifest(self._local.store, record, self._local.run)
            part = part_of(self._local.store, manifest) if is_of_many_nodes(manifest) else None
        if part is not None and is_condemned(manifest, there):
            if self._is_let_go(record, session, local, there):
                self.unsendable[record.snapshot] = "not all of its nodes have sent their part, and it is not needed any more"
                return
            raise _condemned(manifest, there)
        rebased = self._rebaser.rebase(manifest, remote, there)
        if rebased is None:
            prepared, wanted = Prepared(manifest, stored, record.manifest_digest), record
        else:
            prepared = Prepared.of(rebased.manifest)
            wanted = record_of(prepared, record)
        new = {} if rebased is None else rebased.new
        sent_bytes = self._deliver(remote, record, manifest, prepared.manifest, new=new, part=part)
        if sent_bytes is None:
            return
        committer = Committer(remote, self._local.node, self._env, self._settings)
        if part is not None:
            committer.put_receipts(prepared, sorted(part.writers))
            if missing := missing_receipts(remote.store, manifest):
                self._delivered[record.snapshot] = manifest
                _log.info("step %d: what this node has is sent, ranks %s are awaited", record.step, sorted(missing)[:10])
                return

        def draft(state: LogState) -> CommitRecord:
            return msgspec.structs.replace(
                wanted,
                session=session,
                predecessors=predecessors_of(state, local.ancestry, record.snapshot),
                **UNSEALED,
            )

        seen = prepared.pack_keys if part is None else part.packs
        outcome = committer.publish(prepared, draft, seen=seen, part=part)
        if isinstance(outcome, NotAppended):
            self._refused(record, session, outcome)
            return
        self._moved()
        by_another = not isinstance(outcome, Appended)
        if not by_another:
            _log.info("step %d is remote: %s", record.step, record.snapshot)
        self._watch.arrived(record, sent_bytes, by_another=by_another)

    def _is_let_go(self, record: CommitRecord, session: str, local: LogState, there: LogState) -> bool:
        """Does nobody wait for this part? Its save has failed, or an earlier session made it, and a later one is in the bucket."""
        kept = must_be_kept(local, there, self._policy, self.unsendable)
        return record.snapshot in self.doubtful or (record.origin != session and record.snapshot not in kept)

    def _deliver(
        self,
        remote: OpenTier,
        record: CommitRecord,
        here: Manifest,
        there: Manifest,
        *,
        new: Mapping[str, NewPack],
        part: Part | None,
    ) -> int | None:
        """Every pack that `there` names is in the bucket, whole and durable, afterwards. The bytes that were sent for it.

        `part`: of a snapshot of many nodes, what is here; the other packs are not looked at.
        None if it is to be planned again: it is a rebase, and names a pack of the head there that is not there and cannot be sent.
        """
        ours = [pack for pack in there.packs if part is None or pack.key in part.packs]
        absent = {pack.key: pack for pack in self._absent(remote, there.snapshot, ours)}
        if vanished := absent.keys() - new.keys() - {pack.key for pack in here.packs}:
            self._rebaser.give_up(vanished)
            return None
        progress = self._progress_of(record, sum(pack.nbytes for pack in absent.values()))
        sent_bytes = self._send_packs(remote, here, list(absent.values()), new, progress)
        _settle_found(remote, [pack.key for pack in ours if pack.key not in absent])
        return sent_bytes

    def _absent(self, remote: OpenTier, snapshot: str, packs: Sequence[PackEntry]) -> list[PackEntry]:
        """Those of the packs, of this snapshot and of earlier ones, that the bucket lacks."""
        own = (keys.parse_pack_key(pack.key) for pack in packs if pack.snapshot == snapshot)
        present = self._present(remote, snapshot, {name.writer for name in own if name is not None})
        found = self._sending.map(  # a request for each pack of an ancestor: of a large state many thousands
            lambda pack: self._is_there(remote, pack, present if pack.snapshot == snapshot else None), packs
        )
        return [pack for pack, is_there in zip(packs, found, strict=True) if not is_there]

    def _send_packs(
        self, remote: OpenTier, here: Manifest, absent: Sequence[PackEntry], new: Mapping[str, NewPack], progress: Progress
    ) -> int:
        """These packs: as they lie here, or, if `new`, put together of pieces of `here`. The bytes that were sent."""
        if self._shared:
            absent = sorted(absent, key=lambda _: self._env.jitter())
        pieces = {here.packs[number].key: found for number, found in pieces_by_pack(here).items()}

        def load(pack: PackEntry) -> memoryview:
            if pack.key in new:
                return read_new_pack(self._local.store, here, new[pack.key])
            data = scratch(pack.nbytes)
            self._local.store.read_into(pack.key, 0, data)
            check_pack(pack, pieces.get(pack.key, []), data)  # never send damage on
            return data

        jobs = [self._sending.submit(self._send_pack, remote, pack, load, progress) for pack in absent]
        failures = [error for job in jobs if (error := job.exception()) is not None]
        if failures:
            first, lost = failures[0], [error for error in failures if isinstance(error, LostHere)]
            if not isinstance(first, LostHere):
                raise first
            packs = [error.key for error in lost if error.key is not None]
            raise LostHere(str(first), key=first.key, packs=packs, damaged=[key for error in lost for key in error.damaged])
        return sum(job.result() for job in jobs)

    def _present(self, remote: OpenTier, snapshot: str, writers: Iterable[int]) -> dict[str, int]:
        """Packs of this snapshot that are there already (key → bytes), from an uploader that was interrupted."""
        found: dict[str, int] = {}
        for prefix in sorted({keys.writer_prefix(writer) for writer in writers}):
            for stat in remote.store.list(prefix, after=f"{prefix}{snapshot}."):
                if not stat.key.startswith(f"{prefix}{snapshot}."):
                    break
                found[stat.key] = stat.size
        return found

    def _is_there(self, remote: OpenTier, pack: PackEntry, listed: Mapping[str, int] | None = None) -> bool:
        """An object under a pack's key is whole (puts are atomic) and can only be this pack (I2): its size is a cross-check.

        `listed`: what there is of the pack's snapshot (key → bytes); None to look for the pack itself.
        """
        if listed is None:
            stat = remote.store.stat(pack.key)
            size = None if stat is None else stat.size
        else:
            size = listed.get(pack.key)
        if size is not None and size != pack.nbytes:
            raise ForeignObject(f"{remote.store.label}: {pack.key} has {size} bytes and should have {pack.nbytes}: it is foreign")
        return size is not None

    def _progress_of(self, record: CommitRecord, nbytes: int) -> Progress:
        behind = len(self.lag.waiting) - 1
        note = f"{behind} more waiting" if behind > 0 else ""
        what = f"uploading step {record.step} ({record.snapshot})"
        return Progress(self._env, what, nbytes, note=note, tell=partial(self._watch.progress, record))

    def _send_pack(self, remote: OpenTier, pack: PackEntry, load: Callable[[PackEntry], memoryview], progress: Progress) -> int:
        """Bytes sent: none if another uploader was faster."""
        if self._watch.stopping():
            raise Stopped
        if self._shared and self._is_there(remote, pack):
            progress.add(pack.nbytes)
            self._moved()
            return 0
        with _reading_here(pack.key):
            data = load(pack)
        try:
            remote.store.put(pack.key, [data])
        except ConflictError as error:
            raise ForeignObject(str(error)) from error
        progress.add(pack.nbytes)
        self._moved()
        return pack.nbytes

    def _refused(self, record: CommitRecord, session: str, outcome: NotAppended) -> None:
        """A retryable StoreError where what is planned anew may be admitted: after a rest, since it may be refused again."""
        if outcome.reason is RefusalReason.FENCED:
            if not self._is_followed(session, outcome.state.newest):
                raise fenced(outcome.why)
        elif outcome.reason in _NEVER_HERE:
            self.cannot_send(record, outcome.why, ConflictError(outcome.why))
        else:
            raise StoreError(f"{record.snapshot} was not committed remotely, looking again: {outcome.why}", retryable=True)

    def cannot_send(self, record: CommitRecord, why: str, cause: Exception) -> None:
        """Reported once; the snapshot no longer has to be sent."""
        self.unsendable[record.snapshot] = why
        error = SaveError(
            f"step {record.step} ({record.snapshot}) cannot be sent to the bucket: {why}",
            step=record.step,
            rank=0,
            tier="remote",
            key=cause.key if isinstance(cause, CorruptionError) else None,
        )
        error.__cause__ = cause
        self._report(record.snapshot, error)

    def _moved(self) -> None:
        with self._lock:
            self._progress += 1
            self._pause_s = _FIRST_PAUSE_S


def _condemned(manifest: Manifest, remote: LogState) -> LostHere:
    """The bucket will never take this snapshot of many nodes: no node has all that would have to be written again."""
    doomed = doomed_packs(manifest, remote)
    what = f"{len(doomed)} of its packs are" if doomed else "it is"
    return LostHere(
        f"{what} condemned or damaged in the bucket, and no node has all of it: a later save is sent instead",
        key=doomed[0] if doomed else None,
        packs=doomed,
    )


def _settle_found(remote: OpenTier, packs: Sequence[str]) -> None:
    """Nobody has told this process that these are durable: who put them was interrupted, or was told that they may not be."""
    try:
        remote.store.settle(packs)
    except NotFoundError as error:
        raise StoreError(f"a pack was there and is not any more: {error}", retryable=True) from error


def fenced(why: str) -> FencedError:
    """Another session owns the run: what becomes of what this one has saved."""
    return FencedError(f"{why}. Nothing was deleted; what this session saved stays on the local tier")


@contextmanager
def _reading_here(key: str) -> Iterator[None]:
    """What the local tier has no longer in good order is lost; what it only cannot give right now is not."""
    try:
        yield
    except (NotFoundError, CorruptionError) as error:
        if isinstance(error, CorruptionError) and error.key is not None:
            key = error.key  # a pack that is put together has its pieces from others
        raise LostHere(f"{key} is damaged or missing on the local tier: {error}", key=key, damaged=(key,)) from error
    except StoreError as error:
        if error.retryable:
            raise
        raise LostHere(f"{key} cannot be read on the local tier: {error}", key=key) from error

"""A tier's log as a process sees it: read to its end, and appended to by conditional puts.

Between a store and the pure rules of `plan.log`. The failures it exists for: two writers that both believe to have won a position
(I5); a put whose answer was lost and which is taken for failed, or done twice (I6, C24, C25); a log that looks empty or shorter
than it is, because a list failed, lagged or found a gap (C99).

Reading. After a listing of what follows the known state, every number up to the last one listed is read, then the ones behind it
until one is missing: a listing may lag, and a number that it lacks is a gap only if reading it fails too. Records that this
process did not write are made durable (`settle`) before anybody acts on them. An index only saves reading (`plan.log_index`).

Appending. Refresh, admit, put at the next position, and learn who won from the bytes there. Each attempt is sealed once, so that
its bytes tell it from all others. An attempt whose fate is unknown at the deadline is remembered: if it lands later, it is
recognised as this process's own, and the same record is not appended again.

Threads share one `TierLog`. Appends take turns, since they would race for one position; reading never waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from tieredckpt.engine.log_reader import LogReader
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import ConflictError, CorruptionError
from tieredckpt.format import keys
from tieredckpt.format.records import MAX_RECORD_BYTES, Record, encode_record, seal
from tieredckpt.model.fields import utc_text
from tieredckpt.plan.log import EMPTY, NO_FACTS, AlreadyDone, Facts, LogState, RefusalReason, Refused, admit, apply
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.readback import Won, create_exact

Draft = Record | Callable[[LogState], Record | None]
"""What to append, or how to build it from the state right before its position; None: there is nothing left to do."""

FactsFor = Callable[[LogState, Record], Facts]
"""Gathers what admission of this record behind this state needs to know; called before every try."""


@dataclass(frozen=True, slots=True)
class Appended:
    """`record` is in the log, durably; `state` is the log up to it."""

    record: Record
    state: LogState


@dataclass(frozen=True, slots=True)
class Already:
    """The log says it already, or there was nothing to do: success."""

    why: str
    state: LogState


@dataclass(frozen=True, slots=True)
class NotAppended:
    """Refused by a rule, surely not appended."""

    reason: RefusalReason
    why: str
    state: LogState


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One sealed record on its way to one position."""

    record: Record
    data: bytes


def no_facts(_state: LogState, _record: Record) -> Facts:
    """For records whose rules need nothing beyond the log: open, a fresh resume, retire, pin, unpin, failed-restore."""
    return NO_FACTS


class TierLog:
    """One tier's log. `state` is what this process knows of it; `refresh` reads it to its end; `append` adds a record."""

    def __init__(self, store: ObjectStore, *, name: Literal["local", "remote"], env: Env, settings: Settings) -> None:
        self._store = store
        self._name = name
        self._env = env
        self._settings = settings
        self._reader = LogReader(store, env)
        self._state = EMPTY
        self._state_lock = threading.Lock()
        self._appending = env.lock()
        self._undecided: list[_Attempt] = []
        """Attempts at one position that is not decided yet: no later one can be tried before it has been read."""

    @property
    def name(self) -> Literal["local", "remote"]:
        return self._name

    @property
    def state(self) -> LogState:
        """As of the last refresh or append; no I/O."""
        return self._state

    def refresh(self) -> LogState:
        """Read the log to its end.

        Raises StoreError (the tier did not answer: the log is not known to be any shorter), CorruptionError (a gap, a damaged
        record), FormatError (not a record of this version), FencedError (another process has set this log aside and begun a new one).
        """
        return self._advance(self._reader.read_on(self._state))

    def records(self, after: int = 0) -> Iterator[Record]:
        """The records behind `after`, in order, as far as the log is known now. Errors as for `refresh`."""
        for seq in range(after + 1, self.refresh().seq + 1):
            record = self._reader.read(seq)
            if record is None:
                raise CorruptionError(f"{self._store.label}: the log has lost {keys.record_key(seq)}", key=keys.record_key(seq))
            yield record

    def append(
        self,
        draft: Draft,
        facts: FactsFor = no_facts,
        *,
        adjacent_to: int | None = None,
        timeout_s: float | None = None,
    ) -> Appended | Already | NotAppended:
        """Append one record, if the rules admit it at the log's end; durable when this returns.

        adjacent_to  the seq of the state that the record was chosen from: if anything follows it, NotAppended(MOVED)
        timeout_s    for a position that does not become clear; `Settings.commit_timeout_s` if None

        Raises as `refresh` does, with nothing sent; StoreError (`retryable=False`) or CapacityError when the store refused for
        sure; OutcomeUnknownError when it is not known whether the record was appended. Then nothing may be cleaned up; append the
        same record again later: if it had landed, that is found out and it is not appended twice.
        """
        with self._appending:
            outcome = self._append(draft, facts, adjacent_to, Deadline(self._env, timeout_s or self._settings.commit_timeout_s))
        if isinstance(outcome, Appended):
            self._reader.write_index(outcome.state)
        return outcome

    def _append(
        self, draft: Draft, facts: FactsFor, adjacent_to: int | None, deadline: Deadline
    ) -> Appended | Already | NotAppended:
        write_id = self._env.new_ulid()
        state = self.refresh()
        landed = self._find_landed(state)
        while True:
            record = draft(state) if callable(draft) else draft
            if record is None:
                return Already("there is nothing left to append", state)
            if landed is not None and _same(landed, record):
                return Appended(landed, state)
            if adjacent_to is not None and state.seq != adjacent_to:
                why = f"record {state.seq} is the last one now, and the choice was made at record {adjacent_to}"
                return NotAppended(RefusalReason.MOVED, why, state)
            match admit(state, record, facts(state, record)):
                case AlreadyDone(why):
                    return Already(why, state)
                case Refused(reason, why):
                    return NotAppended(reason, why, state)
            sealed = seal(record, state.seq + 1, write_id, utc_text(self._env.wall_time()))
            attempt = _Attempt(sealed, encode_record(sealed))
            winner = self._try(attempt, deadline)
            landed = self._decide(winner)
            state = self._advance(apply(state, winner))
            if winner is attempt.record:
                return Appended(winner, state)

    def _try(self, attempt: _Attempt, deadline: Deadline) -> Record:
        """Put the attempt at its position; returns the record that holds the position in the end, its own or a foreign one."""
        seq = attempt.record.seq
        self._undecided.append(attempt)  # before it is sent: an interrupt must not make us forget it
        outcome = create_exact(
            self._store,
            keys.record_key(seq),
            attempt.data,
            env=self._env,
            timeout_s=deadline.remaining() or 0.0,
            max_bytes=MAX_RECORD_BYTES,
        )
        if isinstance(outcome, Won):
            return attempt.record
        if deadline.expired:
            raise ConflictError(f"{self._store.label}: other writers won every position of the log until the deadline")
        return self._reader.decode(outcome.data, seq)

    def _decide(self, winner: Record) -> Record | None:
        """The position of the undecided attempts is decided: returns `winner` if it is one of them, else None."""
        ours = any(attempt.record.digest == winner.digest for attempt in self._undecided)
        self._undecided.clear()
        return winner if ours else None

    def _find_landed(self, state: LogState) -> Record | None:
        """A record of ours whose outcome was unknown and which is in the log by now."""
        if not self._undecided or state.seq < self._undecided[0].record.seq:
            return None
        winner = self._reader.read(self._undecided[0].record.seq)
        return None if winner is None else self._decide(winner)

    def _advance(self, state: LogState) -> LogState:
        """Readers overtake each other; the furthest state stays."""
        with self._state_lock:
            if state.seq > self._state.seq:
                self._state = state
            return self._state


def _same(one: Record, other: Record) -> bool:
    """Do both say the same, wherever and whenever they were written?"""
    blank = {"seq": 0, "write_id": "", "created_at": "", "digest": ""}
    return msgspec.structs.replace(one, **blank) == msgspec.structs.replace(other, **blank)

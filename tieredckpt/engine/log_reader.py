"""Reading a log to its end: listing, direct reads, gaps, settling, and the index that saves most of it.

Below `engine.log`, which says when. Hazard owner of the log that looks shorter than it is. Three ways lead there: a list that
failed (raised, never an empty log), a list that lags (numbers behind the last one listed are read directly, until one is
missing), and a lost record (a missing number below an existing one is a CorruptionError, after a direct read has failed too).
And of the log that is another one by now: another process has set a damaged local log aside and begun a new one
(`engine.set_aside`). Who knows the old one must not go on in the new one, whose sessions it has never seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, CorruptionError, FencedError, FormatError, NotFoundError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.records import MAX_RECORD_BYTES, Record, decode_record
from tieredckpt.plan.log_index import MAX_INDEX_BYTES, decode_index, encode_index
from tieredckpt.plan.log_state import EMPTY, LogState, fold
from tieredckpt.store.base import ObjectStore, is_local_tier_store

_log = logging.getLogger(__name__)

_BATCH = 256
"""Records read at a time; a batch is settled and folded before the next one is read."""

_READ_THREADS = 8
_INDEX_EVERY = 64


class LogReader:
    """Reads one log. Keeps no state of its own but when the last index was written."""

    def __init__(self, store: ObjectStore, env: Env) -> None:
        self._store = store
        self._env = env
        self._may_be_set_aside = is_local_tier_store(store)
        self._indexed = 0

    def read_on(self, state: LogState) -> LogState:
        """The state at the log's end. Every record behind `state` is durable before this returns.

        CorruptionError for a gap or a damaged record; StoreError if the end could not be established; FencedError if another
        process has begun a new log in the place of the one that `state` was read from.
        """
        last = self._last_listed(state.seq)
        if state.seq and self._may_be_set_aside:
            self._check_is_the_same_log(state)
        if state is EMPTY:
            state = self._from_index() or state
            last = max(last, state.seq)
        for first in range(state.seq + 1, last + 1, _BATCH):
            state = self._fold(state, self._read_range(first, min(first + _BATCH, last + 1)))
        return self._read_past_listing(state)

    def read(self, seq: int) -> Record | None:
        """The record at one position, None if it is not there. CorruptionError if it is damaged, FormatError if it is no record."""
        try:
            data = self._store.get(keys.record_key(seq), max_bytes=MAX_RECORD_BYTES)
        except NotFoundError:
            return None
        return self.decode(data, seq)

    def decode(self, data: bytes, seq: int) -> Record:
        """The record that `data`, found at one position, is. Errors as for `read`: they name the log, and say what to do."""
        try:
            return decode_record(data, seq)
        except CorruptionError as error:
            raise CorruptionError(self._unusable(error), key=keys.record_key(seq)) from error
        except FormatError as error:
            raise FormatError(self._unusable(error)) from error

    def write_index(self, state: LogState) -> None:
        """Leave an index at `state` if the last one is far behind. Nothing depends on it, so no failure matters.

        The distance grows with the log: what all indexes of a long log cost together stays a small part of it.
        """
        if state.seq - self._indexed < max(_INDEX_EVERY, state.seq // 32):
            return
        self._indexed = state.seq
        try:
            self._store.create(keys.index_key(state.seq), encode_index(state))
            older = [seq for seq in self._indexes() if seq < state.seq]
            failures = self._store.delete([keys.index_key(seq) for seq in older]) if older else ()
        except (StoreError, CapacityError, FormatError) as error:
            _log.info("%s: no index was written at record %d: %s", self._store.label, state.seq, error)
            return
        if failures:
            _log.info("%s: older log indexes stay: %s", self._store.label, failures[0].error)

    def _last_listed(self, known: int) -> int:
        """The largest listed number, at least `known`. A known record that is gone means that the log lost what it had."""
        after = keys.record_key(known - 1) if known > 1 else ""
        listed = [seq for stat in self._store.list(keys.LOG_PREFIX, after=after) if (seq := keys.parse_record_key(stat.key))]
        if known and known not in listed and self._store.stat(keys.record_key(known)) is None:
            raise self._gap(known, f"it was there before ({known} records were known)")
        return max(listed, default=known)

    def _check_is_the_same_log(self, state: LogState) -> None:
        """FencedError if the last record that is known is another one now."""
        try:
            record = self.read(state.seq)
        except FormatError:  # damaged since it was read: what it says is known here, and the next open deals with it
            return
        if record is not None and record.digest != state.digest:
            raise FencedError(
                f"{self._store.label}: {keys.record_key(state.seq)} is not the record that was read before: another process has set "
                "this log aside and begun a new one. The run belongs to that process now"
            )

    def _read_range(self, first: int, stop: int) -> list[Record]:
        """All records from `first` to `stop` - 1: a later one exists, so none of them may be missing."""
        positions = range(first, stop)
        if len(positions) < 2 * _READ_THREADS:
            return [self._read_below(seq) for seq in positions]
        with self._env.executor("log", _READ_THREADS) as pool:
            return list(pool.map(self._read_below, positions))

    def _read_below(self, seq: int) -> Record:
        record = self.read(seq)
        if record is None:
            raise self._gap(seq, "a later record exists")
        return record

    def _read_past_listing(self, state: LogState) -> LogState:
        """A listing may lag behind what has been created: go on until a number is missing."""
        while (record := self.read(state.seq + 1)) is not None:
            state = self._fold(state, [record])
        return state

    def _fold(self, state: LogState, records: list[Record]) -> LogState:
        self._store.settle([keys.record_key(record.seq) for record in records])
        return fold(state, records)

    def _from_index(self) -> LogState | None:
        """The newest usable index, if any. It was written after its records had been made durable."""
        try:
            for seq in sorted(self._indexes(), reverse=True):
                state = self._usable(seq)
                if state is not None:
                    return state
        except StoreError as error:
            _log.info("%s: the log is read without an index: %s", self._store.label, error)
        return None

    def _usable(self, seq: int) -> LogState | None:
        """The index's state, if the log holds the record that it ends at. No record there at all is a gap like any other."""
        try:
            state = decode_index(self._store.get(keys.index_key(seq), max_bytes=MAX_INDEX_BYTES), seq)
        except (NotFoundError, FormatError) as error:
            _log.warning("%s: log index %d is ignored: %s", self._store.label, seq, error)
            return None
        record = self.read(seq)
        if record is None:
            raise self._gap(seq, "there is an index of it")
        if record.digest != state.digest:
            _log.warning("%s: log index %d is ignored: it does not belong to this log", self._store.label, seq)
            return None
        self._indexed = max(self._indexed, seq)
        return state

    def _indexes(self) -> Iterator[int]:
        return (seq for stat in self._store.list(keys.LOG_INDEX_PREFIX) if (seq := keys.parse_index_key(stat.key)))

    def _unusable(self, error: FormatError) -> str:
        return (
            f"{self._store.label}: {error}. Nothing can be decided from this log: put back a good copy of the record; or, if it is "
            "the local tier's and the run has a bucket, move the local directory away, and the run goes on from the bucket"
        )

    def _gap(self, seq: int, why: str) -> CorruptionError:
        key = keys.record_key(seq)
        return CorruptionError(
            f"{self._store.label}: the log has lost record {key}: {why}. Records are never deleted, so nothing can be decided "
            "from this log; restore the missing object",
            key=key,
        )

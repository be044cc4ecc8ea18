"""Stores that are wrong in one way each, as real ones have been; the suite must find every one of them.

Each wraps a store that is right. `SPOILED` says which check has to fail, and which others may.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tieredckpt.errors import CorruptionError, FormatError, NotFoundError, StoreError, TieredCheckpointError
from tieredckpt.store.base import Created, DeleteFailure, ObjectStat, ObjectStore

A_MOMENT_S = 0.005
LONG_ENOUGH_S = 0.5
LARGE_BYTES = 100_000


class Wrapped:
    """What a broken store does not break is its inner store's."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def replace(self, key: str, data: bytes) -> None:
        self.inner.delete([key])
        self.inner.put(key, [data])


# create


class IgnoresTheCondition(Wrapped):
    """C27: every writer is told that it won."""

    def create(self, key, data):
        self.replace(key, bytes(data))
        return Created.CREATED


class OverwritesAndSaysExists(Wrapped):
    def create(self, key, data):
        if self.inner.stat(key) is None:
            return self.inner.create(key, data)
        self.replace(key, bytes(data))
        return Created.EXISTS


class ChecksThenWrites(Wrapped):
    """Right one after the other, two winners under a race (I5)."""

    def create(self, key, data):
        if self.inner.stat(key) is not None:
            return Created.EXISTS
        time.sleep(A_MOMENT_S)
        self.replace(key, bytes(data))
        return Created.CREATED


class RemembersAbsence(Wrapped):
    """A cache: what was absent once stays absent until this store itself writes it (C69)."""

    def __init__(self, inner):
        super().__init__(inner)
        self.absent = set()

    def stat(self, key):
        found = None if key in self.absent else self.inner.stat(key)
        if found is None:
            self.absent.add(key)
        return found

    def create(self, key, data):
        self.absent.discard(key)
        return self.inner.create(key, data)

    def put(self, key, parts):
        self.absent.discard(key)
        self.inner.put(key, parts)


# put


class _Torn(Wrapped):
    """Large objects are half there until somebody has looked, or nobody wanted to for a while."""

    def __init__(self, inner):
        super().__init__(inner)
        self.looked = threading.Event()

    def stat(self, key):
        found = self.inner.stat(key)
        self.looked.set()
        return found

    def show_half(self, key: str, data: bytes) -> bool:
        """False if the key is taken."""
        if self.inner.create(key, data[: len(data) // 2]) is Created.EXISTS:
            return False
        self.looked.clear()
        self.looked.wait(LONG_ENOUGH_S)
        return True


class TornPut(_Torn):
    """C01, C02: the final name is there before the bytes are."""

    def put(self, key, parts):
        data = b"".join(parts)
        if len(data) > LARGE_BYTES and self.show_half(key, data):
            self.inner.delete([key])
        self.inner.put(key, [data])


class TornCreate(_Torn):
    def create(self, key, data):
        if len(data) <= LARGE_BYTES:
            return self.inner.create(key, data)
        if not self.show_half(key, bytes(data)):
            return Created.EXISTS
        self.replace(key, bytes(data))
        return Created.CREATED


class KeepsTheCallersMemory(Wrapped):
    """C125: the object is whatever that memory holds by the time it is read."""

    def __init__(self, inner):
        super().__init__(inner)
        self.held = {}

    def put(self, key, parts):
        self.inner.put(key, parts)
        self.held[key] = list(parts)

    def get(self, key, *, max_bytes):
        data = self.inner.get(key, max_bytes=max_bytes)
        return b"".join(self.held.get(key, [data]))


class DropsTheTail(Wrapped):
    """C17: one write moves only so much."""

    def put(self, key, parts):
        self.inner.put(key, [b"".join(parts)[:4096]])


class SecondWriterWins(Wrapped):
    """A store that claims to tell conflicts and overwrites."""

    def put(self, key, parts):
        self.replace(key, b"".join(parts))


# get and read_into


class CutsToTheLimit(Wrapped):
    def get(self, key, *, max_bytes):
        try:
            return self.inner.get(key, max_bytes=max_bytes)
        except FormatError:
            out = bytearray(max_bytes)
            self.inner.read_into(key, 0, memoryview(out))
            return bytes(out)


class RangeOffByOne(Wrapped):
    """`bytes=0-10` are eleven bytes: a range that does not begin at 0 comes one byte late."""

    def read_into(self, key, offset, out):
        self.inner.read_into(key, offset + 1 if offset else 0, out)


class ShortReadIsSuccess(Wrapped):
    def read_into(self, key, offset, out):
        try:
            self.inner.read_into(key, offset, out)
        except CorruptionError:
            there = max(0, self.inner.stat(key).size - offset)
            self.inner.read_into(key, min(offset, self.inner.stat(key).size), out.cast("B")[:there])


class OffsetsOf32Bits(Wrapped):
    def read_into(self, key, offset, out):
        self.inner.read_into(key, offset & 0xFFFFFFFF, out)


class ReadsOnAfterAFailure(Wrapped):
    """What is behind a read that has failed is still at work, and comes to an end while something else is asked."""

    def __init__(self, inner):
        super().__init__(inner)
        self.under_way = []

    def read_into(self, key, offset, out):
        try:
            self.inner.read_into(key, offset, out)
        except CorruptionError:
            self.under_way.append((key, out.cast("B")[:1]))
            raise

    def list(self, prefix, *, after=""):
        for key, out in self.under_way:
            self.inner.read_into(key, 0, out)
        yield from self.inner.list(prefix, after=after)


# list


class Unsorted(Wrapped):
    def list(self, prefix, *, after=""):
        yield from reversed(list(self.inner.list(prefix, after=after)))


class SortedByDirectory(Wrapped):
    """As `os.walk` would, with directories where their bare names stand."""

    def list(self, prefix, *, after=""):
        yield from sorted(self.inner.list(prefix, after=after), key=lambda item: item.key.split("/"))


class OnePageOnly(Wrapped):
    """C42: whatever is behind the first page does not exist."""

    PAGE = 30

    def list(self, prefix, *, after=""):
        yield from islice(self.inner.list(prefix, after=after), self.PAGE)


class ListLags(Wrapped):
    """What was written last is not in the next list."""

    last = None

    def put(self, key, parts):
        self.inner.put(key, parts)
        self.last = key

    def create(self, key, data):
        self.last = key
        return self.inner.create(key, data)

    def list(self, prefix, *, after=""):
        last, self.last = self.last, None
        yield from (item for item in self.inner.list(prefix, after=after) if item.key != last)


class PrefixWithoutSlash(Wrapped):
    """C43: 1 finds what belongs to 10."""

    def list(self, prefix, *, after=""):
        checked = self.inner.list(prefix, after=after)
        next(checked, None)  # refuses what is no prefix
        yield from (item for item in self.inner.list("", after=after) if item.key.startswith(prefix.removesuffix("/")))


class AfterIsInclusive(Wrapped):
    def list(self, prefix, *, after=""):
        found = self.inner.stat(after) if after.startswith(prefix) and after and not after.endswith("/") else None
        yield from [found] if found else []
        yield from self.inner.list(prefix, after=after)


class ListsLeftovers(Wrapped):
    """The temporaries of dead writers look like objects."""

    def list(self, prefix, *, after=""):
        left = [path for path in Path(self.inner.label, "tmp").rglob("*") if path.is_file()]
        found = [ObjectStat(f"data/{path.name}", path.stat().st_size) for path in left]
        yield from sorted([*self.inner.list(prefix, after=after), *found], key=lambda item: item.key)


# delete


class DeletesByPrefix(Wrapped):
    """C43: whoever deletes 1 loses 10 and 100."""

    def delete(self, keys):
        also = [item.key for item in self.inner.list("") if any(item.key.startswith(key) for key in keys)]
        return self.inner.delete([*keys, *also])


class DeleteFailsOnAbsent(Wrapped):
    """C62: what is gone already is taken for a failure."""

    def delete(self, keys):
        absent = [key for key in keys if self.inner.stat(key) is None]
        failures = [DeleteFailure(key, StoreError(f"no {key}", retryable=False, key=key)) for key in absent]
        return [*failures, *self.inner.delete(keys)]


class HidesDeleteFailures(Wrapped):
    """C72: nobody reads the list of errors."""

    def delete(self, keys):
        self.inner.delete(keys)
        return []


class StopsAtTheFirstFailure(Wrapped):
    """C73: one key that cannot be deleted keeps all others."""

    def delete(self, keys):
        for key in keys:
            if failures := self.inner.delete([key]):
                return failures
        return []


# keys and errors


class TidiesKeys(Wrapped):
    """C142: a key is taken for a path, and made one."""

    def put(self, key, parts):
        self.inner.put(os.path.normpath(key).lstrip("/."), parts)


class FoldsCase(Wrapped):
    """As some file systems do."""

    def create(self, key, data):
        return self.inner.create(key.lower(), data)

    def get(self, key, *, max_bytes):
        return self.inner.get(key.lower(), max_bytes=max_bytes)


class _Says(Wrapped):
    """Errors of every method, changed."""

    def changed(self, error: Exception) -> Exception:
        raise NotImplementedError

    def _try(self, call: Callable[[], object]):
        try:
            return call()
        except TieredCheckpointError as error:
            raise self.changed(error) from error

    def stat(self, key):
        return self._try(lambda: self.inner.stat(key))

    def get(self, key, *, max_bytes):
        return self._try(lambda: self.inner.get(key, max_bytes=max_bytes))

    def put(self, key, parts):
        return self._try(lambda: self.inner.put(key, parts))


class EverythingMayPass(_Says):
    def changed(self, error):
        return StoreError(str(error), retryable=True) if isinstance(error, StoreError) else error


class NothingMayPass(_Says):
    def changed(self, error):
        return StoreError(str(error), retryable=False) if isinstance(error, StoreError) else error


class ErrorsAreAbsence(_Says):
    """C99: a passing error at start-up is taken for an empty run."""

    def changed(self, error):
        return NotFoundError(str(error)) if isinstance(error, StoreError) else error


@dataclass(frozen=True)
class Spoiled:
    """`fails` must fail; `may_fail`, checks and groups, may as well; nothing else. `on_disk`: on a directory, with its hooks."""

    store: type[Wrapped]
    fails: str
    may_fail: frozenset[str] = frozenset()
    on_disk: bool = False


def _spoiled(store: type[Wrapped], fails: str, *may_fail: str, on_disk: bool = False) -> Spoiled:
    return Spoiled(store, fails, frozenset(may_fail), on_disk)


SPOILED = (
    _spoiled(IgnoresTheCondition, "create_leaves_an_existing_object_alone", "create"),
    _spoiled(OverwritesAndSaysExists, "create_leaves_an_existing_object_alone", "create"),
    _spoiled(
        ChecksThenWrites,
        "create_has_one_winner_of_many_racing_writers",
        "create_tells_each_racing_writer_who_won",
        "create_and_put_race_for_a_key",
    ),
    _spoiled(
        RemembersAbsence,
        "get_and_stat_see_what_another_writer_stored",
        "visibility_of_a_put_is_all_or_nothing",
        "visibility_of_a_create_is_all_or_nothing",
    ),
    _spoiled(
        TornPut,
        "visibility_of_a_put_is_all_or_nothing",
        "put_by_many_threads_of_the_same_bytes",
        "create_and_put_race_for_a_key",
        "list_keeps_what_stays_while_others_come_and_go",
    ),
    _spoiled(
        TornCreate,
        "visibility_of_a_create_is_all_or_nothing",
        "create_and_put_race_for_a_key",
        "create_tells_each_racing_writer_who_won",
    ),
    _spoiled(
        DropsTheTail,
        "put_keeps_sizes_around_a_page",
        "put_keeps_large_and_odd_sizes",
        "put_takes_a_header_aligned_slots_and_an_odd_tail",
        "put_by_many_threads_of_the_same_bytes",
        "create_and_put_race_for_a_key",
        "visibility_of_a_put_is_all_or_nothing",
    ),
    _spoiled(
        SecondWriterWins,
        "put_of_other_bytes_is_a_conflict",
        "put_by_many_threads_of_the_same_bytes",
        "create_and_put_race_for_a_key",
    ),
    _spoiled(KeepsTheCallersMemory, "put_and_create_do_not_need_their_memory_afterwards"),
    _spoiled(CutsToTheLimit, "get_refuses_what_is_larger_than_allowed"),
    _spoiled(
        RangeOffByOne,
        "read_into_fills_exactly_the_range",
        "read_into_of_the_end_of_an_object",
        "read_into_large_ranges_aligned_and_not",
        "read_into_takes_memory_of_any_item_size",
        "read_into_by_many_threads_at_once",
        "read_into_nothing",
    ),
    _spoiled(
        ShortReadIsSuccess,
        "read_into_past_the_end_is_corruption",
        "read_into_nothing",
        "cancellation_leaves_the_memory_of_a_failed_read_alone",
    ),
    _spoiled(OffsetsOf32Bits, "read_into_beyond_two_and_four_gib", on_disk=True),
    _spoiled(ReadsOnAfterAFailure, "cancellation_leaves_the_memory_of_a_failed_read_alone"),
    _spoiled(
        Unsorted,
        "list_is_complete_and_in_key_order",
        "list",
        "delete_removes_what_it_names_and_nothing_else",
        "keys_of_every_allowed_form_are_kept",
    ),
    _spoiled(SortedByDirectory, "list_keeps_key_order_around_the_slash"),
    _spoiled(OnePageOnly, "list_is_longer_than_a_page", "list_keeps_what_stays_while_others_come_and_go"),
    _spoiled(ListLags, "list_sees_writes_and_deletes_at_once", "keys_of_every_allowed_form_are_kept"),
    _spoiled(
        PrefixWithoutSlash, "list_of_a_prefix_takes_whole_segments", "list_of_nothing", "list_after_a_key_outside_of_the_prefix"
    ),
    _spoiled(AfterIsInclusive, "list_after_a_key", "list_keeps_key_order_around_the_slash", "list_is_longer_than_a_page"),
    _spoiled(
        ListsLeftovers,
        "visibility_of_an_interrupted_put_is_none",
        "visibility",
        "list_keeps_what_stays_while_others_come_and_go",
        on_disk=True,
    ),
    _spoiled(DeletesByPrefix, "delete_removes_what_it_names_and_nothing_else", "delete_of_absent_keys_is_fine"),
    _spoiled(DeleteFailsOnAbsent, "delete_of_absent_keys_is_fine", "delete_by_many_threads_at_once"),
    _spoiled(HidesDeleteFailures, "delete_reports_each_key_that_stays", "errors_of_an_outage_are_retryable", on_disk=True),
    _spoiled(StopsAtTheFirstFailure, "delete_reports_each_key_that_stays", on_disk=True),
    _spoiled(TidiesKeys, "keys_that_could_leave_the_root_are_refused"),
    _spoiled(FoldsCase, "keys_of_every_allowed_form_are_kept"),
    _spoiled(EverythingMayPass, "errors_of_a_refusal_are_not_retryable", on_disk=True),
    _spoiled(NothingMayPass, "errors_of_an_outage_are_retryable", on_disk=True),
    _spoiled(ErrorsAreAbsence, "errors_of_a_refusal_are_not_retryable", "errors_of_an_outage_are_retryable", on_disk=True),
)

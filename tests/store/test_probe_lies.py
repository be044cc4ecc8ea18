"""Stores that are right at first sight: which of them the probe refuses, and which only the conformance checks of `doctor` find."""

from __future__ import annotations

import contextlib
import time

import pytest

from tieredckpt.cli.examination import FEW, abilities
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import StoreError
from tieredckpt.store.base import Created, DeleteFailure
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.probe import probe
from tieredckpt.store.probe_messages import Problem
from tieredckpt.testing.faults import FailBefore, FaultStore, Rule
from tieredckpt.testing.store_checks import CHECKS, Bench, run_checks

INLINE_BYTES = 128 << 10
"""What some servers keep beside the name, and everything larger somewhere else."""


class Lying(MemoryStore):
    def overwrite(self, key, data):
        with self._lock:
            self._objects[key] = bytes(data)
        return Created.CREATED


class ConditionForSmallObjectsOnly(Lying):
    def create(self, key, data):
        return super().create(key, data) if len(data) <= INLINE_BYTES else self.overwrite(key, data)


class ConditionForAWhile(Lying):
    """As behind a balancer of which one server is older: the first requests happen to meet the others."""

    asked = 0

    def create(self, key, data):
        self.asked += 1
        return super().create(key, data) if self.asked % 25 else self.overwrite(key, data)


class LooksThenWrites(Lying):
    """The condition is honoured, one request after the other."""

    def create(self, key, data):
        if self.stat(key) is not None:
            return Created.EXISTS
        time.sleep(0.003)
        return self.overwrite(key, data)


class ListLagsByOne(Lying):
    last = None

    def create(self, key, data):
        self.last = key
        return super().create(key, data)

    def list(self, prefix, *, after=""):
        last, self.last = self.last, None
        yield from (item for item in super().list(prefix, after=after) if item.key != last)


class RangesOffByOne(Lying):
    def read_into(self, key, offset, out):
        super().read_into(key, offset + 1 if offset else 0, out)


class RangesOffBeyond64KiB(Lying):
    def read_into(self, key, offset, out):
        end = len(self._objects[key]) - out.nbytes
        super().read_into(key, min(offset + 1, end) if offset > 64 << 10 else offset, out)


class HeadIsStale(Lying):
    """The first HEAD after a put does not see it."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def stat(self, key):
        found = super().stat(key)
        if found is None or key in self.seen:
            return found
        self.seen.add(key)
        return None


class DeleteLies(Lying):
    def delete(self, keys):
        return ()


class TakesAndForgets(Lying):
    """200 with an error in its body, read by nobody."""

    def create(self, key, data):
        return Created.CREATED


FOUND_BY_THE_PROBE = [
    (ConditionForSmallObjectsOnly, Problem.UNFENCED),
    (ListLagsByOne, Problem.LISTS_LAG),
    (RangesOffByOne, Problem.WRONG_RANGES),
    (RangesOffBeyond64KiB, Problem.WRONG_RANGES),
    (HeadIsStale, Problem.WRONG_RANGES),
    (TakesAndForgets, Problem.NOT_READ_BACK),
]
FOUND_BY_THE_CHECKS = [
    (ConditionForSmallObjectsOnly, "create_takes_any_size_and_buffer"),
    (ConditionForAWhile, "create_has_one_winner_of_many_racing_writers"),
    (LooksThenWrites, "create_has_one_winner_of_many_racing_writers"),
    (ListLagsByOne, "list_sees_writes_and_deletes_at_once"),
    (RangesOffByOne, "read_into_fills_exactly_the_range"),
    (RangesOffBeyond64KiB, "read_into_by_many_threads_at_once"),
    (HeadIsStale, "get_and_stat_see_what_another_writer_stored"),
    (DeleteLies, "delete_removes_what_it_names_and_nothing_else"),
    (TakesAndForgets, "create_makes_an_absent_object"),
]


@pytest.mark.parametrize(("kind", "problem"), FOUND_BY_THE_PROBE, ids=[kind.__name__ for kind, _ in FOUND_BY_THE_PROBE])
def test_c27_the_probe_refuses_what_is_wrong_for_small_or_large_objects_only(kind, problem):
    assert problem in probe(kind(), InlineEnv()).problems


@pytest.mark.parametrize("kind", [ConditionForAWhile, LooksThenWrites])
def test_what_no_probe_can_see(kind):
    """So that the documentation of the probe stays true: this is what `doctor` is for, and what it cannot prove either."""
    assert probe(kind(), InlineEnv()).problems == ()


def test_c73_a_delete_that_deletes_nothing_is_said_and_not_refused():
    report = probe(DeleteLies(), InlineEnv())
    assert (report.problems, report.delete) == ((), False)
    assert "deleted objects are still there" in report.notes[0]


@pytest.mark.parametrize(("kind", "check"), FOUND_BY_THE_CHECKS, ids=[kind.__name__ for kind, _ in FOUND_BY_THE_CHECKS])
def test_the_bounded_checks_find_it(kind, check):
    shared = kind()  # one server for all checks, a new bucket for each

    @contextlib.contextmanager
    def bench():
        with shared._lock:
            shared._objects.clear()
        yield Bench(
            store=shared,
            raw_get=shared._objects.get,
            raw_set=shared._objects.__setitem__,
            abilities=abilities(tells_conflicts=True),
            env=Env(),
            extent=FEW,
        )

    results = run_checks(bench, [item for item in CHECKS if item.bounded])
    assert check in {result.name for result in results if result.outcome == "failed"}


# ------------------------------------------------------------------------------------------ a good store is not refused


def test_a_page_that_is_larger_than_what_was_written_is_no_store():
    class LargePage(Lying):
        def get(self, key, *, max_bytes):
            self._objects[key] = b"<!DOCTYPE html>".ljust(1 << 20)
            return super().get(key, max_bytes=max_bytes)

    assert probe(LargePage(), InlineEnv()).problems == (Problem.NOT_READ_BACK,)


# ------------------------------------------------------------------------------------------ nothing is left behind


class Interrupted(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("method", ["create", "get", "list", "read_into", "stat"])
def test_scratch_is_removed_however_the_probe_ends(method):
    class Leaves(MemoryStore):
        def __getattribute__(self, name):
            if name == method and len(object.__getattribute__(self, "_objects")) == 2 - (method == "create"):
                raise Interrupted
            return super().__getattribute__(name)

    store = Leaves()
    with pytest.raises(Interrupted):
        probe(store, InlineEnv())
    assert store._objects == {}


def test_scratch_is_removed_when_a_later_create_is_refused():
    store = MemoryStore()
    with pytest.raises(StoreError):
        probe(FaultStore(store, [Rule(FailBefore(retryable=False), method="create", nth=3, times=9)]), InlineEnv())
    assert store._objects == {}


HOUR_S = 3600.0
OURS = "probe/0123.json", "probe/notes/mine", f"probe/{'0' * 64}.json", "probe/01ARZ3NDEKTSV4RRFFQ69G5FAV", "log/1.json"


class At(InlineEnv):
    """An environment at another time of the same day."""

    def __init__(self, later_s):
        super().__init__(seed=int(later_s), start_time=1.7e9 + later_s)


class KilledHalfWay(MemoryStore):
    """As if the process had died: the clean-up does not happen, either."""

    def delete(self, keys):
        raise Interrupted


def killed_probe(store):
    dying = KilledHalfWay()
    dying._objects = store._objects
    with pytest.raises(Interrupted):
        probe(dying, At(0))
    assert len([key for key in store._objects if key not in OURS]) == 2


@pytest.mark.parametrize(("later_s", "stays"), [(60.0, 2), (0.9 * HOUR_S, 2), (1.1 * HOUR_S, 0), (-30 * HOUR_S, 2)])
def test_what_a_killed_probe_left_is_removed_by_the_first_one_that_comes_an_hour_later_c15(later_s, stays):
    """And nothing that is somebody's: the proofs of a node, a user's own objects, scratch that may be in use."""
    store = MemoryStore()
    for key in OURS:
        store.put(key, [b"kept"])
    killed_probe(store)
    assert probe(store, At(later_s)).delete
    assert len(store._objects) == len(OURS) + stays
    assert all(store._objects[key] == b"kept" for key in OURS)


@pytest.mark.parametrize("nth", range(1, 4))
def test_scratch_that_cannot_be_listed_or_deleted_is_no_reason_to_refuse(nth):
    store = MemoryStore()
    killed_probe(store)

    class NoMore(MemoryStore):
        def delete(self, keys):
            old = [key for key in keys if key in mine]
            super().delete([key for key in keys if key not in mine])
            return [DeleteFailure(key, StoreError("AccessDenied", retryable=False, key=key)) for key in old]

    mine = set(store._objects)
    later = NoMore()
    later._objects = store._objects
    faulty = FaultStore(later, [Rule(FailBefore(retryable=False), method="list", key="probe/", nth=nth)])
    assert probe(faulty, At(2 * HOUR_S)).problems == ()
    assert set(store._objects) == mine

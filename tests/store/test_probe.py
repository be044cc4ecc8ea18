"""The probe finds stores that cannot carry the protocol, and no lost answer makes it wrong (C23, C27, C73)."""

from __future__ import annotations

import uuid

import pytest

from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import StoreError
from tieredckpt.settings import Settings
from tieredckpt.store.base import Created, DeleteFailure
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.probe import ProbeReport, probe, require
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import parse_url
from tieredckpt.testing.faults import ApplyLate, FailBefore, FaultStore, LoseAnswer, Rule

GOOD = ProbeReport(create_if_absent=True, list_after_write=True, range_read=True, delete=True)


class IgnoresConditions(MemoryStore):
    def create(self, key, data):
        self._objects[key] = bytes(data)
        return Created.CREATED


class SaysExistsButOverwrites(MemoryStore):
    def create(self, key, data):
        there = key in self._objects
        self._objects[key] = bytes(data)
        return Created.EXISTS if there else Created.CREATED


class ListsNothing(MemoryStore):
    def list(self, prefix, *, after=""):
        return iter(())


class WrongRanges(MemoryStore):
    def read_into(self, key, offset, out):
        super().read_into(key, 0, out)


class MayNotDelete(MemoryStore):
    def delete(self, keys):
        return [DeleteFailure(key, StoreError("AccessDenied", retryable=False, key=key)) for key in keys]


def test_a_good_store_passes_and_nothing_is_left():
    store = MemoryStore()
    report = probe(store, InlineEnv())
    assert report == GOOD
    require(store, report, allow_unfenced=False)
    assert not list(store.list(""))


@pytest.mark.parametrize("kind", [IgnoresConditions, SaysExistsButOverwrites])
def test_c27_a_store_that_ignores_the_condition_is_refused_unless_allowed(kind):
    store = kind()
    report = probe(store, InlineEnv())
    assert not report.create_if_absent
    with pytest.raises(StoreError, match="allow_unfenced") as caught:
        require(store, report, allow_unfenced=False)
    assert not caught.value.retryable
    require(store, report, allow_unfenced=True)


@pytest.mark.parametrize(("kind", "what"), [(ListsNothing, "lists"), (WrongRanges, "range")])
def test_a_store_that_lies_elsewhere_is_refused_even_unfenced(kind, what):
    store = kind()
    with pytest.raises(StoreError, match=what):
        require(store, probe(store, InlineEnv()), allow_unfenced=True)


def test_c73_a_store_that_forbids_deleting_is_noted_and_used():
    store = MayNotDelete()
    report = probe(store, InlineEnv())
    assert report.delete is None
    assert "AccessDenied" in report.notes[0]
    require(store, report, allow_unfenced=False)


@pytest.mark.parametrize("act", [FailBefore(), LoseAnswer(), ApplyLate(calls=1), ApplyLate(calls=3)])
def test_one_lost_answer_at_any_request_changes_no_verdict(act):
    inner = FaultStore(MemoryStore())
    probe(inner, InlineEnv())
    requests = len(inner.calls)
    assert requests >= 8
    for nth in range(1, requests + 1):
        assert probe(FaultStore(MemoryStore(), [Rule(act, nth=nth)]), InlineEnv()) == GOOD, f"request {nth}"
        report = probe(FaultStore(IgnoresConditions(), [Rule(act, nth=nth)]), InlineEnv())
        assert not report.create_if_absent, f"request {nth}"


def test_a_store_that_refuses_to_be_written_is_an_error():
    store = FaultStore(MemoryStore(), [Rule(FailBefore(retryable=False), method="create")])
    with pytest.raises(StoreError):
        probe(store, InlineEnv())


@pytest.mark.parametrize("name", ["moto", "seaweedfs"])
def test_real_servers_pass(name, request):
    server = request.getfixturevalue(name)
    url = parse_url(f"{server.make_bucket('suite')}/{uuid.uuid4().hex}")
    store = S3Store.open(url, server.storage_options, settings=Settings(), env=Env())
    report = probe(store, Env())
    assert report == GOOD
    assert not list(store.list(""))
    store.close()

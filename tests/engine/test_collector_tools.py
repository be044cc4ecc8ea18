"""What a collector does where it may not delete, cannot read, or meets a tree that was copied: nothing that cannot be taken back."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
import pytest
import zstandard

from tests.engine.runkit import SMALL, Job, Place, Request, begun, ids, names, owners, refuse, tool
from tieredckpt.engine.collector import Collector, usage_of
from tieredckpt.engine.tier import OpenTier, open_existing
from tieredckpt.errors import CorruptionError, FormatError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.manifest import PackEntry, decode_manifest, decode_pack_keys
from tieredckpt.format.records import CommitRecord, PinRecord, RetireRecord
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.ids import SessionId, make_snapshot_id
from tieredckpt.plan.keep import KeepLast, KeepTagged
from tieredckpt.plan.policies import Incremental, Retention
from tieredckpt.store.memory import MemoryStore

ONE = Retention(KeepLast(1), KeepLast(1))
CUT = replace(SMALL, piece_bytes=100)
"""Sixty packs in a snapshot."""


def denied(request: Request) -> StoreError | None:
    return StoreError("403 AccessDenied", retryable=False) if request.method == "delete" else None


def opened(place: Place, tier: str) -> OpenTier:
    return open_existing("local" if tier == "local" else "remote", place.store(tier), place.env, SMALL)


# ------------------------------------------------------------------------------------------ no right to delete


def test_c73_without_the_right_to_delete_a_sample_is_asked_and_saves_go_on(caplog: pytest.LogCaptureFixture):
    """A refusal for each object of every snapshot that was ever retired, after each save, would hold up the uploads."""
    place = Place()
    job = begun(place, retention=ONE, settings=CUT)
    asked = 0

    def count(request: Request) -> StoreError | None:
        nonlocal asked
        asked += request.method == "delete"
        return denied(request)

    assert job.remote is not None
    job.remote.fault = count
    with caplog.at_level(logging.WARNING, "tieredckpt"):
        for step in range(1, 9):
            before = asked
            handle = job.save(step)
            job.work()
            assert handle.remote.result(0).step == step
            assert asked - before <= 200
    assert len(names(place.remote, "data/")) == 8 * 60
    warnings = [record.getMessage() for record in caplog.records if "could not be deleted" in record.getMessage()]
    assert len(warnings) == 1
    assert "63 of 63 objects" in warnings[0]  # 60 packs, a manifest, a receipt, an upload manifest
    failed = job.run.gc(dry_run=False)["remote"].failed
    assert len(failed) == 7 * 63
    assert sum("not tried" in why and "403" in why for why in failed.values()) > 100
    job.remote.fault = None
    job.save(9)
    job.end()
    assert owners(place.remote) == {9}
    place.check()


def refusing(place: Place, job: Job) -> Collector:
    """A tool's collector behind the wire of the job."""
    assert job.remote is not None
    tier = replace(opened(place, "remote"), store=job.remote)
    return Collector(tier, KeepLast(1), session=None, protected=lambda _: {}, env=place.env)


def test_objects_that_are_locked_do_not_keep_the_others():
    """An object lock on some: everything else goes, also if the locked ones come first."""
    place = Place()
    job = begun(place, 1, 2, 3, 4, 5, 6, settings=CUT)
    locked = sorted(names(place.remote, "data/"))[:60]
    assert job.remote is not None
    job.remote.fault = lambda r: denied(r) if r.keys[0] in locked else None
    collector = refusing(place, job)
    done = collector.execute(collector.plan())
    assert set(done.failed or ()) == set(locked)
    assert owners(place.remote) == {1, 6}


def test_a_store_that_is_busy_is_asked_for_all_of_them():
    """`slow down` is no refusal: what can be deleted is."""
    place = Place()
    job = begun(place, 1, 2, 3, 4, 5, settings=CUT)
    asked: set[str] = set()

    def busy(request: Request) -> StoreError | None:
        if request.method != "delete" or len(asked) >= 126:
            return None
        asked.update(request.keys)
        return StoreError("slow down", retryable=True)

    assert job.remote is not None
    job.remote.fault = busy
    collector = refusing(place, job)
    done = collector.execute(collector.plan())
    assert set(done.failed or ()) == asked
    assert len(done.deleted) == 4 * 63 - 126
    assert collector.collect().failed == {}
    assert owners(place.remote) == {5}


# ------------------------------------------------------------------------------------------ what cannot be read or listed


@pytest.mark.parametrize("prefix", ["data/", "snapshots/", "log/"])
def test_c99_a_tool_that_cannot_list_changes_nothing(prefix: str):
    place = Place()
    job = begun(place, 1, 2, 3)
    assert job.remote is not None
    job.remote.fault = refuse("list", prefix)
    before = names(place.remote)
    tier = OpenTier("remote", job.remote, opened(place, "remote").log, "R")
    if prefix == "log/":
        tier = open_existing("remote", job.remote, place.env, SMALL)
    collector = Collector(tier, KeepLast(1), session=None, protected=lambda _: {}, env=place.env)
    for act in (collector.plan, collector.collect, lambda: usage_of(tier)):
        with pytest.raises(StoreError, match="slow down"):
            act()
    assert names(place.remote) == before


@pytest.mark.parametrize("how", ["damaged", "missing", "longer"])
def test_i8_nothing_is_swept_while_a_live_manifest_cannot_be_read(how: str, caplog: pytest.LogCaptureFixture):
    """It may name any pack. Retiring goes on, and so does deleting what is condemned."""
    place = Place()
    begun(place, 1, 2, 3)
    head = ids(place)[3]
    key = keys.manifest_key(head)
    stored = place.remote.get(key, max_bytes=1 << 20)
    place.remote.delete([key])
    if how != "missing":
        place.remote.put(key, [stored[:-1] + bytes([stored[-1] ^ 1]) if how == "damaged" else stored + b"more"])
    packs = names(place.remote, "data/")
    done = tool(place, "remote").collect()
    assert (place.steps("remote"), names(place.remote, "data/")) == ([3], packs)
    assert done.deleted == ()
    assert "nothing is swept" in caplog.text
    with pytest.raises(CorruptionError):
        usage_of(opened(place, "remote"))
    place.remote.delete([key])
    place.remote.put(key, [stored])
    tool(place, "remote").collect()
    assert owners(place.remote) == {3}
    place.check_tier("remote")


def test_i8_i17_a_snapshot_of_a_newer_library_may_name_any_pack(caplog: pytest.LogCaptureFixture):
    place = Place()
    begun(place, 1, 2, 3)
    log = opened(place, "remote").log
    state = log.refresh()
    session = SessionId(str(state.newest))
    newer = zstandard.compress(b'{"format":"tieredckpt-manifest","version":2}')
    name = make_snapshot_id(4, session, 4)
    place.remote.put(keys.manifest_key(name), [newer])
    log.append(
        CommitRecord(
            session=session, origin=session, snapshot=name, predecessors=(str(state.head),), manifest_digest=sha256_digest(newer),
            manifest_bytes=len(newer), step=4, saved_at="2026-01-01T00:00:00.000000Z",
        )
    )  # fmt: skip
    before = names(place.remote, "data/")
    done = tool(place, "remote").collect()
    assert (place.steps("remote"), names(place.remote, "data/"), done.deleted) == ([4], before, ())
    assert "version 2" in caplog.text


# ------------------------------------------------------------------------------------------ reading only the names of packs


def chain(place: Place, steps: int = 4) -> Job:
    job = begun(place, incremental=Incremental(), settings=replace(SMALL, piece_bytes=1000))
    for step in range(1, steps + 1):
        value = bytearray(b"a" * 6000)
        value[:step] = b"b" * step
        job.save(step, bytes(value))
    job.work()
    return job


def test_the_names_of_packs_are_those_of_the_whole_manifest():
    place = Place()
    chain(place)
    for snapshot, record in place.log("remote").live.items():
        stored = place.remote.get(keys.manifest_key(snapshot), max_bytes=1 << 20)
        whole = decode_manifest(stored, record.manifest_digest)
        assert decode_pack_keys(stored, record.manifest_digest) == (snapshot, frozenset(pack.key for pack in whole.packs))
        with pytest.raises(CorruptionError, match="do not have the digest"):
            decode_pack_keys(stored, sha256_digest(b""))


def test_a_manifest_without_a_list_of_packs_is_refused():
    """That nothing is named and that no list was found are not the same."""
    place = Place()
    begun(place, 1)
    (snapshot,) = place.log("remote").live
    text = zstandard.decompress(place.remote.get(keys.manifest_key(snapshot), max_bytes=1 << 20))
    fields = msgspec.json.decode(text)
    fields["packs"] = []
    empty = zstandard.compress(msgspec.json.encode(fields))
    assert decode_pack_keys(empty, sha256_digest(empty)) == (snapshot, frozenset())
    del fields["packs"]
    without = zstandard.compress(msgspec.json.encode(fields))
    with pytest.raises(FormatError, match="packs"):
        decode_pack_keys(without, sha256_digest(without))


# ------------------------------------------------------------------------------------------ chains, races, long reasons


def test_i8_a_chain_loses_no_pack_that_is_needed_and_every_other_c65():
    place = Place()
    chain(place)
    before = usage_of(opened(place, "remote"))
    newest = ids(place)[4]
    needed = {pack.key for pack in manifest_packs(place, newest)}
    done = tool(place, "remote").collect()
    assert names(place.remote, "data/") == needed
    after = usage_of(opened(place, "remote"))
    assert after.stored == before.stored - done.bytes_deleted
    assert (after.reclaimable, after.shared, len(after.snapshots)) == (0, 0, 1)
    place.check_tier("remote")


def manifest_packs(place: Place, snapshot: str) -> tuple[PackEntry, ...]:
    record = place.log("remote").live[snapshot]
    return decode_manifest(place.remote.get(keys.manifest_key(snapshot), max_bytes=1 << 20), record.manifest_digest).packs


def test_usage_looks_again_when_a_collection_has_come_between():
    """A manifest is gone when it is read: its snapshot was retired a moment ago. That is no damage."""
    place = Place()
    begun(place, 1, 2, 3)
    tier = opened(place, "remote")
    collected = False

    class Between(MemoryStore):
        def get(self, key: str, *, max_bytes: int) -> bytes:
            nonlocal collected
            if key.startswith("snapshots/") and not collected:
                collected = True
                tool(place, "remote").collect()
            return place.remote.get(key, max_bytes=max_bytes)

        def list(self, prefix: str, *, after: str = ""):
            return place.remote.list(prefix, after=after)

    usage = usage_of(replace(tier, store=Between()))
    assert collected
    assert ([row.live for row in usage.snapshots], usage.missing) == ([True], ())


def test_a_plan_that_was_overtaken_takes_neither_the_pinned_nor_the_retired_twice():
    place = Place()
    begun(place, 1, 2, 3, 4)
    collector = tool(place, "remote")
    plan = collector.plan()
    plan_ids = [item.subject for item in plan.retire]
    assert len(plan_ids) == 3
    log = opened(place, "remote").log
    log.append(PinRecord(snapshot=ids(place)[2], reason="wanted"))
    log.append(RetireRecord(snapshots=(ids(place)[1],)))
    done = collector.execute(plan)
    assert place.steps("remote") == [2, 4]
    assert set(done.retired) == {
        name for name in plan_ids if name[:12] in ("000000000001", "000000000003")
    }  # one by somebody else
    assert owners(place.remote) == {2, 4}
    place.check_tier("remote")


def test_the_reason_of_a_long_policy_fits_into_a_record():
    place = Place()
    begun(place, 1, 2)
    tags = KeepTagged(*(f"tag number {n}" for n in range(1000)))
    collector = Collector(opened(place, "remote"), tags, session=None, protected=lambda _: {}, env=place.env)
    assert collector.collect().retired
    record = next(record for record in opened(place, "remote").log.records() if isinstance(record, RetireRecord))
    assert record.reason.startswith("not kept by KeepTagged(tags=('tag number 0'")
    assert len(record.reason) == 1000

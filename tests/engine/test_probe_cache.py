"""The proof that a bucket can be used: made once on each node, kept there, and never believed about anything else."""

from __future__ import annotations

import uuid

import pytest

from localstack.fault_proxy import proxied
from tests.engine import kit
from tieredckpt.engine import probe_cache
from tieredckpt.engine.probe_cache import proof_key
from tieredckpt.engine.tier import RemoteLink, TierOpener
from tieredckpt.env import Env
from tieredckpt.errors import StoreError
from tieredckpt.plan.policies import KeepAll
from tieredckpt.settings import Settings
from tieredckpt.store.base import Created, DeleteFailure, Findings
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.probe import PROBE_PREFIX
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import parse_url
from tieredckpt.testing.faults import FailBefore, FaultStore, Rule
from tieredckpt.tier import Tier

HASTY = Settings(request_timeout_s=5.0, commit_timeout_s=5.0)
PLACE = ("test", "http://store:9000", "bucket", "run/")


class Bucket(MemoryStore):
    """A store that knows where it is, and can be made to lie or to be in danger. Its objects outlive every open."""

    def __init__(self, place=PLACE):
        super().__init__("bucket")
        self.where, self.lies, self.dangers = place, False, ()

    def place(self):
        return self.where

    def findings(self, scratch):
        return Findings(dangers=self.dangers)

    def create(self, key, data):
        if self.lies and key.startswith(PROBE_PREFIX):
            self._objects[key] = bytes(data)
            return Created.CREATED
        return super().create(key, data)


class MayNotDelete(Bucket):
    def delete(self, keys):
        return [DeleteFailure(key, StoreError("AccessDenied", retryable=False, key=key)) for key in keys]


@pytest.fixture
def bucket():
    return Bucket()


def here(path, *script):
    return FaultStore(LocalStore(path, env=Env(), create=True), list(script))


def probed(store) -> bool:
    """Did somebody write to its scratch prefix?"""
    return any(call.method == "create" and call.keys[0].startswith(PROBE_PREFIX) for call in store.calls)


def opens(local, bucket, **options):
    """Open both tiers and close them; was the bucket probed?"""
    remote = FaultStore(bucket)
    try:
        TierOpener(Env(), HASTY, **options).open(local, remote)
        return probed(remote)
    finally:
        remote.close()
        if local is not None:
            local.close()


def proofs_in(path):
    return sorted(path.glob("probe/*"))


def test_the_second_open_on_a_node_sends_no_request_for_the_probe(ministack, tmp_path):
    """On a real server, request by request."""
    url = parse_url(f"{ministack.make_bucket('suite')}/{uuid.uuid4().hex}")
    sent = []
    with proxied(ministack) as (server, proxy):
        for _ in range(2):
            before = len(proxy.requests)
            opens(here(tmp_path), S3Store.open(url, server.storage_options, settings=HASTY, env=Env()))
            sent.append([request.key.partition("/")[2] for request in proxy.requests[before:]])
    assert [any(key.startswith(PROBE_PREFIX) for key in keys_sent) for keys_sent in sent] == [True, False]
    assert len(sent[1]) <= 4
    (proof,) = proofs_in(tmp_path)
    assert b'"suite"' in proof.read_bytes()
    assert ministack.secret not in proof.read_text()
    listed = ministack.client().list_objects_v2(Bucket="suite", Prefix=f"{url.path}/")["Contents"]
    assert [item["Key"] for item in listed] == [f"{url.path}/format.json"], "no proof and no scratch in the bucket"


def test_the_proof_in_a_bucket_is_not_believed(bucket, tmp_path):
    """A local root that was copied into a bucket must not vouch for the store that it came to."""
    assert opens(here(tmp_path / "a"), bucket)
    (proof,) = proofs_in(tmp_path / "a")
    bucket.put(f"probe/{proof.name}", [proof.read_bytes()])
    assert opens(here(tmp_path / "b"), bucket)


@pytest.mark.parametrize("part", range(4))
def test_it_says_nothing_about_another_place(bucket, tmp_path, part):
    """Another kind of store, endpoint, bucket, prefix."""
    assert opens(here(tmp_path), bucket)
    bucket.where = tuple(f"{name}x" if n == part else name for n, name in enumerate(PLACE))
    assert opens(here(tmp_path), bucket)
    bucket.where = PLACE
    assert not opens(here(tmp_path), bucket), "and still about the first one"


def test_another_version_of_the_library_probes_again(bucket, tmp_path, monkeypatch):
    assert opens(here(tmp_path), bucket)
    monkeypatch.setattr(probe_cache, "__version__", "99.0")
    assert opens(here(tmp_path), bucket)
    assert len(proofs_in(tmp_path)) == 2


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe not json", "flip", "swap"])
def test_a_damaged_proof_is_no_proof_and_no_error(bucket, tmp_path, damage):
    assert opens(here(tmp_path), bucket)
    (proof,) = proofs_in(tmp_path)
    good = proof.read_bytes()
    changed = {"flip": bytes([good[0] ^ 1]) + good[1:], "swap": good.replace(b"bucket", b"backet")}.get(damage, damage)
    proof.write_bytes(changed)
    assert opens(here(tmp_path), bucket)
    assert proof.read_bytes() == good
    assert not opens(here(tmp_path), bucket)


@pytest.mark.parametrize("method", ["get", "create", "delete"])
def test_a_disk_that_refuses_the_proof_costs_a_probe_and_nothing_else(bucket, tmp_path, method):
    failing = Rule(FailBefore(retryable=False), method=method, key=f"{PROBE_PREFIX}*", times=100)
    assert opens(here(tmp_path, failing), bucket)
    assert opens(here(tmp_path, failing), bucket) is (method != "delete"), "nothing was in the way of the new one"


def test_without_a_local_tier_the_process_remembers(bucket):
    bucket.where = (*PLACE, uuid.uuid4().hex)
    assert opens(None, bucket)
    assert not opens(None, bucket)


def test_a_run_that_began_without_its_bucket_proves_it_when_it_comes_back(bucket, tmp_path):
    local, remote = here(tmp_path), FaultStore(bucket)
    opener = TierOpener(Env(), HASTY)
    opened, _ = opener.open(local, None)
    assert proofs_in(tmp_path) == []
    RemoteLink(remote, opener, opened.run, None, local).connect()
    assert probed(remote)
    assert len(proofs_in(tmp_path)) == 1
    assert not opens(local, bucket)


def test_a_store_that_cannot_tell_its_place_is_probed_each_time(tmp_path):
    remote = FaultStore(MemoryStore())
    for _ in range(2):
        remote.calls.clear()
        local = here(tmp_path)
        TierOpener(Env(), HASTY).open(local, remote)
        assert probed(remote)
        local.close()
    assert proofs_in(tmp_path) == []


# ------------------------------------------------------------------------------------------ what is not good enough to be kept


def test_c27_an_unfenced_store_is_probed_and_warned_about_each_time(bucket, tmp_path, caplog):
    bucket.lies = True
    for _ in range(2):
        caplog.clear()
        assert opens(here(tmp_path), bucket, allow_unfenced=True)
        assert "is used without fencing, as allow_unfenced=True says: it ignores `If-None-Match: *`" in caplog.text
    assert proofs_in(tmp_path) == []
    with pytest.raises(StoreError, match="pass allow_unfenced=True"):
        opens(here(tmp_path), bucket)
    bucket.lies = False
    assert opens(here(tmp_path), bucket, allow_unfenced=True)
    assert len(proofs_in(tmp_path)) == 1, "allowed, and not needed: the store is good"


def test_what_will_lose_data_is_said_at_each_open(bucket, tmp_path, caplog):
    bucket.dangers = ("a rule deletes after 30 days",)
    for _ in range(2):
        caplog.clear()
        assert opens(here(tmp_path), bucket)
        assert "memory://bucket: a rule deletes after 30 days" in caplog.text
    bucket.dangers = ()
    assert opens(here(tmp_path), bucket)
    assert not opens(here(tmp_path), bucket)


def test_c73_the_right_to_delete_is_not_needed_and_no_scratch_piles_up(tmp_path):
    """Each probe leaves its scratch then: all the more reason for only one."""
    bucket = MayNotDelete()
    assert opens(here(tmp_path), bucket)
    assert not opens(here(tmp_path), bucket)
    assert len(list(bucket.list(PROBE_PREFIX))) == 2


# ------------------------------------------------------------------------------------------ beside everything else in a local tier


def test_verify_and_collection_leave_the_proof_alone(bucket, tmp_path):
    run = kit.start(LocalStore(tmp_path, env=Env(), create=True), bucket)
    kit.restore(run)
    kit.save(run, 1).local.result()
    kit.send(run)
    run.gc(dry_run=False)
    run.close()
    (proof,) = proofs_in(tmp_path)
    with Tier.open(tmp_path) as tier:
        report = tier.verify()
        assert report.ok
        assert (report.orphans, report.other_files) == ((), ())
        plan = tier.plan_gc(KeepAll())
        tier.gc(plan)
    assert proof.exists()
    assert proof.name == proof_key(proof.read_bytes()).removeprefix(PROBE_PREFIX)

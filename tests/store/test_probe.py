"""The probe finds stores that cannot carry the protocol, and no lost answer makes it wrong (C23, C27, C73)."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import threading
import uuid
from dataclasses import replace

import pytest

from localstack.fault_proxy import proxied
from tieredckpt.engine.tier import TierOpener
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import StoreError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.base import Created, DeleteFailure
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.probe import ProbeReport, probe, require
from tieredckpt.store.probe_messages import Problem
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.s3_bucket import dangers_of
from tieredckpt.store.url import parse_url
from tieredckpt.testing.faults import ApplyLate, FailBefore, FaultStore, LoseAnswer, Rule
from tieredckpt.testing.proxy_acts import Answer, ProxyRule, Refusal, Switches

HASTY = Settings(request_timeout_s=5.0, commit_timeout_s=5.0)

GOOD = ProbeReport(create_if_absent=True, read_after_write=True, list_after_write=True, range_read=True, delete=True)


@pytest.fixture
def ministack(ministack):
    ministack.make_bucket("suite")
    return ministack


@pytest.fixture
def nanio(nanio):
    nanio.make_bucket("suite")
    return nanio


class NoWaiting(Env):
    def sleep(self, seconds):
        pass


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


class LooksAndThenWrites(MemoryStore):
    """Perfect as long as nobody else is there: what no probe can see, so it says so itself."""

    unfenced_reason = "its create looks first and writes then"


class ReadsSomethingElse(MemoryStore):
    """Takes everything and answers with its own page, as a console or a login page does."""

    def create(self, key, data):
        return Created.CREATED

    def get(self, key, *, max_bytes):
        return b"<!DOCTYPE html><html>Sign in</html>"


def test_a_store_that_says_its_create_is_not_atomic_is_believed():
    store = LooksAndThenWrites()
    report = probe(store, InlineEnv())
    assert not report.create_if_absent
    with pytest.raises(StoreError, match=r"its create looks first and writes then, so two jobs .* allow_unfenced=True"):
        require(store, report, allow_unfenced=False)
    require(store, report, allow_unfenced=True)


def test_a_place_that_is_no_store_is_called_so_and_nothing_else():
    store = ReadsSomethingElse()
    report = probe(store, InlineEnv())
    assert report.problems == (Problem.NOT_READ_BACK,)
    with pytest.raises(StoreError, match="web console or a login page: set endpoint_url") as caught:
        require(store, report, allow_unfenced=True)
    assert "If-None-Match" not in str(caught.value)


def test_a_probe_that_fails_half_way_leaves_nothing():
    inner = MemoryStore()
    with pytest.raises(StoreError):
        probe(FaultStore(inner, [Rule(FailBefore(retryable=False), method="list")]), InlineEnv())
    assert not list(inner.list(""))


def test_c73_the_right_to_delete_is_not_missed_when_it_is_not_needed():
    assert probe(MayNotDelete(), InlineEnv()).problems == ()


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("moto", ["it stores objects whose crc64nvme checksum is wrong"]),
        ("ministack", []),
        ("seaweedfs", []),
    ],
)
def test_real_servers_pass_and_what_they_lack_is_noted(name, notes, request):
    server = request.getfixturevalue(name)
    server.make_bucket("suite")
    store = opened(server)
    report = probe(store, Env())
    assert replace(report, notes=()) == GOOD
    assert len(report.notes) == len(notes)
    assert all(note.startswith(start) for note, start in zip(report.notes, notes, strict=True))
    assert not list(store.list(""))
    store.close()


# ------------------------------------------------------------------------------------------ what a bucket says of itself


@pytest.fixture
def own_bucket(moto):
    """A bucket that a test may configure."""
    bucket = f"own-{uuid.uuid4().hex}"
    moto.make_bucket(bucket)
    return bucket


def rule(**fields):
    return {"ID": "tidy", "Status": "Enabled", "Expiration": {"Days": 90}, **fields}


def test_a_lifecycle_rule_of_the_bucket_that_reaches_the_log_is_a_danger(moto, own_bucket):
    """RELIABILITY: a name fences only while it exists."""
    rules = [rule(Filter={"Prefix": ""})]
    moto.client().put_bucket_lifecycle_configuration(Bucket=own_bucket, LifecycleConfiguration={"Rules": rules})
    store = opened(moto, own_bucket, "runs/a")
    report = probe(store, Env())
    assert len(report.dangers) == 1
    assert "'tidy' deletes after 90 days" in report.dangers[0]
    assert "runs/a/log/" in report.dangers[0]
    require(store, report, allow_unfenced=False)  # it works today: said, not refused
    store.close()


def test_a_versioned_bucket_is_noted(moto, own_bucket):
    moto.client().put_bucket_versioning(Bucket=own_bucket, VersioningConfiguration={"Status": "Enabled"})
    store = opened(moto, own_bucket)
    report = probe(store, Env())
    assert any("keeps versions" in note for note in report.notes)
    assert report.dangers == ()
    store.close()


def test_who_may_not_ask_is_told_nothing(ministack):
    with proxied(ministack, switches=Switches(deny=("GetBucket*",))) as (server, proxy):
        store = opened(server)
        report = probe(store, Env())
        assert {request.operation for request in proxy.requests} >= {"GetBucketVersioning", "GetBucketLifecycleConfiguration"}
        assert report == GOOD
        store.close()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "log/"),
        ({"Filter": {"Prefix": "runs/"}}, "log/"),
        ({"Filter": {"Prefix": "runs/a/log/000"}}, "log/"),
        ({"Prefix": "runs/a"}, "log/"),
        ({"Filter": {"And": {"Prefix": "runs/a/", "ObjectSizeGreaterThan": 1000}}}, "log/"),
        ({"Expiration": {"Date": "2030-01-01T00:00:00Z"}}, "log/"),
        ({"Expiration": {}, "Transitions": [{"Days": 30, "StorageClass": "GLACIER"}]}, "log/"),
        ({"Filter": {"Prefix": "runs/a/data/"}}, "runs/a/data/"),
        ({"Filter": {"And": {"Prefix": "", "ObjectSizeGreaterThan": 1 << 20}}}, "runs/a/data/"),
    ],
)
def test_rules_that_take_something_of_the_run(changed, says):
    (danger,) = dangers_of([rule(**changed)], "runs/a/")
    assert says in danger
    assert ("a log that loses a record" in danger) == (says == "log/")


@pytest.mark.parametrize(
    "changed",
    [
        {"Status": "Disabled"},
        {"Filter": {"Prefix": "runs/b/"}},
        {"Filter": {"Prefix": "runs/a/probe/"}},
        {"Filter": {"Tag": {"Key": "tmp", "Value": "yes"}}},
        {"Filter": {"And": {"Prefix": "", "Tags": [{"Key": "tmp", "Value": "yes"}]}}},
        {"Expiration": {"ExpiredObjectDeleteMarker": True}},
        {"Expiration": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 7}},
        {"Expiration": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}},
        {"Expiration": {}, "Transitions": [{"Days": 30, "StorageClass": "STANDARD_IA"}]},
    ],
)
def test_rules_that_leave_the_run_alone(changed):
    assert dangers_of([rule(**changed)], "runs/a/") == ()


# ------------------------------------------------------------------------------------------ one message for each kind of failure

ALWAYS = {"times": None}


def opened(server, bucket="suite", path=None, settings=HASTY):
    url = parse_url(f"s3://{bucket}/{path or uuid.uuid4().hex}")
    return S3Store.open(url, server.storage_options, settings=settings, env=Env())


def refusal_of(server, **options):
    """What a user is told who opens a run there."""
    store = opened(server, **options)
    try:
        with pytest.raises(StoreError) as caught:
            TierOpener(Env(), HASTY).open(None, store)
    finally:
        store.close()
    return caught.value


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"switches": Switches(signature_max_age_s=-1)}, "the clock of this machine is more than 15 minutes wrong"),
        ({"switches": Switches(ignore_conditions=True)}, "it ignores `If-None-Match: .*allow_unfenced=True"),
        ({"switches": Switches(refuse_conditions=Refusal(501, "NotImplemented"))}, "takes plain puts and refuses those with `If-None"),
        ({"rules": [ProxyRule(Answer(401, "Unauthorized"), "PutObject", **ALWAYS)]}, "reading works there and writing does not.*checksum"),
        ({"rules": [ProxyRule(Answer(403, "SignatureDoesNotMatch"), "PutObject", **ALWAYS)]}, "a checksum for example.*key and secret"),
        ({"rules": [ProxyRule(Answer(400, "AuthorizationHeaderMalformed"), **ALWAYS)]}, r"wrong region: set \?region="),
        ({"rules": [ProxyRule(Answer(301, "PermanentRedirect"), **ALWAYS)]}, "the bucket is in another region"),
        ({"rules": [ProxyRule(Answer(403, "SecondLevelDomainForbidden"), **ALWAYS)]}, "wants the bucket in the host name"),
        ({"rules": [ProxyRule(Answer(403, "InvalidAccessKeyId"), **ALWAYS)]}, "does not know this access key"),
        ({"switches": Switches(deny=("PutObject",))}, "they need s3:PutObject below s3://suite/"),
        ({"switches": Switches(deny=("*",))}, "may not do this: they need s3:GetObject, and s3:ListBucket"),
        ({"switches": Switches(deny=("ListObjects*",))}, "AccessDenied while listing .*may not do this"),
        ({"switches": Switches(stale_lists=1000)}, "lists do not show objects that were just written"),
    ],
    ids=[
        "clock", "c27-condition-ignored", "condition-refused", "c23-unauthorised-for-its-checksum", "c23-signature-refused", "region",
        "redirect", "c51-path-style", "access-key", "no-right-to-put", "no-rights", "no-right-to-list", "lists-lag",
    ],
)  # fmt: skip
def test_c23_each_kind_of_failure_says_what_is_wrong_and_what_to_do(ministack, kind, says):
    with proxied(ministack, **kind) as (server, proxy):
        error = refusal_of(server)
        assert re.search(says, str(error)), str(error)
        assert not error.retryable
        assert len(proxy.requests) < 40


def test_c27_a_real_server_that_ignores_conditions_is_refused(nanio):
    assert "it ignores `If-None-Match: *`" in str(refusal_of(nanio))


def test_c27_304_for_412_is_noted_and_used(ministack):
    with proxied(ministack, switches=Switches(not_modified=True)) as (server, _proxy):
        store = opened(server)
        report = probe(store, Env())
        assert report.problems == ()
        assert any("304" in note for note in report.notes)
        store.close()


def test_c21_a_store_that_refuses_checksums_is_noted_and_used(ministack):
    with proxied(ministack, switches=Switches(refuse_checksum_headers=Refusal(400, "InvalidRequest"))) as (server, _proxy):
        store = opened(server)
        report = probe(store, Env())
        assert report.problems == ()
        assert any("refuses crc64nvme checksums" in note for note in report.notes)
        store.close()


def test_a_bucket_that_is_not_there_is_not_made(ministack):
    store = S3Store.open(parse_url("s3://no-such-bucket/run"), ministack.storage_options, settings=HASTY, env=Env())
    with pytest.raises(StoreError, match="the bucket does not exist: create it") as caught:
        TierOpener(Env(), HASTY).open(None, store)
    assert not caught.value.retryable
    assert "no-such-bucket" not in {bucket["Name"] for bucket in ministack.client().list_buckets()["Buckets"]}
    store.close()


def test_an_outage_with_nothing_local_to_go_on_with_says_where_to_look():
    store = FaultStore(MemoryStore(), [Rule(FailBefore(), times=1000)])
    with pytest.raises(StoreError, match=r"out of reach, and there is no local run.*Is the address right") as caught:
        TierOpener(InlineEnv(), HASTY).open(None, store)
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("status", "size", "says"),
    [
        (200, 60, "answers with a web page"),
        (200, 200_000, "answers with a web page"),
        (404, 60, "no answer of S3"),
        (403, 60, "no answer of S3"),
        (405, 60, "no answer of S3"),
    ],
)
def test_an_address_that_is_no_store_at_all(status, size, says):
    with web_page(status, size) as options:
        store = S3Store.open(parse_url("s3://bucket/run"), options, settings=HASTY, env=NoWaiting())
        with pytest.raises(StoreError, match=f"{says}.*endpoint_url") as caught:
            TierOpener(NoWaiting(), HASTY).open(None, store)
        assert not caught.value.retryable
        store.close()


def test_no_credentials_are_an_error_after_one_look_at_the_metadata_service(monkeypatch, tmp_path):
    """Elsewhere that is looked for, again and again, for minutes. Here a service that never answers is asked once, and only for AWS."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        for url, looks in (("s3://bucket/run?endpoint_url=http://127.0.0.1:9", 0), ("s3://bucket/run", 2)):
            with pytest.raises(UsageError, match="no credentials for the bucket were found: set AWS_ACCESS_KEY_ID"):
                S3Store.open(parse_url(url), None, settings=HASTY, env=Env())
            assert waiting_at(silent) <= looks  # one for a token, one without


def waiting_at(server):
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            count += 1
    return count


@contextlib.contextmanager
def web_page(status, size):
    """A web server that has the same page for every request."""

    class Page(http.server.BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b"<!DOCTYPE html><html><body>Sign in<br></body></html>".ljust(size)
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "key": "key", "secret": "secret"}
        finally:
            server.shutdown()
            thread.join()

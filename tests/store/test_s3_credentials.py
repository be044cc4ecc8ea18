"""Credentials: found within seconds, read again when they are no longer good, and never needed to be good for long (C35, C145)."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localstack.fault_proxy import proxied
from tests.faults import numbered_run
from tests.faults.answers_story import LONG_S, BriefEnv
from tests.store.scripted_server import CANARY, NO_ANSWER, QUICK, error, hurry, scripted
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import StoreError, UsageError
from tieredckpt.settings import KIB, Settings
from tieredckpt.store.base import Created
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import open_store, parse_url
from tieredckpt.testing.proxy_acts import Answer, ProxyRule, Switches

SETTINGS = Settings(pack_bytes=64 * KIB, piece_bytes=16 * KIB, upload_threads=2, request_timeout_s=5.0, commit_timeout_s=5.0)


@pytest.fixture
def server(monkeypatch):
    hurry(monkeypatch)
    with scripted() as server:
        yield server


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An environment without credentials; returns the directory of the two files that may hold some."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path


def write_keys(home: Path, key: str) -> None:
    text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = token-of-{key}\n"
    (home / "credentials").write_text(text)


class Process:
    """A `credential_process` that gives another key each time, and fails while `broken` is there."""

    def __init__(self, home: Path, expires_in_s: int | None = None):
        self.calls = home / "calls"
        self.broken = home / "broken"
        program = home / "program.py"
        program.write_text(
            textwrap.dedent(f"""
            import datetime, json, pathlib, sys
            if pathlib.Path({str(self.broken)!r}).exists():
                sys.exit("the identity service is away")
            with open({str(self.calls)!r}, "a") as calls:
                calls.write("x")
                number = calls.tell()
            answer = {{"Version": 1, "AccessKeyId": f"KEY{{number}}", "SecretAccessKey": {CANARY!r}, "SessionToken": "t"}}
            expires_in_s = {expires_in_s!r}
            if expires_in_s is not None:
                expires_at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=expires_in_s)
                answer["Expiration"] = expires_at.isoformat()
            print(json.dumps(answer))
            """)
        )
        (home / "config").write_text(f"[default]\ncredential_process = {sys.executable} -S {program}\n")

    @property
    def count(self):
        return len(self.calls.read_text())


def keys_of(requests):
    """Access keys in the order in which they were first used."""
    return list(
        dict.fromkeys(request.headers["authorization"].partition("Credential=")[2].partition("/")[0] for request in requests)
    )


# found


def test_no_credentials_for_a_custom_endpoint_ask_no_metadata_service(home, server, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID"):
        S3Store.open(parse_url("s3://bucket/x?endpoint_url=http://127.0.0.1:1"), settings=QUICK, env=Env())
    assert not server.requests


def test_no_credentials_for_aws_ask_the_metadata_service_at_most_once(home, server, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    server.answers = [NO_ANSWER] * 20
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID"):
        S3Store.open(parse_url("s3://bucket/x?region=eu-west-1"), settings=QUICK, env=Env())
    assert 1 <= len(server.requests) <= 2


def test_an_unknown_profile_is_named(home):
    with pytest.raises(UsageError, match="nobody"):
        S3Store.open(parse_url("s3://bucket/x"), {"profile": "nobody"}, settings=QUICK, env=Env())


def test_a_provider_that_fails_at_the_beginning_is_a_usage_error(home):
    Process(home).broken.touch()
    with pytest.raises(UsageError, match="identity service"):
        S3Store.open(parse_url("s3://bucket/x?endpoint_url=http://127.0.0.1:1"), settings=QUICK, env=Env())


@pytest.mark.parametrize("bulk", ["boto3", "obstore"])
def test_wrong_credentials_are_refused_at_once(seaweedfs, bulk):
    url = parse_url(f"{seaweedfs.make_bucket('suite')}/x")
    options = {"endpoint_url": seaweedfs.endpoint_url, "key": seaweedfs.key, "secret": CANARY}
    store = S3Store.open(url, options, settings=QUICK, env=Env(), bulk=bulk)
    for act in (lambda: store.create("log/1", b"x"), lambda: store.put("data/x", [b"x"])):
        with pytest.raises(StoreError) as caught:
            act()
        assert not caught.value.retryable
        assert CANARY not in str(caught.value)


# read again


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
@pytest.mark.parametrize("bulk", ["boto3", "obstore"])
def test_c35_credentials_that_are_no_longer_good_are_read_again_and_the_request_sent_again(home, server, code, bulk):
    write_keys(home, "OLD")
    url = parse_url(f"s3://bucket/run?endpoint_url=http://127.0.0.1:{server.server_port}")
    store = S3Store.open(url, settings=QUICK, env=InlineEnv(), bulk=bulk)
    write_keys(home, "NEW")
    server.answers = [error(400, code)]
    assert store.create("log/1", b"x") is Created.CREATED
    store.put("data/x", [b"pack"])
    signed = [request[2]["Authorization"] for request in server.requests]
    assert ["OLD" in text for text in signed] == [True, False, False]
    assert ["NEW" in text for text in signed] == [False, True, True]
    assert server.requests[2][2]["x-amz-security-token"] == "token-of-NEW"


def test_c35_without_new_credentials_the_request_is_not_sent_again(home, server):
    write_keys(home, "OLD")
    url = parse_url(f"s3://bucket/run?endpoint_url=http://127.0.0.1:{server.server_port}")
    store = S3Store.open(url, settings=QUICK, env=InlineEnv(), bulk="boto3")
    server.answers = [error(400, "ExpiredToken")]
    with pytest.raises(StoreError, match=r"ExpiredToken.*renew the credentials") as caught:
        store.create("log/2", b"x")
    assert caught.value.retryable  # the upload stays pending until somebody renews them
    assert len(server.requests) == 1
    (home / "credentials").unlink()
    server.answers = [error(400, "ExpiredToken")]
    with pytest.raises(StoreError, match="no new ones") as caught:
        store.create("log/2", b"x")
    assert caught.value.retryable


def test_one_thread_reads_them_for_all(home, server):
    process = Process(home)
    url = parse_url(f"s3://bucket/run?endpoint_url=http://127.0.0.1:{server.server_port}")
    requests = S3Store.open(url, settings=QUICK, env=InlineEnv())._requests
    used = requests._clients
    with ThreadPoolExecutor(8) as pool:
        renewed = {id(clients) for clients in pool.map(requests._renewed, [used] * 8)}
    assert len(renewed) == 1
    assert process.count == 2


def test_a_provider_that_fails_later_is_an_outage_and_recovers(home, server):
    """botocore refreshes what expires within minutes with every request, and lets whatever its providers raise through."""
    process = Process(home, expires_in_s=30)
    url = parse_url(f"s3://bucket/run?endpoint_url=http://127.0.0.1:{server.server_port}")
    store = S3Store.open(url, settings=QUICK, env=InlineEnv())
    store.put("data/x", [b"pack"])
    process.broken.touch()
    for act in (lambda: store.put("data/y", [b"pack"]), lambda: store.create("log/1", b"x")):
        with pytest.raises(StoreError, match=r"could not be refreshed.*identity service") as caught:
            act()
        assert caught.value.retryable
        assert CANARY not in str(caught.value)
    assert len(server.requests) == 1
    (home / "program.py").write_text("print('not json')")
    process.broken.unlink()
    with pytest.raises(StoreError, match="could not be refreshed") as caught:
        store.put("data/y", [b"pack"])
    assert caught.value.retryable
    Process(home, expires_in_s=30)
    store.put("data/y", [b"pack"])
    assert server.requests[-1][3] == b"pack"


def test_a_request_that_was_late_is_signed_again(server):
    server.answers = [error(403, "RequestTimeTooSkewed")]
    assert server.store().create("log/1", b"x") is Created.CREATED
    assert len(server.requests) == 2


# in the middle of an upload


def begun(tmp_path: Path, remote: str, through) -> Run:
    env = BriefEnv()
    stores = (
        open_store(tmp_path / "local", None, settings=SETTINGS, env=env),
        open_store(remote, {"endpoint_url": through.endpoint_url}, settings=SETTINGS, env=env),
    )
    return Run(*stores, RunOptions(settings=SETTINGS), env)


def saved(run: Run, steps):
    handles = [numbered_run.save(run, step) for step in steps]
    for handle in handles:
        handle.local.result(LONG_S)
    return handles


def wait_for(condition, what):
    deadline = time.monotonic() + LONG_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def packs_by_rust(proxy):
    return sum("object_store" in request.headers["user-agent"] and request.status == 200 for request in proxy.requests)


def test_c35_a_token_that_expires_in_mid_upload_is_renewed_by_its_provider(home, ministack, tmp_path):
    process = Process(home)
    remote = f"{ministack.make_bucket('suite')}/{uuid.uuid4().hex}"
    with proxied(ministack, switches=Switches(token_good_for=14)) as (through, proxy):
        run = begun(tmp_path, remote, through)
        numbered_run.restore(run)
        for step in (1, 2):
            assert saved(run, [step])[0].remote.result(LONG_S).step == step
        assert run.take_failure() is None
        run.close(LONG_S)
        refused = [request for request in proxy.requests if request.status == 400]
        assert refused
        assert process.count == len(keys_of(proxy.requests)) > 2
        assert packs_by_rust(proxy) > 1
        puts = [request.key for request in proxy.requests if request.method == "PUT" and request.status == 200]
        assert len(puts) == len(set(puts))  # nothing was stored twice


def test_c35_a_token_that_nobody_renews_keeps_the_upload_waiting_and_loses_nothing(home, ministack, tmp_path):
    write_keys(home, "FIRST")
    remote = f"{ministack.make_bucket('suite')}/{uuid.uuid4().hex}"
    with proxied(ministack) as (through, proxy):
        run = begun(tmp_path, remote, through)
        numbered_run.restore(run)
        saved(run, [1])[0].remote.result(LONG_S)
        proxy.switch(Switches(token_good_for=4))  # counts from here
        handles = saved(run, [2, 3])
        why = wait_for(lambda: run.status().lag.last_error, "why nothing moves is not told")
        assert why.startswith("StoreError: HTTP 400 ExpiredToken")
        assert "renew the credentials" in why
        assert not any(handle.remote.done() for handle in handles)
        assert len(run.status().lag.waiting) == 2
        assert run.take_failure() is None  # an outage is not a failure
        write_keys(home, "SECOND")
        wait_for(lambda: "SECOND" in keys_of(proxy.requests), "the new credentials are not used")
        proxy.switch(Switches())
        assert [handle.remote.result(LONG_S).step for handle in handles] == [2, 3]
        assert run.status().lag.last_error == ""
        run.close(LONG_S)
        assert keys_of(proxy.requests) == ["FIRST", "SECOND"]


def test_requests_are_signed_when_they_are_sent_however_long_they_wait(home, ministack, tmp_path):
    """The uploader waits between its tries for longer than a signature is good."""
    write_keys(home, "KEY")
    remote = f"{ministack.make_bucket('suite')}/{uuid.uuid4().hex}"
    with proxied(ministack, switches=Switches(signature_max_age_s=4.0)) as (through, proxy):
        run = begun(tmp_path, remote, through)
        numbered_run.restore(run)
        saved(run, [1])[0].remote.result(LONG_S)
        proxy.script([ProxyRule(Answer(503, "SlowDown"), times=None)])
        handles = saved(run, [2, 3])
        threading.Event().wait(5.2)
        proxy.script([])
        assert [handle.remote.result(LONG_S).step for handle in handles] == [2, 3]
        assert run.take_failure() is None
        run.close(LONG_S)
        assert not [request for request in proxy.requests if request.status == 403]

"""Every act of the fault proxy is seen by a plain client of S3 as it would be in life, at the request that was meant; all is on record.

Against a real server: what was applied is looked up there, past the proxy.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ConnectionClosedError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from localstack.fault_proxy import switched
from localstack.process import free_ports
from tests.store.proxykit import BUCKET, client, refused, seen_through
from tieredckpt.errors import UsageError
from tieredckpt.testing.fault_proxy import FaultProxy
from tieredckpt.testing.proxy_acts import (
    Answer,
    ApplyLate,
    ForeignWinner,
    LoseAnswer,
    NeverAnswer,
    NotModified,
    ProxyRule,
    Refusal,
    ResetBefore,
    SlowBody,
    StallBody,
    Switches,
    TruncateBody,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def seen(ministack):
    with seen_through(ministack) as seen:
        yield seen


def cut_off(call):
    with pytest.raises(ConnectionClosedError):
        call()


# acts


def test_reset_before_applies_nothing(seen):
    seen.proxy.script([ProxyRule(ResetBefore())])
    cut_off(seen.put)
    assert seen.stored() is None
    seen.put()
    assert seen.stored() == b"data"
    assert [(request.status, request.upstream_status) for request in seen.proxy.requests] == [(None, None), (200, 200)]


def test_c24_lose_answer_applies_it_first(seen):
    seen.proxy.script([ProxyRule(LoseAnswer())])
    cut_off(lambda: seen.put(IfNoneMatch="*"))
    assert seen.stored() == b"data"
    assert refused(lambda: seen.put(IfNoneMatch="*")) == (412, "PreconditionFailed")
    assert [(request.status, request.upstream_status) for request in seen.proxy.requests] == [(None, 200), (412, 412)]


def test_c25_apply_late_arrives_just_before_a_later_request(seen):
    seen.proxy.script([ProxyRule(ApplyLate(requests=2), "PutObject")])
    cut_off(lambda: seen.put(data=b"late", IfNoneMatch="*"))
    assert seen.stored() is None
    seen.put("other")
    assert seen.stored() is None
    assert refused(lambda: seen.put(data=b"second", IfNoneMatch="*")) == (412, "PreconditionFailed")
    assert seen.stored() == b"late"


def test_c25_apply_late_now(seen):
    seen.proxy.script([ProxyRule(ApplyLate(requests=100), "DeleteObjects")])
    seen.put()
    cut_off(lambda: seen.delete("key"))
    assert seen.stored() == b"data"
    seen.proxy.apply_late_now()
    assert seen.stored() is None
    seen.put()
    seen.proxy.apply_late_now()
    assert seen.stored() == b"data", "it arrived twice"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, "InternalError"), (503, "SlowDown"), (409, "ConditionalRequestConflict"), (412, "PreconditionFailed"),
        (400, "ExpiredToken"), (403, "AccessDenied"), (403, "RequestTimeTooSkewed"), (403, "SignatureDoesNotMatch"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("applied", [False, True])
def test_answers_before_and_after_it_is_applied(seen, status, code, applied):
    seen.proxy.script([ProxyRule(Answer(status, code, applied), "PutObject")])
    assert refused(seen.put) == (status, code)
    assert seen.stored() == (b"data" if applied else None)
    (request,) = seen.proxy.requests
    assert (request.status, request.upstream_status) == (status, 200 if applied else None)


def test_c40_an_error_can_hide_in_a_200(seen):
    seen.proxy.script([ProxyRule(Answer(200, "InternalError"), "PutObject")])
    assert refused(seen.put)[1] == "InternalError"
    assert seen.proxy.requests[0].status == 200
    assert seen.stored() is None


def test_an_answer_to_head_has_no_body_and_the_connection_goes_on(seen):
    seen.proxy.script([ProxyRule(Answer(503, "SlowDown"), "HeadObject")])
    assert refused(seen.head)[0] == 503
    seen.put()
    assert seen.head()["ContentLength"] == 4
    assert seen.proxy.connections == 1


@pytest.mark.parametrize("server", ["ministack", "seaweedfs"])
def test_a_foreign_winner_comes_first_and_overwrites_nothing(server, request):
    with seen_through(request.getfixturevalue(server), [ProxyRule(ForeignWinner(b"theirs"), "PutObject", times=2)]) as seen:
        assert refused(lambda: seen.put(data=b"ours", IfNoneMatch="*"))[0] == 412
        assert seen.stored() == b"theirs"
        seen.put(data=b"ours, unconditionally")
        assert seen.stored() == b"ours, unconditionally"
        seen.proxy.script([ProxyRule(ForeignWinner(b"theirs"))])
        assert seen.get() == b"ours, unconditionally"


def test_c27_not_modified_in_place_of_412_only(seen):
    seen.proxy.script([ProxyRule(NotModified(), times=None)])
    seen.put(IfNoneMatch="*")
    assert refused(lambda: seen.put(IfNoneMatch="*"))[0] == 304
    assert seen.statuses == [200, 304]
    assert seen.get() == b"data"


@pytest.mark.parametrize("after", [0, 1, 99_999])
def test_a_truncated_body_ends_early(seen, after):
    seen.put(data=b"x" * 100_000)
    seen.proxy.script([ProxyRule(TruncateBody(after), "GetObject")])
    with pytest.raises((IncompleteReadError, ResponseStreamingError)):
        seen.get()
    assert seen.get() == b"x" * 100_000


def test_what_is_not_longer_is_not_truncated(seen):
    seen.proxy.script([ProxyRule(TruncateBody(4), times=None)])
    seen.put()
    assert seen.head()["ContentLength"] == 4
    assert seen.get() == b"data"
    assert seen.proxy.connections == 1


def test_c33_a_stalled_body_stops_in_the_middle(ministack):
    with seen_through(ministack, [ProxyRule(StallBody(after=70_000), "GetObject")]) as seen:
        seen.put(data=b"x" * 100_000)
        body = client(seen.server, 1.0).get_object(Bucket=BUCKET, Key=f"{seen.root}/key")["Body"]
        assert body.read(70_000) == b"x" * 70_000
        with pytest.raises(ReadTimeoutError):
            body.read(1)


def test_a_stall_that_ends_goes_on(seen):
    seen.put(data=b"x" * 100_000)
    seen.proxy.script([ProxyRule(StallBody(after=5, seconds=0.01), "GetObject")])
    assert seen.get() == b"x" * 100_000


def test_c33_a_slow_body_is_slow_in_both_directions(ministack):
    rules = [ProxyRule(SlowBody(bytes_per_s=20), key="*/slow", times=None)]
    with seen_through(ministack, rules) as seen:
        with pytest.raises(ReadTimeoutError):
            client(seen.server, 0.3).put_object(Bucket=BUCKET, Key=f"{seen.root}/slow", Body=b"x" * 20)
        seen.put("elsewhere", b"x" * 20)
        seen.proxy.script([ProxyRule(SlowBody(bytes_per_s=1000), key="*/slow", times=None)])
        seen.put("slow", b"x" * 100)
        assert seen.get("slow") == b"x" * 100


@pytest.mark.parametrize("applied", [False, True])
def test_c33_never_answer(ministack, applied):
    with seen_through(ministack, [ProxyRule(NeverAnswer(applied), "PutObject")], timeout_s=0.3) as seen:
        with pytest.raises(ReadTimeoutError):
            seen.put()
        while applied and seen.stored() is None:
            time.sleep(0.01)  # the proxy goes on when the client has gone
        assert seen.stored() == (b"data" if applied else None)
        assert seen.proxy.requests[0].status is None


def test_a_client_that_waits_for_ever_is_let_go_when_the_proxy_closes(ministack):
    ended = []
    with seen_through(ministack, [ProxyRule(NeverAnswer())], timeout_s=60) as seen:

        def wait():
            with pytest.raises(BotoCoreError):
                seen.put()
            ended.append(True)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not seen.proxy.requests:
            waiting.join(0.01)
        assert waiting.is_alive()
    waiting.join()
    assert ended


def test_a_server_that_is_down_is_a_cut_connection(ministack):
    (port,) = free_ports(1)
    with FaultProxy(f"http://127.0.0.1:{port}") as proxy:
        down = client(dataclasses.replace(ministack, endpoint_url=proxy.endpoint_url))
        cut_off(lambda: down.put_object(Bucket=BUCKET, Key="x", Body=b""))
        assert proxy.requests[0].upstream_status is None


# rules


def test_rules_count_the_requests_that_they_match(seen):
    seen.proxy.script(
        [
            ProxyRule(Answer(503, "A"), "PutObject", "*/a*", nth=2, times=2),
            ProxyRule(Answer(503, "B"), "*Object", "*/b", times=None),
            ProxyRule(Answer(503, "L"), "ListObjectsV2", f"{seen.root}/"),
        ]
    )
    seen.put("a1")
    seen.put("c")
    assert [refused(lambda: seen.put("a2"))[1], refused(lambda: seen.put("a3"))[1]] == ["A", "A"]
    seen.put("a4")
    assert [refused(lambda: seen.put("b"))[1], refused(lambda: seen.get("b"))[1]] == ["B", "B"]
    assert refused(seen.names)[1] == "L"
    assert sorted(seen.names()) == ["a1", "a4", "c"]
    assert refused(lambda: seen.put("b"))[1] == "B"
    seen.proxy.script([ProxyRule(Answer(503, "D"), key="*/c")])
    seen.put("b")
    assert refused(lambda: seen.delete("b", "c"))[1] == "D"
    seen.proxy.script(())
    assert not seen.delete("b", "c").get("Errors")


@pytest.mark.parametrize("wrong", [{"nth": 0}, {"times": 0}])
def test_rules_that_could_never_act_are_refused(wrong):
    with pytest.raises(UsageError):
        ProxyRule(LoseAnswer(), **wrong)


def test_several_acts_at_one_request(seen):
    seen.proxy.script([ProxyRule(ForeignWinner(b"theirs")), ProxyRule(NotModified()), ProxyRule(LoseAnswer(), nth=2)])
    assert refused(lambda: seen.put(IfNoneMatch="*"))[0] == 304
    assert seen.stored() == b"theirs"
    assert seen.proxy.requests[0].acts == (ForeignWinner(b"theirs"), NotModified())
    cut_off(seen.get)


# the record


def test_c51_c145_every_host_path_and_header_is_on_record_but_secrets_do_not_show(seen):
    seen.put("a b", Metadata={"colour": "red"})
    (request,) = seen.proxy.requests
    assert request.host == seen.server.endpoint_url.removeprefix("http://")
    assert request.path == f"/{BUCKET}/{seen.root}/a%20b"
    assert (request.bucket, request.key, request.method) == (BUCKET, f"{seen.root}/a b", "PUT")
    assert request.headers["x-amz-meta-colour"] == "red"
    signature = request.headers["authorization"].rpartition("Signature=")[2]
    assert len(signature) == 64
    assert "red" in repr(request.headers)
    assert signature not in repr(request.headers) + repr(request)


def test_what_goes_wrong_in_the_proxy_is_raised_at_its_end(seaweedfs):
    """Another writer's object needs credentials where the server checks signatures."""
    seaweedfs.make_bucket(BUCKET)
    proxy = FaultProxy(seaweedfs.endpoint_url, [ProxyRule(ForeignWinner())]).__enter__()
    through = client(dataclasses.replace(seaweedfs, endpoint_url=proxy.endpoint_url))
    cut_off(lambda: through.put_object(Bucket=BUCKET, Key="x", Body=b""))
    with pytest.raises(UsageError, match="credentials"):
        proxy.close()


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://127.0.0.1", "http://127.0.0.1:1/path"])
def test_the_server_is_given_by_its_address(url):
    with pytest.raises(UsageError):
        FaultProxy(url)


# the command


def test_the_command_stands_before_a_server_and_says_what_it_sees(ministack):
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "localstack.fault_proxy", ministack.endpoint_url, f"--port={port}", "--switch=deny=Delete*"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert f"http://127.0.0.1:{port}" in running.stdout.readline()
            through = client(dataclasses.replace(ministack, endpoint_url=f"http://127.0.0.1:{port}"))
            through.list_buckets()
            assert refused(lambda: through.delete_object(Bucket=BUCKET, Key="x"))[1] == "AccessDenied"
            assert running.stdout.readline().split() == ["1", "200", "ListBuckets", "/"]
            assert running.stdout.readline().split() == ["2", "403", "DeleteObject", f"{BUCKET}/x"]
        finally:
            running.terminate()


@pytest.mark.parametrize(
    ("text", "switches"),
    [
        ("page_size=3", Switches(page_size=3)),
        ("stale_lists=2", Switches(stale_lists=2)),
        ("signature_max_age_s=1.5", Switches(signature_max_age_s=1.5)),
        ("not_modified=yes", Switches(not_modified=True)),
        ("deny=PutObject,Delete*", Switches(deny=("PutObject", "Delete*"))),
        ("delete_errors=*/data/*", Switches(delete_errors="*/data/*")),
        ("refuse_trailers=501:NotImplemented", Switches(refuse_trailers=Refusal(501, "NotImplemented"))),
    ],
)
def test_switches_as_people_write_them(text, switches):
    assert switched(Switches(), text) == switches


@pytest.mark.parametrize("text", ["page_size", "page_size=x", "no_such=1", "not_modified=1", "refuse_trailers=400"])
def test_wrong_switches_are_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"one of page_size|should be like"):
        switched(Switches(), text)

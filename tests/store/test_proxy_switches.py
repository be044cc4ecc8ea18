"""The lasting habits that a fault proxy lends to a server, before one that checks no signatures and one that does."""

from __future__ import annotations

import re

import pytest

from tests.store.proxykit import BUCKET, client, refused, seen_through
from tieredckpt.testing.proxy_acts import ProxyRule, Refusal, ResetBefore, Switches
from tieredckpt.testing.proxy_http import Body, Head, HttpRequest
from tieredckpt.testing.proxy_s3 import call_of
from tieredckpt.testing.proxy_switches import Habits


@pytest.fixture
def seen(ministack):
    with seen_through(ministack) as seen:
        yield seen


@pytest.fixture(params=["ministack", "seaweedfs"])
def checked(request):
    """What a switch changes has to be signed again."""
    with seen_through(request.getfixturevalue(request.param)) as seen:
        yield seen


def test_c42_pages_are_as_small_as_they_are_told(checked):
    names = [f"log/{n:03d}" for n in range(10)]
    for name in names:
        checked.put(name)
    checked.proxy.switch(Switches(page_size=3))
    assert checked.names() == names
    assert checked.operations[10:] == ["ListObjectsV2"] * 4
    page = checked.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{checked.root}/", MaxKeys=2)
    assert len(page["Contents"]) == 2, "the client asked for less"


def test_c69_new_objects_do_not_show_for_a_while(seen):
    seen.put("old", b"1")
    seen.proxy.switch(Switches(stale_lists=3, stale_heads=1))
    seen.put("new & odd", b"2")
    assert refused(lambda: seen.head("new & odd"))[0] == 404
    assert seen.head("new & odd")["ContentLength"] == 1
    page = seen.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{seen.root}/")
    assert [item["Key"] for item in page["Contents"]] == [f"{seen.root}/old"]
    assert page["KeyCount"] == 1
    assert seen.get("new & odd") == b"2"
    assert sorted(seen.names()) == ["new & odd", "old"]


def test_c27_conditions_are_ignored(checked):
    checked.proxy.switch(Switches(ignore_conditions=True))
    checked.put(data=b"first", IfNoneMatch="*")
    checked.put(data=b"second", IfNoneMatch="*")
    checked.put(data=b"third", IfMatch='"never"')
    assert checked.stored() == b"third"


def test_conditions_are_refused(seen):
    seen.proxy.switch(Switches(refuse_conditions=Refusal(501, "NotImplemented")))
    assert refused(lambda: seen.put(IfNoneMatch="*")) == (501, "NotImplemented")
    seen.put()
    assert seen.stored() == b"data"


def test_c27_304_in_place_of_412(seen):
    seen.proxy.switch(Switches(not_modified=True))
    seen.put(IfNoneMatch="*")
    assert refused(lambda: seen.put(data=b"x", IfNoneMatch="*"))[0] == 304
    assert seen.stored() == b"data"


def test_c35_a_token_is_good_for_so_many_requests(seen):
    seen.proxy.switch(Switches(token_good_for=2))
    seen.put()
    seen.put()
    assert refused(seen.put) == (400, "ExpiredToken")
    renewed = client(seen.server, aws_session_token="another")
    renewed.put_object(Bucket=BUCKET, Key=f"{seen.root}/renewed", Body=b"")
    other = client(seen.server, key="other-key")
    other.put_object(Bucket=BUCKET, Key=f"{seen.root}/other", Body=b"")
    assert refused(seen.put) == (400, "ExpiredToken")
    assert sorted(seen.operations) == ["PutObject"] * 6


def test_a_signature_goes_stale():
    clock = [1_000_000_000.0]  # 2001-09-09T01:46:40Z
    habits = Habits(Switches(signature_max_age_s=60), lambda: clock[0])
    request = HttpRequest(Head("PUT /b/k HTTP/1.1", (("X-Amz-Date", "20010909T014640Z"),)), Body.of(b""))
    assert habits.refusal(1, call_of(request), request) is None
    clock[0] += 61
    answer = habits.refusal(2, call_of(request), request)
    assert answer.status == 403
    assert b"RequestTimeTooSkewed" in answer.body.content()


def test_a_fresh_signature_is_fresh(seen):
    seen.proxy.switch(Switches(signature_max_age_s=600))
    seen.put()
    seen.proxy.switch(Switches(signature_max_age_s=-600))
    assert refused(seen.put) == (403, "RequestTimeTooSkewed")


@pytest.mark.parametrize("refusal", [Refusal(400, "InvalidArgument"), Refusal(401, "Unauthorized")])
def test_c21_c23_checksum_headers_are_refused(seen, refusal):
    seen.proxy.switch(Switches(refuse_checksum_headers=refusal))
    assert refused(lambda: seen.put(ChecksumAlgorithm="CRC32")) == (refusal.status, refusal.code)
    assert seen.stored() is None
    seen.proxy.switch(Switches(refuse_trailers=refusal))
    seen.put(ChecksumAlgorithm="CRC32")
    assert seen.stored() == b"data", "a header is not a trailer"


def test_c22_a_batch_delete_needs_content_md5(seen):
    seen.proxy.switch(Switches(need_content_md5=True))
    seen.put()
    assert refused(lambda: seen.delete("key")) == (400, "MissingContentMD5")
    assert seen.stored() == b"data"


def test_c39_one_put_has_a_limit(seen):
    seen.proxy.switch(Switches(max_put_bytes=4))
    seen.put(data=b"1234")
    assert refused(lambda: seen.put("large", b"12345")) == (400, "EntityTooLarge")
    assert seen.stored("large") is None


def test_c40_a_200_with_an_error_in_it(seen):
    seen.proxy.switch(Switches(errors_as_200=("Put*",)))
    assert refused(seen.put)[1] == "InternalError"
    assert seen.statuses == [200]
    assert seen.stored() is None


def test_c72_some_keys_of_a_batch_cannot_be_deleted(checked):
    for name in ("a", "locked & 1", "b", "locked & 2"):
        checked.put(name)
    checked.proxy.switch(Switches(delete_errors="*/locked*"))
    answer = checked.delete("a", "locked & 1", "b", "locked & 2")
    assert [(error["Key"], error["Code"]) for error in answer["Errors"]] == [
        (f"{checked.root}/locked & 1", "AccessDenied"),
        (f"{checked.root}/locked & 2", "AccessDenied"),
    ]
    assert [checked.stored(name) for name in ("a", "b", "locked & 1", "locked & 2")] == [None, None, b"data", b"data"]
    assert len(checked.delete("locked & 1")["Errors"]) == 1
    one = {"Bucket": BUCKET, "Key": f"{checked.root}/locked & 1"}
    assert refused(lambda: checked.client.delete_object(**one)) == (403, "AccessDenied")
    assert checked.stored("locked & 1") == b"data"


def test_c73_operations_are_denied(seen):
    seen.put()
    seen.proxy.switch(Switches(deny=("Delete*", "ListObjectsV2")))
    assert refused(lambda: seen.delete("key")) == (403, "AccessDenied")
    assert refused(seen.names) == (403, "AccessDenied")
    assert seen.get() == b"data"


def test_c46_etags_say_nothing(seen):
    seen.proxy.switch(Switches(random_etags=True))
    tags = [seen.put()["ETag"] for _ in range(4)]
    assert len(set(tags)) == 4
    assert [bool(re.fullmatch(r'"[0-9a-f]{32}"', tag)) for tag in tags] == [True, False, True, False]
    assert [bool(re.fullmatch(r'"[0-9a-f]{32}-\d+"', tag)) for tag in tags] == [False, True, False, True]
    (item,) = seen.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{seen.root}/")["Contents"]
    seen.proxy.switch(Switches())
    assert item["ETag"] not in (seen.head()["ETag"], *tags)


def test_an_honest_server_again(seen):
    seen.proxy.switch(Switches(deny=("*",)))
    assert refused(seen.put)[1] == "AccessDenied"
    seen.proxy.switch(Switches())
    seen.put()
    assert seen.stored() == b"data"


def test_an_act_comes_before_a_habit(seen):
    """A request that was reset has used up no token."""
    seen.proxy.switch(Switches(token_good_for=1))
    seen.proxy.script([ProxyRule(ResetBefore())])
    with pytest.raises(Exception, match="closed"):
        seen.put()
    seen.put()
    assert refused(seen.put)[1] == "ExpiredToken"


# what a request is


@pytest.mark.parametrize(
    ("line", "operation", "bucket", "keys"),
    [
        ("GET /", "ListBuckets", "", ()),
        ("GET /b?list-type=2&prefix=log%2F", "ListObjectsV2", "b", ("log/",)),
        ("GET /b/?prefix=p", "ListObjects", "b", ("p",)),
        ("GET /b?versioning", "GetBucketVersioning", "b", ()),
        ("GET /b?lifecycle=", "GetBucketLifecycleConfiguration", "b", ()),
        ("PUT /b", "CreateBucket", "b", ()),
        ("HEAD /b", "HeadBucket", "b", ()),
        ("PUT /b/a%2Bb%20c/%C3%A9", "PutObject", "b", ("a+b c/é",)),
        ("PUT /b/x?x-id=PutObject", "PutObject", "b", ("x",)),
        ("PUT /b/k?partNumber=1&uploadId=u", "UploadPart", "b", ("k",)),
        ("POST /b/k?uploadId=u", "CompleteMultipartUpload", "b", ("k",)),
        ("DELETE /b/k?uploadId=u", "AbortMultipartUpload", "b", ("k",)),
        ("DELETE /b/k", "DeleteObject", "b", ("k",)),
        ("HEAD /b/k", "HeadObject", "b", ("k",)),
        ("PATCH /b/k", "Unknown", "b", ("k",)),
    ],
)
def test_requests_are_named_as_s3_names_them(line, operation, bucket, keys):
    call = call_of(HttpRequest(Head(f"{line} HTTP/1.1")))
    assert (call.operation, call.bucket, call.keys) == (operation, bucket, keys)


def test_a_copy_is_no_put():
    assert call_of(HttpRequest(Head("PUT /b/k HTTP/1.1", (("X-Amz-Copy-Source", "/b/other"),)))).operation == "CopyObject"


def test_a_batch_delete_names_its_keys():
    body = b"<Delete><Object><Key>a&amp;b</Key></Object><Object><Key>log/1</Key></Object></Delete>"
    assert call_of(HttpRequest(Head("POST /b?delete HTTP/1.1"), Body.of(body))).keys == ("a&b", "log/1")

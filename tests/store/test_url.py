"""URLs and options: what is not understood is refused by name; secrets never show (C44, C51, C145)."""

from __future__ import annotations

import pickle

import pytest

from tieredckpt.env import Env
from tieredckpt.errors import NotFoundError, NotYetAvailableError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.s3_config import read_options
from tieredckpt.store.secret import Secret
from tieredckpt.store.url import ParsedUrl, open_store, parse_url

CANARY = "canary-secret-7f3a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", ParsedUrl("s3", "bucket", "")),
        ("s3://bucket/", ParsedUrl("s3", "bucket", "")),
        ("s3://ck_pt.x/a.b/run-1", ParsedUrl("s3", "ck_pt.x", "a.b/run-1")),
        ("S3://bucket/run/", ParsedUrl("s3", "bucket", "run")),
        (
            "s3://b-1/r?endpoint_url=http://127.0.0.1:9000&region=eu-1",
            ParsedUrl("s3", "b-1", "r", "http://127.0.0.1:9000", "eu-1"),
        ),
        ("s3://bkt/r?endpoint_url=https%3A%2F%2Fh%3A1", ParsedUrl("s3", "bkt", "r", "https://h:1")),
        ("file:///tmp/a%20b", ParsedUrl("file", "", "/tmp/a b")),
        ("file://localhost/x", ParsedUrl("file", "", "/x")),
        ("/nvme/run [1]", ParsedUrl("file", "", "/nvme/run [1]")),
        ("relative/run", ParsedUrl("file", "", "relative/run")),
        ("memory://a/b", ParsedUrl("memory", "a/b", "")),
    ],
)
def test_what_is_understood(text, expected):
    assert parse_url(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "known are"),
        ("s4://bucket/x", "unknown URL scheme 's4'"),
        ("https://host/bucket", "unknown URL scheme 'https'"),
        ("s3:/bucket/x", "without its '//'"),
        ("file:/x", "without its '//'"),
        ("s3:///x", "not a bucket name"),
        ("s3://b", "not a bucket name"),
        ("s3://bucket/a//b", "not a prefix"),
        ("s3://bucket/../x", "not a prefix"),
        ("s3://bucket/x#y", "#"),
        ("s3://bucket/x?endpoint=http://h", "unknown key 'endpoint'"),
        ("s3://bucket/x?region=", "no value"),
        ("s3://bucket/x?region=a&region=b", "more than one"),
        ("s3://bucket/x?endpoint_url=127.0.0.1:9000", "endpoint_url must look like"),
        ("file://host/x", "absolute path"),
        ("file:///x?y=1", "no query"),
        ("memory://", "memory://name"),
        ("memory://a b", "memory://name"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        parse_url(text)


@pytest.mark.parametrize("run", ["a[1]", "a b", "a+b", "a%20b", "é", "a?b", "a:b", ".a", "a\\b"])
def test_c44_names_that_some_store_cannot_keep_are_refused_up_front(run):
    with pytest.raises(UsageError):
        parse_url(f"s3://bucket/{run}/x")


def test_c44_the_allowed_set_is_named():
    with pytest.raises(UsageError, match=r"A-Z a-z 0-9 \. _ -"):
        parse_url("s3://bucket/a b")


@pytest.mark.parametrize("scheme", ["gs", "az", "abfs", "sftp"])
def test_later_schemes_say_so(scheme):
    with pytest.raises(NotYetAvailableError, match=scheme):
        parse_url(f"{scheme}://bucket/x")


@pytest.mark.parametrize(
    "text",
    [
        f"s3://key:{CANARY}@bucket/x",
        f"s3://bucket/x?secret={CANARY}",
        f"s3://bucket/x?KEY={CANARY}",
        f"s3://bucket/x?token={CANARY}",
        f"s3://bucket/x?endpoint_url=http://u:{CANARY}@h",
        f"s3://bucket/x?endpoint_url=u:{CANARY}@h",
    ],
)
def test_c145_secrets_in_urls_are_refused_and_not_repeated(text):
    with pytest.raises(UsageError) as caught:
        parse_url(text)
    assert CANARY not in str(caught.value)


def test_options_as_in_s3fs():
    url = parse_url("s3://bucket/x?region=eu-1")
    config = read_options(
        url,
        {
            "key": "k",
            "secret": CANARY,
            "token": "t",
            "client_kwargs": {"endpoint_url": "http://h:1", "region_name": "eu-1", "verify": False},
        },
    )
    assert (config.endpoint_url, config.region, config.verify) == ("http://h:1", "eu-1", False)
    assert config.secret is not None
    assert config.secret.reveal() == CANARY


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "http://h"}, "unknown keys in storage_options: endpoint"),
        ({"client_kwargs": {"use_ssl": False}}, "unknown keys in .*client_kwargs.*use_ssl"),
        ({"client_kwargs": []}, None),
        ({"client_kwargs": 3}, "mapping"),
        ({"key": "k"}, "both 'key' and 'secret'"),
        ({"token": "t"}, "without"),
        ({"key": 3, "secret": "s"}, "non-empty string"),
        ({"endpoint_url": 5}, "non-empty string"),
        ({"client_kwargs": {"verify": 3}}, "verify"),
        ({"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://b"}}, "more than once"),
    ],
)
def test_options_that_cannot_be_right(options, message):
    if message is None:
        assert read_options(parse_url("s3://bucket"), options).endpoint_url is None
        return
    with pytest.raises(UsageError, match=message):
        read_options(parse_url("s3://bucket"), options)


def test_c145_a_secret_never_shows():
    secret = Secret(CANARY)
    config = read_options(parse_url("s3://bucket"), {"key": CANARY, "secret": CANARY, "token": CANARY})
    for shown in (repr(secret), str(secret), f"{secret}", repr(config), str(config), repr([config])):
        assert CANARY not in shown
    for value in (secret, config):
        with pytest.raises(TypeError):
            pickle.dumps(value)


def test_open_store_opens_each_kind(tmp_path):
    settings, env = Settings(), Env()
    local = open_store(tmp_path / "run", settings=settings, env=env)
    assert isinstance(local, LocalStore)
    local.close()
    with pytest.raises(NotFoundError):
        open_store(f"file://{tmp_path}/none", settings=settings, env=env, create=False)
    memory = open_store("memory://test_open_store", settings=settings, env=env)
    assert isinstance(memory, MemoryStore)
    assert open_store("memory://test_open_store", settings=settings, env=env) is memory
    with pytest.raises(UsageError, match="storage_options"):
        open_store(tmp_path / "run", {"key": "k"}, settings=settings, env=env)

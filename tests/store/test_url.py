"""URLs and options: what is not understood is refused by name; secrets never show (C44, C51, C145)."""

from __future__ import annotations

import pickle
import subprocess
import sys

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tieredckpt.env import Env
from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.fsspec_store import FsspecStore
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
        ("gs://bucket/run-1/", ParsedUrl("gs", "bucket", "run-1")),
        ("GS://bucket", ParsedUrl("gs", "bucket", "")),
        ("gs://bucket/r?endpoint_url=http://127.0.0.1:1", ParsedUrl("gs", "bucket", "r", "http://127.0.0.1:1")),
        ("az://container/run", ParsedUrl("az", "container", "run")),
        (
            "abfs://container@account.dfs.core.windows.net/run",
            ParsedUrl("abfs", "container@account.dfs.core.windows.net", "run"),
        ),
        ("sftp://user@host:2222/home/user/run", ParsedUrl("sftp", "user@host:2222", "home/user/run")),
        ("hf://datasets/org/name/run", ParsedUrl("hf", "datasets", "org/name/run")),
        ("tos://bucket/run", ParsedUrl("tos", "bucket", "run")),
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
        ("zip://host/bucket", "unknown URL scheme 'zip'"),
        ("simplecache::s3://bucket/x", "unknown URL scheme 'simplecache::s3'"),
        ("nobody-knows://bucket/x", "known are .*s3://bucket/prefix.* gs://…"),
        ("s3a://bucket/x", "s3://bucket/prefix here"),
        ("gs:/bucket/x", "without its '//'"),
        ("gs:///x", "not a bucket"),
        ("gs://bucket/a b", "not a prefix"),
        ("gs://bucket/x#1", "no '#' part"),
        ("gs://bucket/x?region=eu", "unknown key 'region'.*known are endpoint_url"),
        ("az://container/x?endpoint_url=http://h", "this kind of URL has none"),
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


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("az://container/x", "adlfs"),
        ("abfs://container/x", "adlfs"),
        ("sftp://host/x", "paramiko"),
        ("oss://bucket/x", "ossfs"),
        ("hdfs://host/x", "pyarrow"),  # imported when it is opened
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(url, package):
    with pytest.raises(UsageError, match=rf"need a package that is not installed: pip install {package}$"):
        open_store(url, settings=Settings(), env=Env())


def test_without_fsspec_its_urls_are_known_and_say_what_is_missing():
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from tieredckpt.env import Env; from tieredckpt.errors import UsageError; from tieredckpt.settings import Settings\n"
        "from tieredckpt.store.url import open_store, parse_url\n"
        "assert parse_url('gs://bucket/run').scheme == 'gs'\n"
        "for url in ('gs://bucket/run', 'unheard://bucket/run'):\n"
        "    try: open_store(url, settings=Settings(), env=Env())\n"
        "    except UsageError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "gs:// URLs need fsspec, which is not installed: pip install fsspec gcsfs"
    assert said[1].startswith("unknown URL scheme 'unheard'")


def test_a_scheme_that_was_registered_with_fsspec_is_known():
    class Registered(MemoryFileSystem):
        protocol = "registered"

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + path.removeprefix("registered://").strip("/")

    fsspec.register_implementation("registered", Registered, clobber=True)
    store = open_store("registered://place/run", {"global_store": False}, settings=Settings(), env=Env())
    assert isinstance(store, FsspecStore)
    assert store.label == "registered://place/run"
    store.put("data/x", [b"x"])
    assert store.get("data/x", max_bytes=1) == b"x"


@pytest.mark.parametrize(
    "text",
    [
        f"s3://key:{CANARY}@bucket/x",
        f"s3://bucket/x?secret={CANARY}",
        f"s3://bucket/x?KEY={CANARY}",
        f"s3://bucket/x?token={CANARY}",
        f"s3://bucket/x?endpoint_url=http://u:{CANARY}@h",
        f"s3://bucket/x?endpoint_url=u:{CANARY}@h",
        f"gs://key:{CANARY}@bucket/x",
        f"sftp://user:{CANARY}@host/x",
        f"az://container/x?sig={CANARY}",
        f"gs://bucket/x?token={CANARY}",
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

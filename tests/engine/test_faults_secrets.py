"""C145: credentials show up nowhere: not in a log at debug level (botocore's included), a repr, an error or a stored byte.

The secret and the token are canaries: distinctive texts that are searched for in everything that was said and stored.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tieredckpt as tc
from localstack.process import S3Server
from tieredckpt.env import Env
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.settings import Settings
from tieredckpt.store.url import open_store

SECRET = "CANARYsecret0123456789abcdefghijklmnopqr"
TOKEN = "CANARYtoken//0123456789+abcdefghijklmnop=="


class Everything(logging.Handler):
    """Keeps each log record of the process as a formatter would show it, arguments and tracebacks included."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []
        self.names: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.names.add(record.name.partition(".")[0])
        self.said.append(f"{record.name}: {logging.Formatter().format(record)} {record.args!r}")


@pytest.fixture
def log() -> Iterator[Everything]:
    handler, root = Everything(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def assert_silent(what: str, texts: list[str]) -> None:
    found = [text for text in texts if "CANARY" in text]
    assert not found, f"{what} shows a credential: {found[0][:300]}"


@pytest.mark.parametrize("name", ["moto", "ministack"])  # servers that let any key in
def test_c145_a_canary_is_in_nothing_that_is_said_or_stored(
    name: str, request: pytest.FixtureRequest, log: Everything, tmp_path: Path
) -> None:
    server: S3Server = request.getfixturevalue(name)
    url = server.make_bucket("canary") + "/run"
    options = {"endpoint_url": server.endpoint_url, "key": "canary-key", "secret": SECRET, "token": TOKEN}
    shown: list[str] = []
    for local in ("one", "two"):  # save and send; then restore on another node
        ckpt = tc.Checkpointer(tmp_path / local, url, storage_options=options)
        with ckpt:
            target = {"w": np.zeros(3000, np.uint8)}
            report = ckpt.restore(target)
            handle = ckpt.save(report.step + 1, {"w": np.full(3000, 7, np.uint8)})
            ckpt.wait(timeout=60)
            shown += [repr(thing) for thing in (ckpt, vars(ckpt), report, handle, handle.remote.result(), ckpt.status())]
            shown += [repr(thing) for thing in (ckpt._run, vars(ckpt._run), ckpt.snapshots(), ckpt.gc(dry_run=True))]
    assert report.step == 1, "it did work"
    assert {"botocore", "tieredckpt"} <= log.names, "the debug log was on"

    client = server.client()
    keys = [item["Key"] for item in client.list_objects_v2(Bucket="canary")["Contents"]]
    stored = [client.get_object(Bucket="canary", Key=key)["Body"].read() for key in keys]
    stored += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) > 20
    assert_silent("what is stored", [data.decode("latin-1") for data in stored])
    assert_silent("a repr", shown)
    assert_silent("a log", log.said)


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint_url": "http://127.0.0.1:9"},
        {"endpoint_url": "http://user:CANARY@127.0.0.1:9"},
        {"bucket": "there-is-no-such-bucket"},
        {"unknown": "CANARY"},
        {"client_kwargs": {"aws_secret_access_key": SECRET}},
        {"secret": 5, "key": SECRET},
    ],
    ids=["nobody-listens", "endpoint-with-password", "no-bucket", "unknown-option", "secret-in-client-kwargs", "wrong-type"],
)
def test_c145_errors_and_their_causes_do_not_repeat_a_credential(
    moto: S3Server, log: Everything, tmp_path: Path, wrong: dict[str, object]
) -> None:
    options = {"endpoint_url": moto.endpoint_url, "key": "canary-key", "secret": SECRET, "token": TOKEN, **wrong}
    bucket = options.pop("bucket", "canary-2")
    with pytest.raises(TieredCheckpointError) as caught:
        tc.Checkpointer(tmp_path / "run", f"s3://{bucket}/run", storage_options=options)
    error: BaseException | None = caught.value
    while error is not None:
        assert_silent("an error", [str(error), repr(error), repr(error.args)])
        error = error.__cause__ or error.__context__
    assert_silent("a log", log.said)


@pytest.mark.parametrize(
    "url", [f"s3://key:{SECRET}@bucket/run", f"s3://bucket/run?secret={SECRET}", f"s3://bucket/run?token={TOKEN}"]
)
def test_c145_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(TieredCheckpointError) as caught:
        tc.Checkpointer(None, url)
    assert_silent("an error", [str(caught.value), repr(caught.value)])


def test_c145_a_store_and_its_configuration_can_be_shown_and_not_pickled(moto: S3Server) -> None:
    options = {"endpoint_url": moto.endpoint_url, "key": "k", "secret": SECRET, "token": TOKEN}
    store = open_store("s3://canary/run", options, settings=Settings(), env=Env())
    assert_silent("a store", [repr(store), str(store), store.label, repr(vars(store)), repr(store._config)])  # type: ignore[attr-defined]
    config = store._config  # type: ignore[attr-defined]
    assert config.secret.reveal() == SECRET
    for secret in (config.secret, config.token, config.key):
        assert_silent("a secret", [repr(secret), str(secret), f"{secret}", ascii(secret)])
    for thing in (store, config, config.secret):
        with pytest.raises(TypeError) as caught:
            pickle.dumps(thing)
        assert_silent("an error", [str(caught.value)])

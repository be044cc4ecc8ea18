"""The commands on buckets: each one works there, out of reach is an answer too, and no secret is ever repeated (C145)."""

from __future__ import annotations

import os

import pytest

import tieredckpt as tc
from localstack.process import S3Server, free_ports
from tests.cli.kit import SMALL, run, training_state
from tieredckpt.cli.app import COMMANDS

CANARY = "canary-Secret-4711"
MORE = {"diff": ["1", "latest"], "pin": ["1", "--reason", "x"], "unpin": ["1"]}
"""What a command needs beside one tier."""


@pytest.fixture
def bucket_run(s3_server: S3Server, monkeypatch, tmp_path) -> tuple[str, str]:
    """URL and endpoint of a run in a bucket; the credentials are in the environment, as they usually are."""
    url = f"{s3_server.make_bucket('commands')}/{tmp_path.name.replace('[', '-').replace(']', '')}"
    with tc.Checkpointer(None, url, state=training_state(), storage_options=s3_server.storage_options, settings=SMALL) as ck:
        ck.restore()
        ck.save(1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret)
    return url, s3_server.endpoint_url


def test_every_command_works_on_a_bucket(bucket_run):
    url, endpoint = bucket_run
    for name in ("ls", "show", "log", "verify", "status", "diff", "du", "gc", "pin", "unpin"):
        outcome = run(name, url, *MORE.get(name, ()), "--endpoint-url", endpoint, "--region", "us-east-1", "--json")
        assert outcome.code == 0, outcome.err
    assert run("ls", f"{url}?endpoint_url={endpoint}", "--json").json["snapshots"][0]["step"] == 1
    assert run("ls", f"{url}-other", "--endpoint-url", endpoint).code == 10


def test_a_flipped_byte_in_a_bucket_is_found(bucket_run, s3_server):
    url, endpoint = bucket_run
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = s3_server.client()
    listed = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/data/")["Contents"]
    data = bytearray(client.get_object(Bucket=bucket, Key=listed[0]["Key"])["Body"].read())
    data[5000] ^= 1
    client.put_object(Bucket=bucket, Key=listed[0]["Key"], Body=bytes(data))
    outcome = run("verify", url, "--endpoint-url", endpoint, "--json")
    assert outcome.code == 3
    (finding,) = outcome.json["snapshots"][0]["findings"]
    assert listed[0]["Key"] == f"{prefix}/{finding['key']}"


@pytest.mark.parametrize(
    "location",
    [
        f"s3://key:{CANARY}@bucket/run",
        f"s3://bucket/run?secret={CANARY}",
        f"s3://bucket/run?endpoint_url=http://key:{CANARY}@host",
    ],
)
def test_c145_a_secret_in_a_url_is_refused_and_not_repeated(location):
    for name in COMMANDS:
        second = [location] if name in ("push", "pull", "uploader") else MORE.get(name, [])
        outcome = run(name, location, *second, "--json")
        assert outcome.code == 2
        assert "Missing" not in outcome.err
        assert CANARY not in outcome.out + outcome.err


def test_c145_a_bucket_that_does_not_exist_says_so_without_secrets(moto: S3Server, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CANARY + "-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    outcome = run("ls", "s3://no-such-bucket/run", "--endpoint-url", moto.endpoint_url, "--json")
    assert outcome.code == 1
    assert "does not exist" in outcome.err
    assert CANARY not in outcome.out + outcome.err
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("tieredckpt")]
    assert not any(CANARY in message for message in ours)


def test_without_credentials_it_fails_in_seconds_and_says_what_to_do(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    outcome = run("ls", "s3://bucket/run", "--endpoint-url", "http://127.0.0.1:9")
    assert outcome.code == 2
    assert "AWS_ACCESS_KEY_ID" in outcome.err
    unknown = run("ls", "s3://bucket/run", "--profile", "nobody")
    assert unknown.code == 2
    assert "nobody" in unknown.err


def test_status_with_the_bucket_out_of_reach_shows_the_local_tier(places, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    (port,) = free_ports(1)
    arguments = ["status", places.local, "s3://bucket/run", "--endpoint-url", f"http://127.0.0.1:{port}"]
    outcome = run(*arguments, "--json")
    assert outcome.code == 1
    assert outcome.json["local"]["step"] == 3
    assert outcome.json["remote"]["code"] == "store"
    assert f"127.0.0.1:{port}" in outcome.json["remote"]["problem"]
    assert CANARY not in outcome.out + outcome.err

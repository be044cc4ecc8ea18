"""Commands that append to a log: on a bucket that ignores conditional puts they append nothing, unless that was accepted (C27, I5)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import tieredckpt as tc
from localstack.fault_proxy import proxied
from localstack.process import S3Server
from tests.cli.kit import SMALL, Outcome, Places, files_of, make_run, run, training_state
from tieredckpt.engine import probe_cache
from tieredckpt.env import Env
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.probe import ProbeReport, probe

KEEP_ALL = tc.Retention(local=tc.KeepAll(), remote=tc.KeepAll())

APPENDING = [
    ["gc", "{url}", "--keep-last", "1", "--yes"],
    ["pin", "{url}", "2", "--reason", "x"],
    ["push", "{local}", "{url}"],
]


@pytest.fixture(autouse=True)
def nothing_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own."""
    monkeypatch.setattr(probe_cache, "_proven_here", set())


@dataclass(frozen=True, slots=True)
class Lying:
    """A run in a bucket without conditions: steps 1 and 2 are there, 3 waits on the local tier. `where`: how it is reached."""

    server: S3Server
    local: Path
    url: str

    @property
    def where(self) -> list[str]:
        return ["--endpoint-url", self.server.endpoint_url]

    def keys(self) -> list[str]:
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        return [item["Key"] for item in self.server.client().list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]]

    def run(self, *arguments: str, options: Sequence[str] = ()) -> Outcome:
        return run(*(argument.format(url=self.url, local=self.local) for argument in arguments), *(options or self.where))

    def records(self) -> list[str]:
        return [record["kind"] for record in self.run("log", "{url}", "--json").json["records"]]


@pytest.fixture(scope="module")
def lying(nanio: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lying]:
    local = tmp_path_factory.mktemp("lying") / "local"
    url = f"{nanio.make_bucket('tools')}/{uuid.uuid4().hex}"
    options = {"state": training_state(), "settings": SMALL, "retention": KEEP_ALL, "storage_options": nanio.storage_options}
    with tc.Checkpointer(local, url, allow_unfenced=True, **options) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.save(2)
    with tc.Checkpointer(local, url, allow_unfenced=True, uploader="external", **options) as ckpt:
        ckpt.restore()
        ckpt.save(3)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", nanio.key)
        environment.setenv("AWS_SECRET_ACCESS_KEY", nanio.secret)
        yield Lying(nanio, local, url)


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_who_only_looks_is_not_asked_for_a_proof(lying: Lying, command: str) -> None:
    with proxied(lying.server) as (server, proxy):
        outcome = lying.run(command, "{url}", options=["--endpoint-url", server.endpoint_url])
        assert {request.method for request in proxy.requests} <= {"GET", "HEAD"}
    assert (outcome.code, outcome.err) == (0, "")


def test_what_cannot_be_pinned_needs_no_proof(lying: Lying) -> None:
    with proxied(lying.server) as (server, proxy):
        outcome = lying.run("pin", "{url}", "99", "--reason", "x", options=["--endpoint-url", server.endpoint_url])
        assert "PutObject" not in {request.operation for request in proxy.requests}
    assert outcome.code == 4


def test_c27_nothing_is_appended_to_an_unproven_log_unless_that_is_accepted(lying: Lying) -> None:
    before = lying.keys()
    for arguments in APPENDING:
        outcome = lying.run(*arguments)
        assert outcome.code == 1, (arguments, outcome)
        assert "it ignores `If-None-Match: *`" in outcome.err
        assert "--allow-unfenced" in outcome.err
    assert lying.keys() == before
    records = lying.records()
    for arguments in APPENDING:
        outcome = lying.run(*arguments, "--allow-unfenced")
        assert outcome.code == 0, (arguments, outcome)
        assert "is used without fencing" in outcome.err
    assert lying.records()[len(records) :] == ["retire", "sweep", "pin", "commit"]


def test_the_face_in_python_asks_too_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = make_run(tmp_path, range(1, 4))
    before = files_of(places.remote)
    probed: list[ObjectStore] = []

    def counted(store: ObjectStore, env: Env) -> ProbeReport:
        probed.append(store)
        return probe(store, env)

    monkeypatch.setattr(probe_cache, "probe", counted)
    with tc.Tier.open(places.remote) as tier:
        snapshot = tier.find(step=1).snapshot_id
        assert tier.gc(tier.plan_gc(tc.KeepAll())).deleted == ()
        with pytest.raises(tc.NotFoundError):
            tier.pin(f"{'9' * 12}{snapshot[12:]}", "x")
        assert probed == [], "nothing to collect, nothing to append"
        tier.pin(snapshot, "x")
        tier.unpin(snapshot)
        assert len(probed) == 1
    assert [key for key in files_of(places.remote) if key not in before] == [f"log/{n:020d}.json" for n in (6, 7)]


def test_a_local_tier_is_no_bucket_and_needs_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: Places = make_run(tmp_path, range(1, 3))
    monkeypatch.setattr(probe_cache, "probe", None)
    assert run("pin", places.local, "1", "--reason", "x").code == 0

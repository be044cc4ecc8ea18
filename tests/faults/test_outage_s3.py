"""A bucket that is away for twenty saves, over HTTP (I9, I12; C32, C33, C48): refused, overloaded, silent.

What bounds the queue: nothing is queued in memory but snapshot ids, since the local tier is the queue; so it is the room on the local
disk (a save that finds none fails, typed, and what is there stays), or, with `upload="latest"`, what local retention keeps and
one more.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from localstack.fault_proxy import proxied
from localstack.ministack import ministack_in
from localstack.process import S3Server, free_ports
from tests.faults import numbered_run
from tests.faults.answers_story import ENV, LONG_S, SETTINGS
from tests.faults.checks import check_tier
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.tier import OpenTier, open_existing
from tieredckpt.env import Deadline
from tieredckpt.plan.policies import KeepAll, KeepLast, Retention
from tieredckpt.plan.uploads import UploadPolicy
from tieredckpt.store.url import open_store
from tieredckpt.testing.proxy_acts import Answer, NeverAnswer, ProxyAct, ProxyRule

SAVES = range(2, 22)
RETENTION = Retention(local=KeepLast(2), remote=KeepAll())


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket as the run reaches it, and `direct`, as only the test does. Within `away` it is away; `requests`: how many came."""

    url: str
    server: S3Server
    direct: S3Server
    away: Callable[[], AbstractContextManager[None]]
    requests: Callable[[], int]

    def tier(self) -> OpenTier:
        return open_existing(
            "remote", open_store(self.url, self.direct.storage_options, settings=SETTINGS, env=ENV), ENV, SETTINGS
        )


@pytest.fixture
def local() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="outage-", dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory, "local")


@contextlib.contextmanager
def answering(server: S3Server, name: str, act: ProxyAct) -> Iterator[Bucket]:
    """Behind a proxy that does this to every request while the bucket is away."""
    with proxied(server) as (through, proxy):

        @contextlib.contextmanager
        def away() -> Iterator[None]:
            proxy.script([ProxyRule(act, times=None)])
            yield
            proxy.script([])

        yield Bucket(f"{server.make_bucket('outage')}/{name}", through, server, away, lambda: len(proxy.requests))


@contextlib.contextmanager
def killed(directory: Path) -> Iterator[Bucket]:
    """A server that is killed, so that connections are refused, and that comes back with its data."""
    (port,) = free_ports(1)
    alive = contextlib.ExitStack()
    server = alive.enter_context(ministack_in(directory, port))

    @contextlib.contextmanager
    def away() -> Iterator[None]:
        alive.close()
        yield
        alive.enter_context(ministack_in(directory, port))

    with alive:
        yield Bucket(f"{server.make_bucket('outage')}/refused", server, server, away, int)


@pytest.fixture(params=["503", "never answered", "refused"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bucket]:
    if request.param == "refused":
        with killed(tmp_path) as found:
            yield found
        return
    act = Answer(503, "SlowDown") if request.param == "503" else NeverAnswer()
    with answering(request.getfixturevalue("ministack"), f"{request.param.replace(' ', '-')}-{tmp_path.name}", act) as found:
        yield found


def open_run(local: Path, bucket: Bucket, upload: UploadPolicy) -> Run:
    stores = (
        open_store(local, None, settings=SETTINGS, env=ENV),
        open_store(bucket.url, bucket.server.storage_options, settings=SETTINGS, env=ENV),
    )
    return Run(*stores, RunOptions(retention=RETENTION, upload=upload, settings=SETTINGS), ENV)


def begun(local: Path, bucket: Bucket, upload: UploadPolicy) -> Run:
    """A run with step 1 on both tiers."""
    run = open_run(local, bucket, upload)
    assert numbered_run.restore(run) == 0
    numbered_run.save(run, 1)
    run.wait_while_moving(LONG_S, LONG_S)
    return run


def save_all(run: Run) -> list[SaveHandle]:
    """Each of them is local when the next one begins."""
    handles = []
    for step in SAVES:
        handles.append(numbered_run.save(run, step))
        assert handles[-1].local.result(LONG_S).step == step
    return handles


def test_i9_i12_c48_twenty_saves_without_the_bucket_are_kept_and_delivered_in_order(local: Path, bucket: Bucket) -> None:
    run = begun(local, bucket, "all")
    with bucket.away():
        handles = save_all(run)
        saved = [handle.snapshot_id for handle in handles]
        lag = run.status().lag
        assert list(lag.waiting) == saved
        assert lag.bytes_waiting > len(saved) * 90_000
        assert "StoreError" in wait_for(lambda: run.status().lag.last_error), "why nothing moves is not told"
        assert run.local is not None
        assert set(saved) <= set(run.local.log.refresh().live), "local retention has taken what must still be sent"
        assert not any(handle.remote.done() for handle in handles)
        assert run.take_failure() is None, "an outage is not a failure"
    run.wait_while_moving(LONG_S, LONG_S)
    assert [info.step for handle in handles if (info := handle.remote.result(0)) is not None] == list(SAVES)
    assert run.status().lag.waiting == ()
    assert run.status().lag.last_error == ""
    numbered_run.save(run, 22)
    run.wait_while_moving(LONG_S, LONG_S)
    assert len(run.local.log.refresh().live) == 2, "once all is delivered, local retention goes on"
    run.close()
    tier = bucket.tier()
    assert check_tier(tier, saved) == len(saved) + 2
    assert [record.step for record in tier.log.state.live.values()] == [1, *SAVES, 22]


def test_i11_with_the_policy_latest_an_outage_holds_no_more_than_retention_and_one(local: Path, ministack: S3Server) -> None:
    with answering(ministack, f"latest-{local.parent.name}", Answer(503, "SlowDown")) as bucket:
        run = begun(local, bucket, "latest")
        assert run.local is not None
        with bucket.away():
            handles = save_all(run)
            assert list(run.status().lag.waiting) == [handles[-1].snapshot_id]
            assert len(run.local.log.refresh().live) <= 3
        run.wait_while_moving(LONG_S, LONG_S)
        run.close()
        assert [info.step for handle in handles if (info := handle.remote.result(0)) is not None] == [SAVES[-1]]
        tier = bucket.tier()
        assert check_tier(tier, [handles[-1].snapshot_id]) == 2


def test_an_upload_that_closing_does_not_wait_for_ends_without_a_complaint(
    local: Path, ministack: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """C131, C132: closing takes the disk and the threads away from it; that is no failure, and the save is the next process's work."""
    with answering(ministack, f"left-{local.parent.name}", NeverAnswer()) as bucket:
        run = begun(local, bucket, "all")
        with bucket.away():
            before = bucket.requests()
            handle = numbered_run.save(run, 2)
            wait_for(lambda: "asked" if bucket.requests() > before else "")
            run.close(0)
        worker = run.background.worker
        assert worker is not None
        assert worker.stop(LONG_S), "the step that was under way never ended"
        assert not handle.remote.done()
        assert run.take_failure() is None
        assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
        following = begun_again(local, bucket)
        assert following.status().remote_head == handle.snapshot_id
        following.close()


def begun_again(local: Path, bucket: Bucket) -> Run:
    run = open_run(local, bucket, "all")
    numbered_run.restore(run)
    run.wait_while_moving(LONG_S, LONG_S)
    return run


def wait_for(look: Callable[[], str]) -> str:
    """What `look` gives as soon as it gives anything."""
    deadline = Deadline(ENV, LONG_S)
    while not (found := look()) and not deadline.expired:
        ENV.sleep(0.5)
    return found

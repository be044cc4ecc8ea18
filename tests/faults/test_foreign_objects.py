"""Another writer's object under a key that a run is about to write: what each key makes of it, over HTTP (I2, I5, I6, I7; C24, C25).

Losing is never taken for an outage, nor an outage for losing, and nothing is deleted either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localstack.fault_proxy import proxied
from localstack.process import S3Server
from tests.faults import numbered_run
from tests.faults.answers import foreign_record, foreign_run
from tests.faults.answers_story import ENV, LONG_S, SETTINGS, Bucket, Lane, Story
from tests.faults.checks import check_tier
from tieredckpt.engine.commit import ForeignObject
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.tier import read_run
from tieredckpt.errors import CorruptionError, FencedError, FormatError, SaveError, UsageError
from tieredckpt.format import keys
from tieredckpt.format.records import FailedRestoreRecord, OpenRecord, encode_record, seal
from tieredckpt.store.probe import PROBE_PREFIX
from tieredckpt.store.url import open_store
from tieredckpt.testing.proxy_acts import ForeignWinner, ProxyRule, ResetBefore

OTHER = "01M8MQ8KRW16AQTQN2CNHX3AVS"
FIRST_COMMIT = 3
"""Position of the first commit in a new log: behind `open` and `resume`."""


@pytest.fixture
def story(ministack: S3Server, tmp_path: Path) -> Iterator[Story]:
    """A place in the bucket, behind a proxy."""
    with proxied(ministack) as (_, proxy):
        bucket = Bucket(ministack)
        lane = Lane(bucket, proxy)
        yield Story(lane, tmp_path)
        lane.close()
        bucket.close()


def meets(story: Story, key: str, data: bytes) -> None:
    """The next object to be put under a key like this one meets this object of another writer."""
    story.lane.proxy.script([ProxyRule(ForeignWinner(data), operation="PutObject", key=f"{story.place}/{key}")])


def deletes(story: Story) -> list[str]:
    """Keys of everything that anybody wanted to delete, but for the probe's."""
    sent = [key for request in story.line.requests if request.operation.startswith("Delete") for key in request.keys]
    return [key for key in sent if f"/{PROBE_PREFIX}" not in key]


def open_run(story: Story, local: Path, *, with_bucket: bool = True) -> Run:
    store = open_store(local, None, settings=SETTINGS, env=ENV)
    return Run(store, story.line if with_bucket else None, RunOptions(settings=SETTINGS), ENV)


# ------------------------------------------------------------------------------------------ format.json


def test_a_new_run_becomes_the_run_that_was_faster(story: Story, tmp_path: Path) -> None:
    """Two nodes that start at the same moment agree: the local tier takes over what the bucket has."""
    meets(story, keys.FORMAT_KEY, foreign_run())
    life = story.node("node", [1])
    assert life.committed == [life.handles[0].snapshot_id]
    local = open_store(tmp_path / "node", None, settings=SETTINGS, env=ENV)
    assert read_run(local) == story.lane.bucket.tier(story.place).run == "01M8MQ8KRW16AQTQN2CNHX3AVR"


def test_a_run_that_exists_here_refuses_the_bucket_that_another_one_took(story: Story, tmp_path: Path) -> None:
    alone = open_run(story, tmp_path / "node", with_bucket=False)
    numbered_run.restore(alone)
    numbered_run.save(alone, 1).local.result(LONG_S)
    alone.close()
    meets(story, keys.FORMAT_KEY, foreign_run())
    with pytest.raises(UsageError, match="01M8MQ8KRW16AQTQN2CNHX3AVR") as refusal:
        open_run(story, tmp_path / "node")
    assert alone.session.primary.run in str(refusal.value), "both are named"
    assert story.lane.bucket.state(story.place).seq == 0, "nothing was written to the other run's log"


def test_an_object_that_is_no_format_json_is_not_taken_for_an_empty_place(story: Story, tmp_path: Path) -> None:
    meets(story, keys.FORMAT_KEY, b"somebody's notes")
    with pytest.raises(FormatError):
        open_run(story, tmp_path / "node")
    assert story.lane.bucket.objects(story.place)[keys.FORMAT_KEY] == b"somebody's notes"


# ------------------------------------------------------------------------------------------ a position of the log


def test_a_position_that_a_tool_has_won_costs_one_position(story: Story) -> None:
    meets(story, keys.record_key(FIRST_COMMIT), foreign_record(FIRST_COMMIT))
    life = story.node("node", [1])
    state = story.lane.bucket.state(story.place)
    assert life.committed == [life.handles[0].snapshot_id]
    assert state.commits[life.handles[0].snapshot_id] == FIRST_COMMIT + 1


def test_i7_a_position_that_a_later_session_has_won_fences(story: Story, tmp_path: Path) -> None:
    """412 on the commit record, and the bytes there are the `open` of another session."""
    opened = seal(OpenRecord(session=OTHER), FIRST_COMMIT, OTHER, "2026-01-01T00:00:00.000000Z")  # type: ignore[arg-type]
    meets(story, keys.record_key(FIRST_COMMIT), encode_record(opened))
    run = open_run(story, tmp_path / "node")
    numbered_run.restore(run)
    handle = numbered_run.save(run, 1)
    assert isinstance(handle.remote.exception(LONG_S), FencedError)
    assert handle.local.result(0).step == 1
    assert run.status().fenced
    with pytest.raises(FencedError):
        numbered_run.save(run, 2)
    run.close()
    state = story.lane.bucket.state(story.place)
    assert (state.seq, state.newest, dict(state.commits)) == (FIRST_COMMIT, OTHER, {})
    assert not deletes(story), "what was sent stays for whoever owns the run"
    assert any(key.startswith(keys.DATA_PREFIX) for key in story.lane.bucket.objects(story.place))


def test_a_position_with_something_that_is_no_record_stops_the_upload_loudly(story: Story, tmp_path: Path) -> None:
    """Nothing can be decided from such a log, so nothing is: it is told, and saves go on locally."""
    meets(story, keys.record_key(FIRST_COMMIT), b"somebody's notes")
    run = open_run(story, tmp_path / "node")
    numbered_run.restore(run)
    handle = numbered_run.save(run, 1)
    with pytest.raises(FormatError, match=rf"{story.place}: log record {FIRST_COMMIT}: .*Nothing can be decided"):
        run.wait("remote", LONG_S)
    assert not handle.remote.done()
    assert numbered_run.save(run, 2).local.result(LONG_S).step == 2
    run.close(0)
    assert not deletes(story)


# ------------------------------------------------------------------------------------------ an object of a snapshot


@pytest.mark.parametrize("key", ["manifest.json.zst", "upload.json", "receipts/00000.json"])
def test_i2_an_object_of_the_snapshot_that_is_not_its_own_ends_its_upload_and_no_other(key: str, story: Story) -> None:
    meets(story, f"{keys.SNAPSHOTS_PREFIX}*/{key}", b"somebody's notes")
    life = story.node("node", [1, 2])
    first, second = life.handles
    failure = first.remote.failure()
    assert isinstance(failure, SaveError)
    assert (failure.step, failure.tier) == (1, "remote")
    assert isinstance(failure.__cause__, ForeignObject)
    assert key in str(failure)
    assert life.committed == [second.snapshot_id]
    assert check_tier(story.lane.bucket.tier(story.place), life.committed) == 1
    assert first.snapshot_id not in story.lane.bucket.state(story.place).commits


# ------------------------------------------------------------------------------------------ a pack


def test_a_pack_that_is_there_in_another_size_ends_the_upload(story: Story, tmp_path: Path) -> None:
    run, handle = _saved_beside(story, tmp_path, b"short")
    failure = handle.remote.exception(LONG_S)
    assert isinstance(failure, SaveError)
    assert isinstance(failure.__cause__, ForeignObject)
    assert numbered_run.save(run, 2).remote.result(LONG_S).step == 2  # type: ignore[union-attr]
    run.close()
    assert not deletes(story)


def test_i13_other_bytes_in_a_pack_are_never_restored(story: Story, tmp_path: Path) -> None:
    """An object of the right size is taken for the pack, since nobody else has its name: the checksums say what it is."""
    run, handle = _saved_beside(story, tmp_path, None)
    assert handle.remote.result(LONG_S) is not None
    run.close()
    tier = story.lane.bucket.tier(story.place)
    with pytest.raises(CorruptionError):
        check_tier(tier, [])
    another = open_run(story, tmp_path / "another")
    with pytest.raises(CorruptionError, match="marked as damaged"):
        numbered_run.restore(another)
    another.close()
    marked = [record for record in tier.log.records() if isinstance(record, FailedRestoreRecord)]
    assert [record.snapshot for record in marked] == [handle.snapshot_id]


def _saved_beside(story: Story, tmp_path: Path, data: bytes | None) -> tuple[Run, SaveHandle]:
    """A run and its first save, whose first pack's key holds `data` before it is sent; None: zeros, as many as the pack has bytes."""
    run = open_run(story, tmp_path / "node")
    numbered_run.restore(run)
    run.wait_while_moving(LONG_S, LONG_S)
    story.lane.proxy.script([ProxyRule(ResetBefore(), times=None)])
    handle = numbered_run.save(run, 1)
    handle.local.result(LONG_S)
    pack = next(run.session.primary.store.list(keys.DATA_PREFIX))
    story.lane.bucket.fill(story.place, {pack.key: bytes(pack.size) if data is None else data})
    story.lane.proxy.script([])
    return run, handle

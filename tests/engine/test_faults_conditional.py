"""Every conditional put of open, save and upload in turn: its answer lost, itself late, refused, or won by somebody else.

One scenario is run once to count its requests, then once for each request and fault. Whatever happens, the outcome is one of
three: committed, a typed conflict, or unknown; and nothing is deleted for it (I5, I6, C24, C25, C26, C27).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import pytest

from tests.engine import kit
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.run import Run
from tieredckpt.env import InlineEnv
from tieredckpt.errors import ConflictError, FencedError, SaveError, StoreError, TieredCheckpointError, UsageError
from tieredckpt.format import keys
from tieredckpt.format.objects import NodeFile, RepositoryFile, encode_node, encode_repository
from tieredckpt.format.records import OpenRecord, encode_record, seal
from tieredckpt.model.fields import utc_text
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.faults import Act, ApplyLate, FailBefore, FaultStore, ForeignWinner, LoseAnswer, Rule


@dataclass
class Scene:
    """Two tiers in memory, faults on one of them."""

    local: FaultStore
    remote: FaultStore

    @classmethod
    def of(cls, tier: str, *rules: Rule) -> Scene:
        env = InlineEnv()
        scripts = {"local": (), "remote": (), tier: rules}
        return cls(
            FaultStore(MemoryStore("here"), scripts["local"], env=env),
            FaultStore(MemoryStore("there"), scripts["remote"], env=env),
        )

    def open_save_send(self) -> tuple[Run, SaveHandle]:
        run = kit.start(self.local, self.remote)
        kit.restore(run)
        handle = kit.save(run, 1)
        kit.send(run)
        return run, handle

    def deleted(self) -> list[str]:
        return kit.deleted([*self.local.calls, *self.remote.calls])


def conditional_puts(tier: str) -> list[str]:
    """The keys of the conditional puts of the scenario, in order."""
    scene = Scene.of(tier)
    scene.open_save_send()
    return [call.keys[0] for call in kit.creates((scene.local if tier == "local" else scene.remote).calls)]


PUTS = [(tier, number, key) for tier in ("local", "remote") for number, key in enumerate(conditional_puts(tier), 1)]
CONTESTED = [put for put in PUTS if put[2].startswith((keys.LOG_PREFIX, keys.SNAPSHOTS_PREFIX))]


def each(puts: list[tuple[str, int, str]]) -> pytest.MarkDecorator:
    ids = [f"{tier}-{number}-{key.split('/')[0]}" for tier, number, key in puts]
    return pytest.mark.parametrize(("tier", "number", "key"), puts, ids=ids)


EACH_PUT = each(PUTS)


def test_the_sweep_covers_every_kind_of_object() -> None:
    kinds = {(tier, key.split("/")[0], key.split("/")[-1].partition(".")[0][-8:]) for tier, _, key in PUTS}
    for tier in ("local", "remote"):
        names = {name for where, _, name in kinds if where == tier}
        assert {"format", "manifest", "00000", "00000001", "00000002", "00000003"} <= names
    assert ("remote", "snapshots", "upload") in kinds
    assert ("local", "snapshots", "upload") not in kinds


@EACH_PUT
@pytest.mark.parametrize(
    "act",
    [LoseAnswer(), FailBefore(), ApplyLate(1), ApplyLate(2), ApplyLate(5)],
    ids=["answer-lost", "never-applied", "late-1", "late-2", "late-5"],
)
def test_c24_c25_an_answer_that_is_lost_ends_as_committed(tier: str, number: int, key: str, act: Act) -> None:
    scene = Scene.of(tier, Rule(act, method="create", nth=number))
    run, handle = scene.open_save_send()

    assert handle.local.result(0).tiers
    assert handle.remote.result(0) is not None
    assert kit.failures(run) == []
    assert scene.deleted() == []
    assert_each_snapshot_is_committed_once(scene, 1)
    assert_goes_on(scene, run)


@EACH_PUT
def test_c26_answers_lost_three_times_in_a_row_end_as_committed(tier: str, number: int, key: str) -> None:
    scene = Scene.of(tier, Rule(LoseAnswer(), method="create", nth=number, times=3))
    run, handle = scene.open_save_send()

    assert handle.remote.result(0) is not None
    assert kit.failures(run) == []
    assert scene.deleted() == []
    assert_goes_on(scene, run)


@pytest.mark.parametrize(
    "act", [LoseAnswer(), FailBefore(), ApplyLate(1), ApplyLate(3)], ids=["lost", "never", "late-1", "late-3"]
)
def test_c24_c25_a_run_without_a_local_tier_commits_in_the_bucket_all_the_same(act: Act) -> None:
    for number in count(1):
        bucket = FaultStore(MemoryStore("there"), [Rule(act, method="create", nth=number)], env=InlineEnv())
        run = kit.start(None, bucket)
        kit.restore(run)
        assert kit.save(run, 1).local.result(0).tiers == ("remote",), f"request {number}"
        assert kit.save(run, 2).remote.result(0) is not None
        assert kit.deleted(bucket.calls) == []
        assert kit.restored_step(kit.restore(kit.start(None, bucket.inner))) == 2
        if not any(call.acts for call in bucket.calls):
            break
    assert number > 12


@each(CONTESTED)
def test_i5_a_foreign_winner_is_a_typed_conflict_and_nothing_is_deleted(tier: str, number: int, key: str) -> None:
    """The winner's object is what another writer would really put there: an open of another session, or other bytes."""
    scene = Scene.of(tier, Rule(ForeignWinner(foreign(key)), method="create", key=pattern(key)))
    try:
        _, handle = scene.open_save_send()
    except TieredCheckpointError as raised:
        error: BaseException | None = raised
    else:
        error = handle.local.failure() or handle.remote.failure()

    conflicts = [one for one in (error, getattr(error, "__cause__", None)) if isinstance(one, ConflictError)]
    assert conflicts, error
    if key.startswith(keys.LOG_PREFIX) and not key.endswith("1.json"):  # at the first position two sessions opened at once
        assert isinstance(conflicts[0], FencedError)
    assert scene.deleted() == []
    store = scene.local if tier == "local" else scene.remote
    won = next(call.keys[0] for call in store.calls if call.acts)
    assert store.inner.get(won, max_bytes=1 << 20) == foreign(key), "the winner's object was touched"


@pytest.mark.parametrize(
    ("tier", "name"),
    [("local", "receipts/*"), ("local", "manifest*"), ("remote", "receipts/*"), ("remote", "manifest*"), ("remote", "upload*")],
)
def test_a_foreign_object_costs_one_snapshot_and_is_told_once(tier: str, name: str) -> None:
    """I12: what can never be committed is reported, and does not hold up the saves behind it."""
    scene = Scene.of(tier, Rule(ForeignWinner(), method="create", key=f"snapshots/*/{name}"))
    run, _ = scene.open_save_send()
    told = kit.failures(run)
    assert len(told) == 1
    assert isinstance(told[0], SaveError)
    assert told[0].step == 1
    assert told[0].tier == tier
    assert_goes_on(scene, run)
    assert kit.failures(run) == []


def test_a_run_that_begins_in_the_same_bucket_at_the_same_moment_is_the_run_of_both() -> None:
    scene = Scene.of("remote", Rule(ForeignWinner(foreign(keys.FORMAT_KEY)), method="create", key=keys.FORMAT_KEY))
    run, handle = scene.open_save_send()
    assert run.session.primary.run == FOREIGN_RUN
    assert handle.remote.result(0) is not None


def test_a_local_directory_that_another_run_takes_at_the_same_moment_is_refused_with_both_named() -> None:
    scene = Scene.of("local", Rule(ForeignWinner(foreign(keys.FORMAT_KEY)), method="create", key=keys.FORMAT_KEY))
    with pytest.raises(UsageError, match=FOREIGN_RUN):
        scene.open_save_send()
    assert scene.deleted() == []


def test_a_root_that_another_process_names_at_the_same_moment_is_one_node() -> None:
    scene = Scene.of("local", Rule(ForeignWinner(foreign(keys.NODE_KEY)), method="create", key=keys.NODE_KEY))
    run, handle = scene.open_save_send()
    assert run.session.primary.node == FOREIGN_NODE
    assert handle.remote.result(0) is not None


@pytest.mark.parametrize("tier", ["local", "remote"])
@pytest.mark.parametrize("method", ["stat", "get", "read_into", "list", "create", "put", "settle", "delete"])
@pytest.mark.parametrize("act", [FailBefore(), LoseAnswer(), FailBefore(retryable=False)], ids=["before", "after", "refused"])
def test_an_error_at_any_request_is_typed_and_a_second_process_goes_on(tier: str, method: str, act: Act) -> None:
    """One request fails, once: what was reported committed restores, and the next process saves and sends.

    Nothing is deleted but what a save that has surely failed had written.
    """
    for number in range(1, requests_of(tier, method) + 1):
        scene = Scene.of(tier, Rule(act, method=method, nth=number))
        committed, failed = 0, ""
        try:
            _, handle = scene.open_save_send()
            committed = 1 if handle.local.failure() is None else 0
            failed = "" if committed else handle.snapshot_id
        except FencedError:
            raise
        except TieredCheckpointError:
            pass  # this process says that it cannot open; the next one can
        assert scene.deleted() == [key for key in scene.deleted() if failed and failed in key]

        run = kit.start(scene.local, scene.remote)
        assert kit.restored_step(kit.restore(run)) >= committed, f"{method} {number}: step 1 was reported committed"
        assert_goes_on(scene, run)


def test_c25_an_unknown_commit_is_reported_and_found_committed_by_the_next_save() -> None:
    """The record's put lands only after the deadline: unknown, nothing deleted; then it is simply there."""
    scene = Scene.of("local", Rule(ApplyLate(200), method="create", key="log/*3.json", times=10_000))
    run = kit.start(scene.local, scene.remote)
    kit.restore(run)
    handle = kit.save(run, 1)

    error = handle.local.exception(0)
    assert isinstance(error, TieredCheckpointError)
    assert isinstance(error.__cause__, StoreError)
    assert error.__cause__.code == "outcome-unknown"
    assert scene.deleted() == []

    scene.local.apply_late_now()
    second = kit.save(run, 2)
    assert second.local.result(0).predecessor == handle.snapshot_id
    kit.send(run)
    assert second.remote.result(0) is not None
    assert scene.deleted() == []


# ------------------------------------------------------------------------------------------ what the tests share


FOREIGN_RUN = "01HF7YAT00AAAAAAAAAAAAAAAA"
FOREIGN_NODE = "01HF7YAT00BBBBBBBBBBBBBBBB"
_AT = utc_text(1.7e9)


def foreign(key: str) -> bytes:
    """What another writer would have put under `key`."""
    if key == keys.FORMAT_KEY:
        return encode_repository(RepositoryFile(run=FOREIGN_RUN, created_at=_AT))
    if key == keys.NODE_KEY:
        return encode_node(NodeFile(id=FOREIGN_NODE, created_at=_AT))
    seq = keys.parse_record_key(key)
    if seq is not None:
        record = OpenRecord(session="01HF7YAT00CCCCCCCCCCCCCCCC", continues=(), node="")
        return encode_record(seal(record, seq, "01HF7YAT00DDDDDDDDDDDDDDDD", _AT))
    return b"another writer's object"


def pattern(key: str) -> str:
    """For the same object in another run of the scenario, where ids differ."""
    return key if key.startswith(keys.LOG_PREFIX) or "/" not in key else f"snapshots/*/{key.split('/', 2)[2]}"


def requests_of(tier: str, method: str) -> int:
    scene = Scene.of(tier)
    scene.open_save_send()
    return sum(1 for call in (scene.local if tier == "local" else scene.remote).calls if call.method == method)


def assert_each_snapshot_is_committed_once(scene: Scene, snapshots: int) -> None:
    for store in (scene.local, scene.remote):
        records = [data for key, data in kit.objects(store.inner).items() if key.startswith(keys.LOG_PREFIX)]
        assert sum(b'"kind":"commit"' in data for data in records) == snapshots


def assert_goes_on(scene: Scene, run: Run) -> None:
    """The next save of this process is committed on both tiers, and another process restores it."""
    handle = kit.save(run, 7)
    kit.send(run)
    assert handle.local.result(0).step == 7
    assert handle.remote.result(0) is not None
    following = kit.start(scene.local, scene.remote)
    assert kit.restored_step(kit.restore(following)) == 7

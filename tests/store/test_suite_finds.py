"""The conformance suite finds what is wrong, says so by name, and takes no silence for an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from localstack.process import S3Server
from tests.store.broken_stores import SPOILED, Spoiled, Wrapped
from tests.store.local_bench import LOCAL, MEMORY, LocalBench
from tests.store.s3_bench import BUCKET, S3Bench, bucket_abilities
from tieredckpt.env import Env, InlineEnv
from tieredckpt.settings import Settings
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import parse_url
from tieredckpt.testing.proxy_acts import Answer
from tieredckpt.testing.store_checks import (
    CHECKS,
    Abilities,
    Bench,
    Extent,
    Hooks,
    Killed,
    Missing,
    StoreCheck,
    run_checks,
)

QUICK = Extent(racers=8, race_keys=3, many_keys=50)


def open_s3(server: S3Server, root: str) -> S3Store:
    return S3Store.open(parse_url(f"s3://{BUCKET}/{root}"), server.storage_options, settings=Settings(), env=InlineEnv())


def check_named(name: str) -> StoreCheck:
    (found,) = (check for check in CHECKS if check.name == name)
    return found


@contextlib.contextmanager
def in_memory(wrap=Wrapped, abilities: Abilities = MEMORY, **hooks) -> Iterator[Bench]:
    inner = MemoryStore()
    yield Bench(
        store=wrap(inner),
        raw_get=inner._objects.get,
        raw_set=inner._objects.__setitem__,
        abilities=abilities,
        env=Env(),
        extent=QUICK,
        hooks=Hooks(**hooks),
    )


@contextlib.contextmanager
def on_disk(wrap=Wrapped) -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.closing(LocalStore(Path(directory, "tier"), env=Env(), create=True)) as inner,
    ):
        reach = LocalBench(wrap(inner), Path(directory, "tier"))
        yield Bench(
            store=reach.store,
            raw_get=reach.raw_get,
            raw_set=reach.raw_set,
            abilities=LOCAL,
            env=Env(),
            extent=QUICK,
            hooks=reach.hooks(),
        )


@pytest.mark.parametrize("make", [in_memory, on_disk])
def test_a_store_that_is_right_fails_nothing(make):
    results = run_checks(make, CHECKS)
    assert [result for result in results if result.outcome == "failed"] == []
    assert [result.name for result in results] == [check.name for check in CHECKS]


@pytest.mark.parametrize("spoiled", SPOILED, ids=[spoiled.store.__name__ for spoiled in SPOILED])
def test_a_broken_store_fails_the_check_for_it_and_nothing_unrelated(spoiled: Spoiled):
    make = on_disk if spoiled.on_disk else in_memory
    results = {result.name: result for result in run_checks(lambda: make(spoiled.store), CHECKS)}
    failed = {name for name, result in results.items() if result.outcome == "failed"}
    assert spoiled.fails in failed
    unrelated = {name for name in failed - {spoiled.fails} if not {name, results[name].group} & spoiled.may_fail}
    assert unrelated == set()
    assert results[spoiled.fails].detail


def test_every_group_finds_something():
    groups = {check_named(spoiled.fails).group for spoiled in SPOILED}
    assert groups == {check.group for check in CHECKS} - {"durability"}  # whose broken backends follow


def outcome_of(name: str, abilities: Abilities = MEMORY, wrap=Wrapped, **hooks):
    (result,) = run_checks(lambda: in_memory(wrap, abilities, **hooks), [check_named(name)])
    return result.outcome, result.detail


def test_what_was_acknowledged_and_is_gone_after_a_kill_is_found_i3():
    @contextlib.contextmanager
    def kill(objects):
        left = MemoryStore()
        for key, data in list(objects.items())[1:]:
            left.put(key, [data])
        yield Killed(left, frozenset(objects))

    abilities = dataclasses.replace(MEMORY, survives_kill=True)
    outcome, detail = outcome_of("durability_of_what_was_acknowledged_before_a_kill", abilities, kill=kill)
    assert outcome == "failed"
    assert "data/0/000" in detail


def test_what_is_half_written_after_a_kill_is_found_c01():
    @contextlib.contextmanager
    def kill(objects):
        left = MemoryStore()
        *whole, torn = objects.items()
        for key, data in whole:
            left.put(key, [data])
        left.put(torn[0], [torn[1][:-1]])
        yield Killed(left, frozenset(key for key, _ in whole))

    abilities = dataclasses.replace(MEMORY, survives_kill=True)
    outcome, detail = outcome_of("durability_of_what_was_acknowledged_before_a_kill", abilities, kill=kill)
    assert outcome == "failed"
    assert "after the kill" in detail


def test_a_list_that_loses_a_key_between_pages_is_found_c42():
    class LosesOneAtEachBorder(Wrapped):
        def list(self, prefix, *, after=""):
            yield from (item for n, item in enumerate(self.inner.list(prefix, after=after)) if n % 4 != 3)

    found = {}

    def wrap(inner):
        found["store"] = inner
        return inner

    def paged(keys):
        return contextlib.nullcontext(LosesOneAtEachBorder(found["store"]))

    abilities = dataclasses.replace(MEMORY, pages=True)
    outcome, detail = outcome_of("list_goes_on_over_pages_of_three_keys", abilities, wrap, paged=paged)
    assert outcome == "failed"
    assert "missing" in detail


def test_a_cut_read_that_is_taken_for_a_success_is_found_c33():
    class CutReadsAreFine(Wrapped):
        def read_into(self, key, offset, out):
            self.inner.read_into(key, offset, out.cast("B")[:1])

        def get(self, key, *, max_bytes):
            return self.inner.get(key, max_bytes=max_bytes)[:1]

    found = {}

    def wrap(inner):
        found["store"] = inner
        return inner

    def cutting_reads(after):
        return contextlib.nullcontext(CutReadsAreFine(found["store"]))

    abilities = dataclasses.replace(MEMORY, cut_reads=True)
    outcome, detail = outcome_of("cancellation_of_a_cut_read_is_an_error", abilities, wrap, cutting_reads=cutting_reads)
    assert outcome == "failed"
    assert "cut after 0 bytes" in detail


def test_a_server_that_ignores_conditions_is_found_c27(nanio):
    """A real one, behind a client that is right."""
    with contextlib.ExitStack() as stack:
        reach = S3Bench(nanio, open_s3, stack, Answer(503, "SlowDown"))
        abilities = bucket_abilities(one_winner=Missing("it ignores conditions"))

        @contextlib.contextmanager
        def on_nanio():
            reach.empty()
            yield Bench(
                store=reach.store, raw_get=reach.raw_get, raw_set=reach.raw_set, abilities=abilities, env=Env(), extent=QUICK
            )

        results = run_checks(on_nanio, [check for check in CHECKS if check.group == "create" and check.bounded])
    outcomes = {result.name: (result.outcome, result.detail) for result in results}
    outcome, detail = outcomes["create_leaves_an_existing_object_alone"]
    assert (outcome, detail) == ("failed", "create of a key that exists answered 'created', it must answer 'exists'")
    assert outcomes["create_makes_an_absent_object"] == ("passed", "")
    assert outcomes["create_has_one_winner_of_many_racing_writers"] == ("declared missing", "it ignores conditions (shown)")


def test_an_ability_that_is_not_declared_is_an_error():
    declared = {field.name: getattr(MEMORY, field.name) for field in dataclasses.fields(Abilities)}
    for name in declared:
        with pytest.raises(TypeError, match=name):
            Abilities(**{key: value for key, value in declared.items() if key != name})
        for silence in (None, False, Missing("")):
            with pytest.raises(TypeError, match=name):
                Abilities(**{**declared, name: silence})


def test_an_ability_that_is_declared_without_a_hook_to_check_it_fails():
    for check in CHECKS:
        if check.needs not in (None, "one_winner", "tells_conflicts"):
            outcome, detail = outcome_of(check.name, dataclasses.replace(MEMORY, **{check.needs: True}))
            assert (check.name, outcome) == (check.name, "failed")
            assert "no hook" in detail


def test_an_ability_that_is_declared_missing_and_is_there_fails():
    for name, needs in (
        ("put_of_other_bytes_is_a_conflict", "tells_conflicts"),
        ("create_has_one_winner_of_many_racing_writers", "one_winner"),
    ):
        outcome, detail = outcome_of(name, dataclasses.replace(MEMORY, **{needs: Missing("it is said to")}))
        assert (name, outcome) == (name, "failed")
        assert f"{needs}=True" in detail


def test_a_store_that_survives_a_kill_and_is_said_not_to_fails():
    @contextlib.contextmanager
    def kill(objects):
        left = MemoryStore()
        for key, data in objects.items():
            left.put(key, [data])
        yield Killed(left, frozenset(objects))

    abilities = dataclasses.replace(MEMORY, survives_kill=Missing("it is said to forget"))
    outcome, detail = outcome_of("durability_of_what_was_acknowledged_before_a_kill", abilities, kill=kill)
    assert outcome == "failed"
    assert "survives_kill=True" in detail


def test_a_lack_that_is_neither_shown_nor_explained_fails():
    abilities = dataclasses.replace(MEMORY, pages=Missing("there are none"))
    outcome, detail = outcome_of("list_goes_on_over_pages_of_three_keys", abilities)
    assert outcome == "failed"
    assert "cannot_show" in detail


def test_a_lack_that_is_shown_or_explained_is_declared_missing():
    class Overwrites(Wrapped):
        def put(self, key, parts):
            self.replace(key, b"".join(parts))

    abilities = dataclasses.replace(MEMORY, tells_conflicts=Missing("the last writer wins"))
    assert outcome_of("put_of_other_bytes_is_a_conflict", abilities, Overwrites) == (
        "declared missing",
        "the last writer wins (shown)",
    )
    outcome, detail = outcome_of("list_goes_on_over_pages_of_three_keys")
    assert outcome == "declared missing"
    assert "not shown: there are no pages" in detail


SILENT = """
import pytest
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import parse_url
from tieredckpt.testing.proxy_acts import Answer
from tieredckpt.testing.store_suite import StoreSuite

class TestSilent(StoreSuite):
    @pytest.fixture
    def store(self):
        return MemoryStore()
    def raw_get(self, store, key):
        return store._objects.get(key)
    def raw_set(self, store, key, data):
        store._objects[key] = data
"""


def test_a_test_class_that_declares_nothing_has_errors_and_no_skips(tmp_path):
    (tmp_path / "test_silent.py").write_text(SILENT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"{len(CHECKS)} errors" in ended.stdout
    assert "passed" not in ended.stdout
    assert "skipped" not in ended.stdout
    assert "TestSilent declares no `abilities`" in ended.stdout


def test_the_checks_need_no_pytest():
    code = "import sys, tieredckpt.testing.store_checks\nprint(*sorted({'pytest', 'torch', 'boto3'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


def test_every_check_has_a_name_of_its_own_and_says_what_it_promises():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.promise != check.name for check in CHECKS)
    assert not [
        check.name for check in CHECKS if check.bounded and check.needs not in (None, "one_winner", "tells_conflicts", "pages")
    ]

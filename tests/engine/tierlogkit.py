"""A `TierLog` over a store of the test's choice, with a session that has saved, and what is stored of it."""

from __future__ import annotations

import itertools
import json

from tests.plan.logkit import ROOT, commit, opened, resumed, snap
from tieredckpt.engine.log import Appended, TierLog
from tieredckpt.env import Env, InlineEnv
from tieredckpt.format.records import Record
from tieredckpt.plan.log import LogState
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore

A1, A2 = snap("A1"), snap("A2")
_seeds = itertools.count(1)


def tier_log(store: ObjectStore, env: Env | None = None) -> TierLog:
    return TierLog(store, name="remote", env=env or InlineEnv(next(_seeds)), settings=Settings())


def append(log: TierLog, *records: Record) -> LogState:
    for record in records:
        outcome = log.append(record)
        assert isinstance(outcome, Appended), outcome
    return log.state


def begun(store: ObjectStore, saves: int = 2) -> TierLog:
    """Session A has opened, resumed, and committed `saves` snapshots."""
    log = tier_log(store)
    append(log, opened("A"), resumed("A"))
    append(log, *(commit(f"A{n}", snap(f"A{n - 1}") if n > 1 else ROOT) for n in range(1, saves + 1)))
    return log


def kinds(store: ObjectStore) -> list[str]:
    """What is stored, read without the code under test."""
    stored = [json.loads(store.get(stat.key, max_bytes=1 << 20)) for stat in store.list("log/")]
    assert [record["seq"] for record in stored] == list(range(1, len(stored) + 1)), "the log is dense"
    return [record["kind"] for record in stored]

"""Every rule of admission by example: what it refuses, and that nothing else refuses it once the rule is taken out.

Ids of guarantees and hazards: I1 I3 I5 I7 I8 I9, C25 C30 C53 C54 C59 C61 C65 C67.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.plan.logkit import (
    ROOT,
    add,
    ask,
    commit,
    failed,
    log,
    opened,
    pack,
    pin,
    resumed,
    retire,
    snap,
    sweep,
    ulid,
    unpin,
)
from tieredckpt.format.keys import pack_key
from tieredckpt.format.records import MAX_SWEEP_NAMES, Record
from tieredckpt.plan import log as rules_of
from tieredckpt.plan.log import RULES, Admitted, AlreadyDone, Facts, LogState, RefusalReason, Refused, Rules, admit

R = RefusalReason
A1, A2, A3, B1 = snap("A1"), snap("A2"), snap("A3"), snap("B1")

BASE = log(opened("A"), resumed("A"), commit("A1", ROOT), commit("A2", A1))
"""Session A has saved twice: A1 <- A2, the head."""

ROLLED_BACK = add(BASE, opened("B", "A"), resumed("B", A1, how="user"))
"""Session B has gone back to A1: A2 is an abandoned future."""

MANY = tuple(pack_key(A1, 0, n) for n in range(MAX_SWEEP_NAMES + 1))


def live_packs(*names: str) -> dict[str, frozenset[str]]:
    return {snap(name): frozenset({pack(name)}) for name in names}


@dataclasses.dataclass(frozen=True)
class Case:
    """`rule` refuses `record` behind `state`; `otherwise` is what is said without the rule (None: it is admitted)."""

    rule: Callable[..., object]
    state: LogState
    record: Record
    reason: RefusalReason | None  # None: already done
    facts: Facts = rules_of.NO_FACTS
    otherwise: RefusalReason | None = None


CASES = {
    "I7 a fenced session commits": Case(
        rules_of.newest_session,
        add(BASE, opened("B", "A"), resumed("B", A2)),
        commit("A3", A2, by="A"),
        R.FENCED,
        otherwise=R.OFF_LINEAGE,
    ),
    "I7 a fenced session sweeps": Case(
        rules_of.newest_session,
        add(BASE, opened("B", "A")),
        sweep([pack("A9")], session="A"),
        R.FENCED,
        Facts(packs_of_live=live_packs("A1", "A2")),
    ),
    "I7 a fenced session retires": Case(
        rules_of.newest_session, add(BASE, opened("B", "A")), retire("A1", session="A"), R.FENCED
    ),
    "I7 a session that never opened": Case(rules_of.newest_session, BASE, failed("C", "A2", pack("A2")), R.FENCED),
    "open twice": Case(rules_of.open_once, BASE, opened("A"), None, otherwise=R.UNKNOWN_TAKEOVER),
    "I7 a fenced session opens again": Case(rules_of.open_once, add(BASE, opened("B", "A")), opened("A", "B"), R.FENCED),
    "take-over of an unknown session": Case(rules_of.continues_newest, BASE, opened("C", "B"), R.UNKNOWN_TAKEOVER),
    "an offline session behind the head": Case(rules_of.head_is_behind, BASE, opened("B", "A", tip=A1), R.BEHIND_HEAD),
    "a commit with a hole in its chain": Case(
        rules_of.chain_is_whole, BASE, commit("A4", A3), R.BROKEN_CHAIN, otherwise=R.OFF_LINEAGE
    ),
    "a resume with a hole in its chain": Case(
        rules_of.chain_is_whole, BASE, resumed("A", B1, [snap("B0", 7)], how="user"), R.BROKEN_CHAIN
    ),
    "an open that contradicts the chain": Case(
        rules_of.chain_is_whole, BASE, opened("B", "A", tip=A2, behind=[ROOT]), R.BROKEN_CHAIN
    ),
    "resume of a retired snapshot": Case(
        rules_of.target_can_be_read, add(BASE, retire("A1")), resumed("A", A1, [ROOT], how="user"), R.NOT_LIVE
    ),
    "resume of a rebase of a retired snapshot": Case(
        rules_of.target_can_be_read, add(BASE, retire("A1")), resumed("A", snap("A1~U"), [ROOT], how="user"), R.NOT_LIVE
    ),
    "I6 a resume twice": Case(
        rules_of.resumed_once,
        add(BASE, opened("B", "A"), resumed("B", A2), commit("B1", A2)),
        resumed("B", A2),
        None,
        otherwise=R.BEHIND_HEAD,
    ),
    "a resume that the session has left behind by a roll-back": Case(
        rules_of.resumed_once,
        add(BASE, resumed("A", A1, how="user", number=1, next_save=3)),
        resumed("A", A2, remote=None),
        None,
    ),
    "an automatic resume behind the head": Case(rules_of.automatic_keeps_head, BASE, resumed("A", A1, [ROOT]), R.BEHIND_HEAD),
    "a commit twice": Case(rules_of.committed_once, BASE, commit("A2", A1), None),
    "a commit of a rebase of what is committed": Case(rules_of.committed_once, BASE, commit("A2~U", A1, by="A"), None),
    "a commit of what a rebase replaced": Case(
        rules_of.committed_once, add(BASE, commit("A3~U", A2, by="A")), commit("A3", A2), None
    ),
    "a commit of what was retired": Case(rules_of.committed_once, add(BASE, retire("A1")), commit("A1", ROOT), None),
    "I8 a commit of a condemned attempt": Case(
        rules_of.id_not_condemned, add(BASE, sweep(names=["A3"])), commit("A3", A2), R.CONDEMNED_SNAPSHOT
    ),
    "I8 C65 a commit that names a swept pack of its base": Case(
        rules_of.packs_not_condemned,
        add(BASE, retire("A1"), sweep([pack("A1")])),
        commit("A3", A2),
        R.CONDEMNED_PACK,
        Facts(packs_of_record={pack("A3"), pack("A1")}, packs_durable={pack("A3"), pack("A1")}),
    ),
    "I1 a commit that names a damaged pack": Case(
        rules_of.packs_not_damaged,
        add(BASE, failed("A", "A2", pack("A2"))),
        commit("A3", A2),
        R.DAMAGED_PACK,
        Facts(packs_of_record={pack("A3"), pack("A2")}, packs_durable={pack("A3"), pack("A2")}),
    ),
    "I1 I3 C30 a commit before its packs": Case(
        rules_of.packs_durable_here, BASE, commit("A3", A2), R.NOT_DURABLE, Facts(packs_of_record={pack("A3")})
    ),
    "a commit before the session's resume": Case(
        rules_of.session_has_resumed, add(BASE, opened("B", "A")), commit("A3", A2, by="B"), R.NOT_RESUMED
    ),
    "a late commit of an abandoned future": Case(
        rules_of.continues_lineage, ROLLED_BACK, commit("A3", A2, by="B"), R.OFF_LINEAGE
    ),
    "a late commit of what the same session gave up": Case(
        rules_of.continues_lineage,
        add(BASE, resumed("A", A1, how="user", number=1, next_save=4)),
        commit("A3", A2),
        R.OFF_LINEAGE,
    ),
    "a commit of another lineage": Case(
        rules_of.continues_lineage, add(BASE, opened("B", "A"), resumed("B", A2)), commit("A9", A1, by="B"), R.OFF_LINEAGE
    ),
    "retire twice": Case(rules_of.retires_live, add(BASE, retire("A1")), retire("A1"), None),
    "retire what was never committed": Case(rules_of.retires_live, BASE, retire("A9"), R.NOT_LIVE),
    "I9 C53 retire the head": Case(rules_of.keeps_head, BASE, retire("A2"), R.IS_HEAD),
    "I9 C54 retire what a roll-back made the head": Case(rules_of.keeps_head, ROLLED_BACK, retire("A1"), R.IS_HEAD),
    "I9 retire the newest after a fresh start": Case(
        rules_of.keeps_newest, add(BASE, opened("B", "A"), resumed("B", "fresh-" + ulid("B"))), retire("A1", "A2"), R.IS_HEAD
    ),
    "retire a pinned one": Case(rules_of.keeps_pinned, add(BASE, pin("A1")), retire("A1"), R.PINNED),
    "I9 retire after a failed restore": Case(
        rules_of.not_after_damage, add(BASE, failed("A", "A2", pack("A2"))), retire("A1"), R.ON_HOLD
    ),
    "sweep twice": Case(
        rules_of.sweeps_something,
        add(BASE, sweep([pack("A9")])),
        sweep([pack("A9")]),
        None,
        Facts(packs_of_live=live_packs("A1", "A2")),
    ),
    "sweep too much": Case(
        rules_of.sweep_is_bounded, BASE, sweep(MANY), R.TOO_MANY_NAMES, Facts(packs_of_live=live_packs("A2") | {A1: frozenset()})
    ),
    "I8 sweep the id of a live snapshot": Case(
        rules_of.spares_live_ids, BASE, sweep(names=["A2"]), R.NAMED_BY_LIVE, Facts(packs_of_live=live_packs("A1", "A2"))
    ),
    "I8 C65 sweep a pack that a live child names": Case(
        rules_of.spares_live_packs,
        add(BASE, retire("A1")),
        sweep([pack("A1")]),
        R.NAMED_BY_LIVE,
        Facts(packs_of_live={A2: frozenset({pack("A2"), pack("A1")})}),
    ),
    "I8 sweep while a live manifest cannot be read": Case(
        rules_of.spares_live_packs, BASE, sweep([pack("A9")]), R.UNREADABLE_LIVE, Facts(packs_of_live=live_packs("A2"))
    ),
    "pin what is not live": Case(rules_of.pins_live, add(BASE, retire("A1")), pin("A1"), R.NOT_LIVE),
    "pin twice": Case(rules_of.pins_live, add(BASE, pin("A1")), pin("A1"), None),
    "unpin what is not pinned": Case(rules_of.unpins_pinned, BASE, unpin("A1"), None),
}


def without(rule: Callable[..., object]) -> Rules:
    tables: dict[str, Any] = {
        field.name: tuple(r for r in getattr(RULES, field.name) if r is not rule) for field in dataclasses.fields(RULES)
    }
    return Rules(**tables)


@pytest.mark.parametrize("name", CASES)
def test_rule_refuses(name: str) -> None:
    case = CASES[name]
    verdict = admit(case.state, case.record, case.facts)
    if case.reason is None:
        assert isinstance(verdict, AlreadyDone)
    else:
        assert isinstance(verdict, Refused)
        assert verdict.reason is case.reason


@pytest.mark.parametrize("name", CASES)
def test_only_this_rule_refuses(name: str) -> None:
    case = CASES[name]
    verdict = admit(case.state, case.record, case.facts, rules=without(case.rule))
    if case.otherwise is None:
        assert isinstance(verdict, Admitted), verdict
    else:
        assert isinstance(verdict, Refused)
        assert verdict.reason is case.otherwise


def test_every_rule_has_an_example() -> None:
    rules = {rule for field in dataclasses.fields(RULES) for rule in getattr(RULES, field.name)}
    assert rules == {case.rule for case in CASES.values()}


ADMITTED: dict[str, tuple[LogState, Record, dict[str, Any]]] = {
    "the first open": (log(), opened("A", "B"), {}),
    "an open that continues the newest": (BASE, opened("B", "A"), {}),
    "I7 an offline session's late open, over what it saved itself": (
        add(BASE, opened("B", "A", tip=A2)),
        opened("C", "B", "A", tip=snap("C1"), behind=[B1, A2]),
        {},
    ),
    "a resume of what only the other tier has live": (
        add(BASE, retire("A1")),
        resumed("A", A1, [ROOT], how="user"),
        {"live_elsewhere": {A1}},
    ),
    "a resume of what a rebase replaced": (add(BASE, commit("A3~U", A2, by="A")), resumed("A", A3, [A2]), {}),
    "a resume of what was never committed here": (BASE, resumed("A", A3, [A2]), {}),
    "a fresh resume": (BASE, resumed("A", "fresh-" + ulid("X"), how="user"), {}),
    "an automatic resume behind a damaged head": (add(BASE, failed("A", "A2", pack("A2"))), resumed("A", A1, [ROOT]), {}),
    "a late open of a session that went round a damaged head": (
        add(BASE, failed("A", "A2", pack("A2")), opened("B", "A")),
        opened("C", "B", "A", tip=snap("C1"), behind=[A1]),
        {},
    ),
    "a local log that follows the remote one": (BASE, resumed("A", A1, [ROOT], remote=True), {}),
    "a commit whose base a live snapshot names": (
        BASE,
        commit("A3", A2),
        {"packs_of_record": {pack("A3"), pack("A2")}, "packs_durable": {pack("A3")}, "packs_of_live": live_packs("A2")},
    ),
    "a rebase of a condemned attempt": (add(BASE, sweep(names=["A3"])), commit("A3~U", A2, by="A"), {}),
    "an older snapshot that arrives late": (add(log(opened("A"), resumed("A")), commit("A2", A1, ROOT)), commit("A1", ROOT), {}),
    "a commit for an offline session that continues this one": (
        add(BASE, opened("B", "A"), resumed("B", A2)),
        commit("C1", B1, A2, by="B", continues="B"),
        {},
    ),
    "what a session saved after its own roll-back": (
        add(BASE, resumed("A", A1, number=1, next_save=3)),
        commit("A3", A1),
        {},
    ),
    "C61 retire what an abandoned future left": (ROLLED_BACK, retire("A2"), {}),
    "retire again after a commit": (add(BASE, failed("A", "A2"), commit("A3", A2)), retire("A1"), {}),
    "retire what was unpinned": (add(BASE, pin("A1"), unpin("A1")), retire("A1"), {}),
    "C59 sweep what was retired": (
        add(BASE, retire("A1")),
        sweep([pack("A1")], ["A1"]),
        {"packs_of_live": live_packs("A2")},
    ),
    "I7 a tool fences nobody and needs no session": (add(BASE, opened("B", "A")), retire("A1"), {}),
}


@pytest.mark.parametrize("name", ADMITTED)
def test_rules_admit(name: str) -> None:
    state, record, facts = ADMITTED[name]
    assert isinstance(ask(state, record, **facts), Admitted)

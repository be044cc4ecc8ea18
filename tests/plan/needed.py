"""What the protocol cannot do without: parts taken out one at a time, each missed by a configuration.

`NEEDED` has every rule of admission that an interleaving misses, and the clauses of the other decisions that are not obvious.
`BY_EXAMPLE` has the rest, each with the reason why no interleaving can miss it, or with how far that was looked for; examples in
`test_log_rules`, `test_choose`, `test_log_state` and `test_uploads` hold these. A test demands one or the other for every rule.

A part is taken out by replacing a name where it is looked up. What is replaced is put back, and searches remember nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.plan import actors, trainers, uploaders
from tests.plan.appending import judge
from tests.plan.configs import CONFIGS
from tests.plan.explorer import Explored, explore
from tests.plan.test_log_rules import without
from tests.plan.world import Entry, Log, World
from tieredckpt.format.records import CommitRecord, ResumeRecord
from tieredckpt.model.ids import original_of
from tieredckpt.plan import choose, lineage, log, log_state
from tieredckpt.plan.log import RULES, LogState

Replaced = tuple[object, str, object]


@dataclass(frozen=True)
class Need:
    """`config` breaks with one of the texts `expected` when the part is taken out: `rule`, or the names in `replaced`."""

    config: str
    expected: tuple[str, ...]
    rule: Callable[..., object] | None = None
    replaced: tuple[Replaced, ...] = ()
    lost_answers: bool = False


def look_for(need: Need, limit: int) -> Explored:
    """Explore its configuration without the part, up to the first violation."""
    with _taken_out(need.replaced):
        return explore(
            CONFIGS[need.config],
            limit=limit,
            first_only=True,
            lost_answers=need.lost_answers,
            rules=RULES if need.rule is None else without(need.rule),
        )


@contextmanager
def _taken_out(replaced: Sequence[Replaced]) -> Iterator[None]:
    with ExitStack() as stack:
        for where, name, instead in replaced:
            stack.enter_context(mock.patch.object(where, name, instead))
        yield


# ------------------------------------------------------------------------------------------ parts of other decisions


def _yes(*_: object, **__: object) -> bool:
    return True


def _no(*_: object, **__: object) -> bool:
    return False


def _without_counter(snapshot: str, origin: str, continues: Sequence[str], last: ResumeRecord) -> bool:
    """Without: what a session saved before its own roll-back is told apart by its save counter."""
    return origin == last.session or last.session in continues


def _without_offline(snapshot: str, origin: str, continues: Sequence[str], last: ResumeRecord) -> bool:
    """Without: what a session saved that continues the last one offline is on the lineage."""
    return _saved_since(snapshot, origin, [], last)


_saved_since = lineage._saved_since
_on_lineage = lineage.on_current_lineage
_commit_to_tip = log_state._Builder._commit
_continues = choose.continues_for_open


def _tip_of_late_one(builder: Any, record: CommitRecord) -> None:
    """Without: a snapshot that arrives late does not take the lineage back."""
    _commit_to_tip(builder, record)
    builder._tip = original_of(record.snapshot)


def _only_remote(local: LogState | None, remote: LogState | None) -> tuple[str, ...]:
    """Without: the sessions of the local log since the last remote one are continued."""
    return _continues(None, remote)


def _only_local(local: LogState | None, remote: LogState | None) -> tuple[str, ...]:
    """Without: the newest session that was read remotely is continued."""
    return _continues(local, None)


def _judged_alone(local: Log, entry: Entry, world: World | None = None, elsewhere: Log | None = None) -> str:
    """Without: what is live on the other tier."""
    return judge(local, entry, world)


def _sends_behind_remote(local: LogState, remote: LogState, snapshot: str) -> bool:
    """Without: what only this node has counts only if the remote head is its past."""
    record = local.live[snapshot]
    if remote.live_as(snapshot) is not None:
        return False
    return _on_lineage(remote, snapshot, origin=record.origin, continues=record.continues, ancestry=local.ancestry)


def _descends(local: LogState, remote: LogState, snapshot: str) -> bool:
    """Without: what only this node has counts only if it is on the current lineage of the bucket's log."""
    if remote.live_as(snapshot) is not None:
        return False
    return remote.head is None or local.ancestry.is_ancestor(remote.head, snapshot)


def _all_live(state: LogState) -> tuple[str, ...]:
    """Without: only the current lineage."""
    return tuple(reversed(state.live))


def _forgets_hold(builder: Any, record: Any) -> None:
    builder._failed.change().add(original_of(record.snapshot))
    builder._damaged.change().update(record.packs)


def _nothing(*_: object) -> frozenset[str]:
    return frozenset()


def _rule(rule: Callable[..., object], config: str, *expected: str, lost_answers: bool = False) -> dict[str, Need]:
    return {rule.__name__: Need(config, expected, rule=rule, lost_answers=lost_answers)}


def _part(
    what: str, where: object, name: str, instead: object, config: str, *expected: str, lost_answers: bool = False
) -> dict[str, Need]:
    return {what: Need(config, expected, replaced=((where, name, instead),), lost_answers=lost_answers)}


NEEDED: dict[str, Need] = {
    **_rule(log.newest_session, "first", "I7"),
    **_rule(log.continues_newest, "offline, and a node that knows nothing", "takes over"),
    **_rule(log.head_is_behind, "roll-back offline", "opens over a head"),
    **_rule(log.open_once, "offline, and two uploaders", "REFUSED ITSELF"),
    **_rule(log.keeps_newest, "begun anew after a roll-back", "I9"),
    **_rule(log.resumed_once, "offline, and two uploaders", "REFUSED ITSELF"),
    **_rule(log.committed_once, "restart on the same node", "committed twice"),
    **_rule(log.id_not_condemned, "rebase of a snapshot without packs", "I8 a condemned snapshot"),
    **_rule(log.packs_durable_here, "one tier", "I1", lost_answers=True),
    **_rule(log.continues_lineage, "roll-back within a session", "roll-back is undone"),
    **_rule(log.keeps_head, "two collectors", "I9"),
    **_rule(log.keeps_pinned, "pin", "pinned snapshot is retired"),
    **_rule(log.not_after_damage, "damage", "only damaged snapshots are left"),
    **_rule(log.spares_live_ids, "rebase of a snapshot without packs", "I8 a live snapshot's id"),
    **_rule(log.pins_live, "pin", "a pin was confirmed"),
    **_part(
        "a session's save counter tells what it gave up",
        lineage, "_saved_since", _without_counter,
        "roll-back within a session", "roll-back is undone", "cannot commit any more",
    ),
    **_part(
        "what continues the last session offline is on the lineage",
        lineage, "_saved_since", _without_offline,
        "offline twice", "goes back behind what this node has acknowledged", "cannot commit any more",
    ),
    **_part(
        "what was saved before the last resume is not on the lineage",
        lineage, "_saved_since", _yes,
        "roll-back elsewhere", "roll-back is undone",
    ),
    **_part(
        "a snapshot that arrives late does not take the lineage back",
        log_state._Builder, "_commit", _tip_of_late_one,
        "uploads in any order", "moves the head off its lineage",
    ),
    **_part(
        "a failed restore holds what is live until the next commit",
        log_state._Builder, "_failed_restore", _forgets_hold,
        "damage", "only damaged snapshots are left",
    ),
    **_part(
        "an open names the local sessions that it continues",
        trainers, "continues_for_open", _only_remote,
        "offline twice", "stuck",
    ),
    **_part(
        "an open names the newest session that it read",
        trainers, "continues_for_open", _only_local,
        "first", "a restart is stuck",
    ),
    **_part(
        "what is marked as damaged is passed over",
        choose, "_marked", _no,
        "damage", "marked as damaged is resumed",
    ),
    **_part(
        "what only this node has must continue the bucket's lineage",
        choose, "_continues_remote", _descends,
        "roll-back elsewhere", "roll-back is undone",
    ),
    **_part(
        "what only this node has must lie beyond the bucket's head",
        choose, "_continues_remote", _sends_behind_remote,
        "restart on the same node", "stuck", "goes back",
    ),
    **_part(
        "a start keeps to the local log's lineage",
        choose, "current_line", _all_live,
        "roll-back offline without a save", "roll-back is undone",
    ),
    **_part(
        "a run that was begun anew begins anew again",
        choose, "_begun_anew", _no,
        "begun anew", "stuck",
    ),
    **_part(
        "a node that has read of another waits for the bucket",
        choose, "_require_own_past", _no,
        "roll-back elsewhere", "goes back behind", "roll-back is undone",
        lost_answers=True,
    ),
    **_part(
        "a session that began offline is followed by its resume",
        uploaders, "resume_is_missing", _no,
        "offline twice", "is refused when it is over", "cannot commit any more", "stuck",
    ),
    **_part(
        "what nobody can send any more is a leftover",
        lineage, "_may_still_be_sent", _yes,
        "restart on the same node", "garbage",
    ),
    **_part(
        "what lies behind the head is a leftover",
        lineage, "_behind_head", _no,
        "restart on the same node", "garbage",
    ),
    **_part(
        "what has to be sent is not evicted",
        actors, "must_be_kept", _nothing,
        "eviction", "I9",
    ),
    "what is live on the other tier can be resumed": Need(
        "adoption",
        ("stuck",),
        replaced=((trainers, "judge", _judged_alone),),
    ),
}  # fmt: skip
"""What is taken out → what misses it."""

BY_EXAMPLE: dict[str, str] = {
    "automatic_keeps_head": "not missed in 40,000 states of any configuration with lost answers: a start without the bucket waits where "
    "this node lacks what the run goes on from, and any other chooses from the state that its resume must follow",
    "target_can_be_read": "a target is chosen from the state that its resume must follow, and what an uploader makes up for is loaded; "
    "not missed in 25,000 states of `roll-back, then offline`",
    "chain_is_whole": "records carry predecessors as the log needs them, by construction: only a foreign writer sends others",
    "session_has_resumed": "an uploader makes up for the resume before it commits: only a foreign writer does not",
    "packs_not_damaged": "not missed in 20,000 states of `damage`, nor in any of `damage, and a node that has more`",
    "packs_not_condemned": "not missed in 120,000 states of `rebase`, nor in any of `one tier, roll-back`",
    "spares_live_packs": "not missed in 20,000 states of `two collectors and a late put`, nor in any of `one tier, roll-back`",
    "retires_live": "a second retire of the same snapshot changes nothing; the rule keeps counts honest",
    "sweeps_something": "the rule only saves records",
    "sweep_is_bounded": "worlds here have a handful of names",
    "unpins_pinned": "the rule only saves records",
}
"""Rules that no interleaving was found to miss → why, or how far that was looked for."""

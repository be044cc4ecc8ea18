"""Several nodes, one run: whose local log speaks for it, and which snapshots are whole on the local tier.

Between the nodes' logs and `choose`. The failures it exists for: a node that was away comes back with snapshots of a future that the run
has left, and they are taken for newer ones; a snapshot that only some nodes have committed is restored there, and another one elsewhere
(I14).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tieredckpt.errors import NotFoundError, StoreError
from tieredckpt.format.records import CommitRecord
from tieredckpt.model.ids import is_root_id, original_of
from tieredckpt.plan.choose import MAX_CONTINUED, Choice, PassedOver, Rejected, Wanted, choose, continues_for_open
from tieredckpt.plan.lineage import current_line
from tieredckpt.plan.log_state import LogState, find_head


def deciding_node(logs: Mapping[str, LogState], remote: LogState | None, *, bucket: bool = True) -> str:
    """The node (by id) whose log speaks for all nodes that are here: it has seen the last session of each of the others.

    And been part of the last one that went on from something, or of a later one (`_knows_last_resume`): a session that only opened leads
    nowhere. Where none has, the bucket's log knows who came last: the node that was part of the session which opened there latest; what
    it has done since without the bucket continues that one. With the bucket out of reach (None) nobody knows, nor where the nodes have
    parted since: StoreError, which shows what each node has. Without a `bucket` sessions that only opened are left out. `logs`: at
    least one; of equals, the first.
    """
    all_along = [node for node, log in logs.items() if all(other.opens.keys() <= log.opens.keys() for other in logs.values())]
    lately = [
        node for node, log in logs.items() if all(other.newest is None or other.newest in log.opens for other in logs.values())
    ]
    others = [] if bucket else list(logs)
    for node in (*all_along, *lately, *others):  # rather one that has been there all along: it can say more
        if all(_knows_last_resume(logs[node], other) for other in logs.values()):
            return node
    if remote is not None:
        order = {session: number for number, session in enumerate(remote.opens)}
        last = {
            node: max((order[session] for session in log.opens if session in order), default=-1) for node, log in logs.items()
        }
        found = [node for node, position in last.items() if position == max(last.values()) >= 0]
        if len(found) == 1:
            return found[0]
    names = _Names(logs, remote)
    listed = "; ".join(f"{names.of([node])} has seen {_last_sessions(log)}" for node, log in logs.items())
    raise StoreError(
        f"the nodes of this job have been part of different sessions of the run, and no one of all: {listed}. Which of them went on last, "
        "only the bucket knows: try again when it is in reach, or start without the nodes that were away",
        retryable=bucket and remote is None,
    )


def _knows_last_resume(log: LogState, other: LogState) -> bool:
    """Has this node gone on in the session in which the other one went on last, or in a later one that the other has opened, too?

    The latter is all that is left where a job died while its leaders wrote down what it goes on from, and some had not: from where
    the other node had got to was known when that was decided.
    """
    last = other.last_resume
    if last is None or last.session in log.resumes:
        return True
    return any(opened.seq > last.seq and session in log.resumes for session, opened in other.opens.items())


def whole_on_nodes(decider: str, logs: Mapping[str, LogState]) -> LogState:
    """The log of the node `decider`, with those snapshots alone that every node which saved them has live, and is here.

    Also of nodes that are not the decider, where it knows of the snapshot: it may have come later. All nodes have named the same record:
    one under the same id with another manifest is not the same snapshot.
    """
    own = logs[decider]
    live = {name: record for name, record in own.live.items() if _is_whole(name, record, logs)}
    committed_as = dict(own.committed_as)
    for log in logs.values():
        for name, record in log.live.items():
            if name in own.ancestry and not own.known(name) and name not in live and _is_whole(name, record, logs):
                live[name] = record
                committed_as[original_of(name)] = name
    return replace(own, live=live, committed_as=committed_as, head=find_head(own.tip, own.ancestry, committed_as, live))


def incomplete(decider: str, logs: Mapping[str, LogState], remote: LogState | None = None) -> dict[str, str]:
    """Snapshots that are live on some of the nodes and not whole, with the reason for people. `remote`: may know names of nodes."""
    whole, names = whole_on_nodes(decider, logs).live, _Names(logs, remote)
    reasons: dict[str, str] = {}
    for log in logs.values():
        for name, record in log.live.items():
            if name in whole or name in reasons:
                continue
            absent = [node for node in record.nodes if node not in logs]
            lacking = [node for node in record.nodes if node in logs and name not in logs[node].live]
            reasons[name] = _why(names, absent, lacking)
    return reasons


def choose_for_all(
    decider: str, logs: Mapping[str, LogState], remote: LogState | None, wanted: Wanted, *, offline: bool
) -> Choice:
    """As `choose`, by the log of the node `decider`: a snapshot counts as local where the nodes of `logs` have all of it.

    NotFoundError too where the run has got somewhere, and nobody who is here knows how far: that is no fresh start.
    """
    there = None if offline else remote
    parts = {name: why for name, why in incomplete(decider, logs, remote).items() if there is None or there.live_as(name) is None}
    if wanted.snapshot in parts:
        raise NotFoundError(f"snapshot {wanted.snapshot} is not there as a whole: {parts[wanted.snapshot]}")
    choice = choose(remote, whole_on_nodes(decider, logs), wanted, offline=offline)
    if choice.candidate is None:
        _require_nothing_lost(decider, logs, parts)
        if there is None:
            _require_what_was_resumed(logs[decider])
    return Choice(choice.candidates, (*choice.rejected, *(Rejected(name, PassedOver.INCOMPLETE, parts[name]) for name in parts)))


def _require_nothing_lost(decider: str, logs: Mapping[str, LogState], parts: Mapping[str, str]) -> None:
    """A save that a node which is here has never committed was never whole: nothing is lost with it."""
    own = logs[decider]
    for name in current_line(own):
        here = [logs[node] for node in own.live[name].nodes if node in logs]
        if name in parts and all(log.known(name) for log in here):
            raise NotFoundError(
                f"there is no snapshot to go on from, and there was one: {name}; {parts[name]}. Start with the nodes that have saved "
                'it; to begin anew: start="fresh"'
            )


def _require_what_was_resumed(log: LogState) -> None:
    """A node that was away when it was saved may have gone on from a snapshot that others have."""
    target = None if log.last_resume is None else log.last_resume.target
    if target is not None and not is_root_id(target):
        raise NotFoundError(
            f"there is no snapshot to go on from, and there was one: the run has gone on from {target}, which is not here. Start with the "
            'nodes, or the bucket, that have it; to begin anew: start="fresh"'
        )


def continues_for_all(logs: Mapping[str, LogState], remote: LogState | None) -> tuple[str, ...]:
    """The sessions that one of all these nodes takes over from: what one on each of them would name, newest first, each once.

    At most MAX_CONTINUED in all. Each node's newest comes before the older ones, so that every log admits the session.
    """
    chains = [continues_for_open(log, remote) for log in logs.values()] or [continues_for_open(None, remote)]
    firsts = [log.newest for log in logs.values() if log.newest is not None]
    known = [] if remote is None or remote.newest is None else [remote.newest]
    ordered = dict.fromkeys((*known, *firsts, *(name for chain in chains for name in chain)))
    return tuple(ordered)[:MAX_CONTINUED]


def _is_whole(snapshot: str, record: CommitRecord, logs: Mapping[str, LogState]) -> bool:
    """`record`: of a node that is here. What one node has saved, or has got from the bucket, lies there alone."""
    if len(record.nodes) < 2:
        return True
    found = [logs[node].live.get(snapshot) if node in logs else None for node in record.nodes]
    return all(one is not None and one.manifest_digest == record.manifest_digest for one in found)


class _Names:
    """What users call the nodes, as far as a log knows: each has its own sessions, the bucket's those that began on its node."""

    def __init__(self, logs: Mapping[str, LogState], remote: LogState | None) -> None:
        states = (*([] if remote is None else [remote]), *logs.values())
        self._of = {record.node: record.node_name for state in states for record in state.opens.values() if record.node_name}

    def of(self, nodes: list[str]) -> str:
        """For people, with ids: two nodes may have one name, and not all have one."""
        shown = (f"{self._of[node]} ({node})" if node in self._of else node for node in nodes)
        return f"node{'s' * (len(nodes) > 1)} {', '.join(shown)}"


def _why(names: _Names, absent: list[str], lacking: list[str]) -> str:
    parts = []
    if absent:
        parts.append(f"{names.of(absent)}, which saved a part of it, {_verb(absent, 'is', 'are')} not here")
    if lacking:
        has = _verb(lacking, "has", "have")
        parts.append(f"{names.of(lacking)} {has} not committed it, or no longer {has} it")
    return " and ".join(parts) or "it is of a lineage that this node left, or of another save under the same id"


def _verb(nodes: list[str], one: str, many: str) -> str:
    return one if len(nodes) == 1 else many


def _last_sessions(log: LogState) -> str:
    sessions = list(log.opens)
    return f"{len(sessions)} sessions, the last one {sessions[-1]}" if sessions else "no session"

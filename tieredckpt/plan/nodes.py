"""Several nodes, one run: whose local log speaks for it, and which snapshots are whole on the local tier.

Between the nodes' logs and `choose`. The failures it exists for: a node that was away comes back with snapshots of a future that the run
has left, and they are taken for newer ones; a snapshot that only some nodes have committed is restored there, and another one elsewhere
(I14).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tieredckpt.errors import StoreError
from tieredckpt.plan.choose import MAX_CONTINUED, continues_for_open
from tieredckpt.plan.lineage import current_line
from tieredckpt.plan.log_state import LogState, find_head


def deciding_node(logs: Mapping[str, LogState], remote: LogState | None) -> str:
    """The node (by id) whose log speaks for all nodes that are here: it has seen every session of the others.

    Where none has, the bucket's log knows who came last: the node whose newest session opened there latest. With the bucket out of reach,
    or without one (None), nobody knows: StoreError, which shows what each node has. `logs`: at least one; of equals, the first.
    """
    for node, log in logs.items():
        if all(other.opens.keys() <= log.opens.keys() for other in logs.values()):
            return node
    if remote is not None:
        order = {session: number for number, session in enumerate(remote.opens)}
        found = [(order[log.newest], node) for node, log in logs.items() if log.newest in order]
        if found:
            return max(found, key=lambda item: item[0])[1]
    listed = "; ".join(f"node {node} has seen {_last_sessions(log)}" for node, log in logs.items())
    raise StoreError(
        f"the nodes of this job have been part of different sessions of the run, and no one of all: {listed}. Which of them went on last, "
        "only the bucket knows: try again when it is in reach, or start without the nodes that were away",
        retryable=remote is None,
    )


def whole_on_nodes(decider: str, logs: Mapping[str, LogState]) -> LogState:
    """The log of the node `decider`, with those snapshots alone that every node which saved them has live, and is here.

    All nodes have named the same record: one under the same id with another manifest is not the same snapshot.
    """
    own = logs[decider]
    live = {name: record for name, record in own.live.items() if _is_whole(name, record.manifest_digest, record.nodes, logs)}
    return replace(own, live=live, head=find_head(own.tip, own.ancestry, own.committed_as, live))


def incomplete(decider: str, logs: Mapping[str, LogState]) -> dict[str, str]:
    """Snapshots that are live on some of the nodes and not whole, with the reason for people."""
    whole = whole_on_nodes(decider, logs).live
    reasons: dict[str, str] = {}
    for log in logs.values():
        for name, record in log.live.items():
            if name in whole or name in reasons:
                continue
            absent = [node for node in record.nodes if node not in logs]
            lacking = [node for node in record.nodes if node in logs and name not in logs[node].live]
            reasons[name] = _why(absent, lacking)
    return reasons


def lost_parts(decider: str, logs: Mapping[str, LogState]) -> tuple[str, ...]:
    """Snapshots of the current lineage of the node `decider`, newest first, that are not whole because a part of them is lost.

    Its node is not here, or no longer has it. One that a node which is here has never committed was never whole: nobody was told of it.
    """
    own = logs[decider]
    return tuple(name for name in current_line(own) if _is_lost(name, own.live[name].nodes, logs))


def continues_for_all(logs: Mapping[str, LogState], remote: LogState | None) -> tuple[str, ...]:
    """The sessions that one of all these nodes takes over from: what one on each of them would name, newest first, each once.

    At most MAX_CONTINUED in all. Each node's newest comes before the older ones, so that every log admits the session.
    """
    chains = [continues_for_open(log, remote) for log in logs.values()] or [continues_for_open(None, remote)]
    firsts = [log.newest for log in logs.values() if log.newest is not None]
    known = [] if remote is None or remote.newest is None else [remote.newest]
    ordered = dict.fromkeys((*known, *firsts, *(name for chain in chains for name in chain)))
    return tuple(ordered)[:MAX_CONTINUED]


def _is_whole(snapshot: str, digest: str, nodes: Iterable[str], logs: Mapping[str, LogState]) -> bool:
    records = [logs[node].live.get(snapshot) if node in logs else None for node in nodes]
    return all(record is not None and record.manifest_digest == digest for record in records)


def _is_lost(snapshot: str, nodes: Sequence[str], logs: Mapping[str, LogState]) -> bool:
    present = [logs[node] for node in nodes if node in logs]
    if not all(log.known(snapshot) for log in present):
        return False
    return len(present) < len(nodes) or any(log.live_as(snapshot) is None for log in present)


def _why(absent: list[str], lacking: list[str]) -> str:
    parts = []
    if absent:
        parts.append(f"node {', '.join(absent)}, which saved a part of it, is not here")
    if lacking:
        parts.append(f"node {', '.join(lacking)} has not committed it, or no longer has it")
    return " and ".join(parts) or "it is of a lineage that this node left, or of another save under the same id"


def _last_sessions(log: LogState) -> str:
    sessions = list(log.opens)
    return f"{len(sessions)} sessions, the last one {sessions[-1]}" if sessions else "no session"

"""How the ranks of a job open their tiers together: one run, one session id, and who shares a node with whom.

Before anything else that many ranks do. The failure it exists for: ranks that each make up what they should have in common write into
different runs, or fence each other (C16). The coordinator alone looks at the bucket, and tells; each leader makes the local tier of its
node. Whatever is wrong with the arguments of one rank is told to all, instead of leaving the others waiting for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from tieredckpt.engine.council import Council, Decision
from tieredckpt.engine.ranks import Ranks
from tieredckpt.engine.tier import OpenTier, RemoteLink, TierOpener, read_run
from tieredckpt.errors import UsageError
from tieredckpt.plan.agreement import ranks_text, values_text
from tieredckpt.store.base import ObjectStore

_log = logging.getLogger(__name__)

_TOPIC = "open-tiers"


class _Here(msgspec.Struct, frozen=True):
    """What one rank finds. `run`, `node`: of its local root; `remote`: where its bucket is; `like`: options that must be the same."""

    local: bool
    run: str | None
    node: str
    remote: str | None
    like: dict[str, str]


class _Common(msgspec.Struct, frozen=True):
    """What all go by. `online`: the bucket is in reach; `unfenced`: it has no create-if-absent, and that is accepted."""

    run: str
    session: str
    nodes: dict[str, tuple[int, ...]]
    online: bool = False
    unfenced: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """The tiers of one rank. `session`: the id of the session that all ranks are."""

    ranks: Ranks
    run: str
    session: str
    local: OpenTier | None
    link: RemoteLink | None


Stores = tuple[ObjectStore | None, ObjectStore | None]


@dataclass(slots=True)
class Rendezvous:
    """Of one rank. `like` gives what else must be the same everywhere, by the name that users know."""

    council: Council
    opener: TierOpener
    like: Callable[[], Mapping[str, str]]

    def open(self, stores: Callable[[], Stores]) -> Opened:
        """`stores()` gives the local and the remote store. Called by all ranks.

        UsageError where they cannot belong to one job; StoreError if the bucket is out of reach, and no node has a run to go on with.
        """
        found: list[ObjectStore | None] = []
        remote_tier: list[OpenTier] = []

        def mine() -> bytes:
            found.extend(stores())
            return _encode(self._look(found[0], found[1]))

        def decide(said: Mapping[int, bytes]) -> Decision:
            here = {rank: msgspec.msgpack.decode(data, type=_Here) for rank, data in said.items()}
            _check_alike(here)
            common, tier = self._open_remote(here, found[0], found[1])
            remote_tier.extend([tier] if tier is not None else [])
            return Decision(_encode(common))

        common = msgspec.msgpack.decode(self.council.exchange(_TOPIC, mine, decide).common, type=_Common)
        local_store, remote_store = found
        node = next(name for name, ranks in common.nodes.items() if self.council.rank in ranks)
        ranks = Ranks(self.council, common.nodes, node)
        tier = remote_tier[0] if remote_tier else None
        if tier is None and remote_store is not None and common.online:
            tier = self.opener.vouched(remote_store, common.run, unfenced=common.unfenced)
        link = None if remote_store is None else RemoteLink(remote_store, self.opener, common.run, tier, local_store)
        local = self._open_local(ranks, common.run, local_store, tier)
        return Opened(ranks, common.run, common.session, local, link)

    def _look(self, local: ObjectStore | None, remote: ObjectStore | None) -> _Here:
        run = None if local is None else read_run(local)
        node = "" if local is None else self.opener.node_of(local)
        return _Here(local is not None, run, node, None if remote is None else remote.label, dict(self.like()))

    def _open_remote(
        self, here: Mapping[int, _Here], local: ObjectStore | None, remote: ObjectStore | None
    ) -> tuple[_Common, OpenTier | None]:
        """On the coordinator: which run it is, and the bucket, if it answers."""
        local_run = next((one.run for one in here.values() if one.run is not None), None)
        tier = None if remote is None else self.opener.open_remote(remote, local, local_run)
        run = tier.run if tier is not None else local_run or self.opener.env.new_ulid()
        if local_run is not None and run != local_run:
            raise UsageError(
                f"the local tiers belong to run {local_run}, {remote.label if remote else ''} to run {run}. Give the run new local "
                "directories or a new prefix, or point both at the same run."
            )
        nodes: dict[str, tuple[int, ...]] = {}
        for rank in sorted(here):
            name = here[rank].node
            nodes[name] = (*nodes.get(name, ()), rank)
        if len(nodes) > 1:  # a wrong directory on one rank is a node more
            _log.info("%d ranks on %d nodes: %s", len(here), len(nodes), "; ".join(map(ranks_text, nodes.values())))
        session = self.opener.env.new_ulid()
        unfenced = tier is not None and tier.unfenced
        return _Common(run, session, nodes, online=tier is not None, unfenced=unfenced), tier

    def _open_local(self, ranks: Ranks, run: str, store: ObjectStore | None, remote: OpenTier | None) -> OpenTier | None:
        """The leader makes it, and mends its log; the others of the node open what is there then."""
        made: list[OpenTier] = []

        def mine() -> bytes:
            if store is not None and ranks.is_leader:
                made.append(self.opener.open_local(store, run, remote))
            return b""

        self.council.exchange(f"{_TOPIC}/local", mine, lambda _: Decision())
        if store is None:
            return None
        return made[0] if made else self.opener.local_beside(store, run, ranks.node)


def _check_alike(here: Mapping[int, _Here]) -> None:
    """UsageError, with all that differs."""
    spoken = {
        "local tier": {rank: "a directory" if one.local else "none" for rank, one in here.items()},
        "remote tier": {rank: one.remote or "none" for rank, one in here.items()},
        "run of the local tier": {rank: one.run for rank, one in here.items() if one.run is not None},
    }
    for name in dict.fromkeys(name for one in here.values() for name in one.like):
        spoken[name] = {rank: one.like.get(name, "nothing") for rank, one in here.items()}
    wrong = []
    for what, of_rank in spoken.items():
        values: dict[str, list[int]] = {}
        for rank, value in of_rank.items():
            values.setdefault(value, []).append(rank)
        if len(values) > 1:
            wrong.append(f"{what}: {values_text(values)}")
    if wrong:
        raise UsageError("the ranks of this job have been told different things:\n  " + "\n  ".join(wrong))


_encode = msgspec.msgpack.Encoder().encode

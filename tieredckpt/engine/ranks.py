"""Who is who in a job of many ranks: which ranks share a node, which of them leads it, and through what they agree.

A *node* is a local root. Its *leader*, the lowest of its ranks, owns its log, its uploader and its collector: two processes that
uploaded the same packs would do everything twice. Rank 0 is the *coordinator* too. Without a local tier rank 0 leads all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tieredckpt.engine.council import COORDINATOR, Council


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of a job, as one of them sees them. `nodes`: node id → its ranks, ascending; "" is the node of all without a local tier."""

    council: Council
    nodes: Mapping[str, tuple[int, ...]]
    node: str

    @property
    def rank(self) -> int:
        return self.council.rank

    @property
    def size(self) -> int:
        return self.council.size

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.nodes[self.node]

    @property
    def is_coordinator(self) -> bool:
        return self.rank == COORDINATOR

    @property
    def is_leader(self) -> bool:
        return self.rank == self.here[0]

    @property
    def leaders(self) -> dict[str, int]:
        """Node → the rank that leads it, in the order of these ranks."""
        return {node: ranks[0] for node, ranks in sorted(self.nodes.items(), key=lambda item: item[1][0])}

"""A snapshot of several ranks in memory: what each has captured, as JSON; and all of it together, by the plans of a real save.

What `unite` goes through raises where ranks contradict each other, where their boxes do not tile a leaf, and where replicas differ.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from tieredckpt.format.manifest import Manifest
from tieredckpt.format.tree_json import decode_tree, encode_tree
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.assign import Held, assign, compare_replicas
from tieredckpt.plan.merge import Described, merge
from tieredckpt.plan.reading import LandedPiece
from tieredckpt.pytorch.capture import capture
from tieredckpt.pytorch.load import load
from tieredckpt.pytorch.match import Match, match

Description = dict[str, Any]
MODEL, OPTIMIZER = "model", "optimizer"


def describe(state: dict[str, Any], rank: int, ranks: int) -> Description:
    """What one rank has: its tree, its leaves, and for each leaf that is no alias the boxes that it holds, with their bytes in hex."""
    captured = capture(state, rank, ranks)
    content = captured.content
    held = {}
    for index, parts in enumerate(captured.sources):
        if parts is not None:
            assert index not in content.held or content.held[index] == tuple(part.box for part in parts)
            held[str(index)] = [[part.box.offset, part.box.shape, _raw(part.values).hex()] for part in parts]
    return {
        "tree": bytes(encode_tree(content.tree)).decode(),
        "leaves": msgspec.to_builtins(content.leaves),
        "held": held,
        "consistency": content.consistency,
    }


def gathered(description: Description) -> list[Description]:
    """The descriptions of all ranks, on every rank."""
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, description)
    return everything


@dataclass(frozen=True)
class Snapshot:
    """holders: path → how many ranks hold each of its boxes, ascending. `landed`: each box once, from the rank that would write it."""

    manifest: Manifest
    tree: Any
    landed: dict[int, tuple[LandedPiece, ...]]
    holders: dict[str, list[int]]

    def restore(self, target: object, **options: Any) -> Match:
        """Match and load, with nothing but the pieces that are wanted. Fails with the differences."""
        found = match(target, self.manifest, self.tree, **options)
        assert not found.differences, found.summary()
        load(found, {index: self.landed[index] for index in found.wanted})
        return found


def unite(descriptions: list[Description]) -> Snapshot:
    """The snapshot that these ranks would make together. MismatchError where they would make none."""
    places = {"modules": frozenset({(MODEL,)}), "optimizers": frozenset({(OPTIMIZER,)})}
    own_leaves = [msgspec.convert(one["leaves"], tuple[Leaf, ...]) for one in descriptions]
    trees = [decode_tree(one["tree"].encode()) for one in descriptions]
    merged = merge([Described((rank,), tree, own_leaves[rank], **places) for rank, tree in enumerate(trees)])
    held: dict[int, list[Held]] = {}
    raw: dict[int, list[bytes]] = {}
    for rank, one in enumerate(descriptions):
        boxes = [
            (Held(merged.numbers[rank][int(index)], tuple(offset), tuple(shape)), bytes.fromhex(text))
            for index, parts in one["held"].items()
            for offset, shape, text in parts
            if 0 not in shape
        ]
        held[rank], raw[rank] = [box for box, _ in boxes], [data for _, data in boxes]
    assignment = assign(merged.leaves, held)
    digests = {rank: [hashlib.sha256(data).hexdigest() for data in own] for rank, own in raw.items()}
    compare_replicas(merged.leaves, held, assignment, digests)
    landed: dict[int, list[LandedPiece]] = {index: [] for index in range(len(merged.leaves))}
    for rank, positions in assignment.writes.items():
        for position in positions:
            box = held[rank][position]
            leaf, offset, shape = box.leaf, box.offset, box.shape
            landed[leaf].append(LandedPiece(Box(offset, shape), memoryview(bytearray(raw[rank][position]))))
    count = Counter(box for own in held.values() for box in own)
    holders = {leaf.path: sorted(n for box, n in count.items() if box.leaf == i) for i, leaf in enumerate(merged.leaves)}
    manifest = _manifest(bytes(encode_tree(merged.tree)), merged.leaves)
    return Snapshot(manifest, merged.tree, {index: tuple(pieces) for index, pieces in landed.items()}, holders)


def _manifest(tree: bytes, leaves: tuple[Leaf, ...]) -> Manifest:
    return Manifest(
        run="01ARZ3NDEKTSV4RRFFQ69G5FAV",
        snapshot="000000000001-01ARZ3NDEKTSV4RRFFQ69G5FAV-000001",
        step=1,
        session="01ARZ3NDEKTSV4RRFFQ69G5FAV",
        created_at="2026-01-01T00:00:00Z",
        library="0.1.0",
        predecessor="fresh",
        components=(),
        consistency={},
        environment={},
        tree=tree,
        leaves=leaves,
        pieces=(),
    )


def _raw(values: Any) -> bytes:
    return bytes(values.detach().contiguous().reshape(-1).view(torch.uint8).numpy())

"""Content: what capture found in the training state, without tensors. The neutral half of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tieredckpt.format.manifest import Component
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Node


@dataclass(frozen=True, slots=True)
class Content:
    """One state tree, described.

    tree         neutral tree of `model.tree`, with `LeafRef(i)` where `leaves[i]` stands
    leaves       in the order of first appearance; an alias comes after the leaf it is an alias of
    components   named top-level parts of a TrainState; empty for a plain tree
    consistency  counters that must agree at this step (optimizer step, scheduler step, …)
    versions     ids given by the user; environment: versions of python, torch, numpy, CUDA
    """

    tree: Node
    leaves: tuple[Leaf, ...]
    components: tuple[Component, ...] = ()
    consistency: Mapping[str, int | float | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

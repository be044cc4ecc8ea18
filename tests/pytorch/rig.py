"""A snapshot in memory: capture → layout → staging memory → (nothing in between) → match → load.

Staging memory begins dirty, as it is when it is used again. What the engine does between staging and landing moves bytes only,
so this is the whole path of a value through `pytorch/`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from tieredckpt.format.manifest import Manifest, Piece
from tieredckpt.format.tree_json import decode_tree, encode_tree
from tieredckpt.model.tree import Path
from tieredckpt.plan.layout import SaveLayout, lay_out
from tieredckpt.plan.merge import Described, merge
from tieredckpt.plan.reading import LandedPiece, LandedPieces
from tieredckpt.pytorch.capture import Captured, capture
from tieredckpt.pytorch.load import load
from tieredckpt.pytorch.match import Match, match
from tieredckpt.pytorch.objects import find_modules, is_optimizer
from tieredckpt.pytorch.stage import copy_out
from tieredckpt.pytorch.train_state import TrainState
from tieredckpt.pytorch.whole import select, wanted_leaves, whole_tree
from tieredckpt.settings import PAGE_BYTES, Settings

SMALL = Settings(piece_bytes=PAGE_BYTES)
"""Pieces of one page, so that small tensors have several."""


@dataclass(frozen=True)
class Stored:
    """What a snapshot has, with its pieces in memory."""

    captured: Captured
    layout: SaveLayout
    arena: memoryview
    manifest: Manifest
    tree: Any

    @property
    def landed(self) -> LandedPieces:
        landed: dict[int, list[LandedPiece]] = {}
        for piece in self.layout.pieces:
            landed.setdefault(piece.leaf, []).append(LandedPiece(piece.box, self.arena[piece.slot : piece.slot + piece.nbytes]))
        return {leaf: tuple(pieces) for leaf, pieces in landed.items()}

    def match(self, target: object, **options: Any) -> Match:
        return match(target, self.manifest, self.tree, **options)

    def restore(self, target: object, **options: Any) -> Any:
        """Match and load only what the match wants."""
        found = self.match(target, **options)
        return load(found, {index: pieces for index, pieces in self.landed.items() if index in found.wanted})

    def whole(self, keys: tuple[str, ...] | None = None) -> Any:
        tree = self.tree if keys is None else select(self.tree, keys)
        wanted = wanted_leaves(tree, self.manifest.leaves)
        return whole_tree(tree, self.manifest.leaves, {i: pieces for i, pieces in self.landed.items() if i in wanted})

    def differences(self, target: object, **options: Any) -> list[str]:
        return [str(difference) for difference in self.match(target, **options).differences]

    def with_manifest(self, **changes: Any) -> Stored:
        return replace(self, manifest=msgspec.structs.replace(self.manifest, **changes))


def store(state: object, settings: Settings = SMALL) -> Stored:
    """Capture and stage a state into memory that holds the remains of an earlier save."""
    return stage(capture(state), settings)


def store_ranks(*states: object) -> Stored:
    """A snapshot of a job with as many ranks: what they have together, and of each rank what it has of its own."""
    captures = [capture(state, rank, len(states)) for rank, state in enumerate(states)]
    merged = merge([_described(rank, captures[rank], state) for rank, state in enumerate(states)])
    sources: list[Any] = [None] * len(merged.leaves)
    for captured, numbers in zip(captures, merged.numbers, strict=True):
        for index, number in enumerate(numbers):
            origin = captured.content.leaves[index].alias_of
            if sources[number] is None and merged.leaves[number].alias_of < 0:
                sources[number] = captured.sources[origin if origin >= 0 else index]
    content = replace(captures[0].content, tree=merged.tree, leaves=merged.leaves)
    return stage(Captured(content, tuple(sources)))


def _described(rank: int, captured: Captured, state: object) -> Described:
    parts = state.components if isinstance(state, TrainState) else state
    modules = frozenset(path for path, _ in find_modules(parts))
    return Described((rank,), captured.content.tree, captured.content.leaves, modules, frozenset(_optimizers(parts, ())))


def _optimizers(value: object, path: Path) -> Iterator[Path]:
    if is_optimizer(value):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _optimizers(item, (*path, key))


def stage(captured: Captured, settings: Settings = SMALL) -> Stored:
    """The snapshot of what was captured."""
    content = captured.content
    layout = lay_out(content.leaves, settings)
    memory = mmap.mmap(-1, layout.arena_bytes + PAGE_BYTES)
    arena = memoryview(memory)
    arena[:] = b"\xa5" * len(arena)
    with ThreadPoolExecutor(2) as executor:
        copy_out(captured, layout, arena, executor)
    raw = encode_tree(content.tree)
    pieces = tuple(
        Piece(p.leaf, p.box.offset, p.box.shape, 0, p.slot, p.nbytes, "0" * 16, "blake3:" + "0" * 64) for p in layout.pieces
    )
    manifest = Manifest(
        run="01ARZ3NDEKTSV4RRFFQ69G5FAV",
        snapshot="000000000001-01ARZ3NDEKTSV4RRFFQ69G5FAV-000001",
        step=1,
        session="01ARZ3NDEKTSV4RRFFQ69G5FAV",
        created_at="2026-01-01T00:00:00Z",
        library="0.1.0",
        predecessor="fresh",
        components=content.components,
        consistency=dict(content.consistency),
        environment=dict(content.environment),
        tree=raw,
        leaves=content.leaves,
        pieces=pieces,
    )
    return Stored(captured, layout, arena, manifest, decode_tree(raw))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bits, NaN and -0.0 included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)

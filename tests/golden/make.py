"""How the golden files were made: `python -m tests.golden.make DIRECTORY`. See the package's docstring before you run it.

Two lives of a run: the first saves in full, a tool collects the oldest snapshot, pins and unpins; the second restores and saves
incrementally. What the files must restore to is computed from the state, beside the library.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import tieredckpt as tc
from tests.golden.state import state_of
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.tree import LeafRef, TorchDevice, TorchDtype, TorchSize, format_path

_KEEP_ALL = tc.Retention(local=tc.KeepAll(), remote=tc.KeepAll())
_SMALL = tc.Settings(pack_bytes=65536, piece_bytes=65536, codec="zstd")
"""The weight is cut into a piece that is worth compressing and one that is not."""


def main(root: Path) -> None:
    run = root / "v1"
    places = (run / "local", f"file://{run}/remote")
    with tc.Checkpointer(*places, retention=_KEEP_ALL, node="golden", settings=_SMALL) as ckpt:
        ckpt.restore(state_of(0))
        for step in (10, 20):
            ckpt.save(step, state_of(step), blocking=True, metrics={"loss": 1 / step, "odd": float("nan")}, tags=["golden"])
    for place in places:
        with tc.Tier.open(place) as tier:
            kept = tc.Retention(local=tc.KeepLast(1), remote=tc.KeepLast(1))
            with tc.Tier.open(places[1]) as remote:
                tier.gc(tier.plan_gc(kept, remote if tier.name == "local" else None))
            newest = tier.find().snapshot_id
            tier.pin(newest, "golden")
            tier.unpin(newest)
    with tc.Checkpointer(*places, retention=_KEEP_ALL, node="golden", incremental=tc.Incremental(), settings=_SMALL) as ckpt:
        ckpt.restore(state_of(0))
        ckpt.save(30, state_of(30), blocking=True)
    for name in ("tmp", "probe"):
        for tier_root in (run / "local", run / "remote"):
            shutil.rmtree(tier_root / name, ignore_errors=True)
    expected = {str(step): expected_of(state_of(step)) for step in (20, 30)}
    (run / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def expected_of(state: object) -> dict[str, dict[str, str]]:
    """What a snapshot of `state` has to restore to, as `expected.json` has it."""
    leaves: dict[str, str] = {}
    neutral = _neutral(state, (), leaves)
    return {"leaves": leaves, "tree": {"json": bytes(encode_tree(neutral)).decode()}}


def _neutral(node: object, path: tuple[object, ...], leaves: dict[str, str]) -> object:
    """The tree as it is stored, and on the way the digest of each leaf."""
    match node:
        case torch.Size():
            return TorchSize(tuple(node))
        case torch.dtype():
            return TorchDtype(str(node).removeprefix("torch."))
        case torch.device():
            return TorchDevice(str(node))
        case torch.Tensor() | np.ndarray():
            leaves[format_path(path)] = " ".join(_described(node))
            return LeafRef(len(leaves) - 1)
        case dict():
            members = {key: _neutral(value, (*path, key), leaves) for key, value in node.items()}
            return type(node)(members)
        case list() | tuple():
            return type(node)(_neutral(value, (*path, index), leaves) for index, value in enumerate(node))
        case _:
            return node


def _described(leaf: torch.Tensor | np.ndarray) -> Iterator[str]:
    raw = leaf.contiguous().reshape(-1).view(torch.uint8).numpy() if isinstance(leaf, torch.Tensor) else leaf
    yield str(leaf.dtype).removeprefix("torch.")
    yield "x".join(map(str, leaf.shape)) or "scalar"
    yield hashlib.sha256(raw.tobytes()).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

"""Packs are plain safetensors files: other tools open every one of them, and the pieces put together are the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file as load_torch

import tieredckpt as tc
from tests.pytorch.rig import same_bits
from tieredckpt.format.tree_json import decode_tree
from tieredckpt.pytorch.values import DTYPES
from tieredckpt.settings import Settings

SMALL = Settings(pack_bytes=16384, piece_bytes=4096)


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    tensors: dict[str, Any] = {
        str(dtype).removeprefix("torch."): torch.randint(0, 2, (37, 5)).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
    }
    tensors |= {
        "complex128": torch.randn(40, 3, dtype=torch.complex128),
        "large": torch.randn(70, 300),
        "transposed": torch.randn(60, 90).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "array": np.arange(3000, dtype=np.int32).reshape(30, 100),
        "__pad.0": torch.randn(3),
        'a/b"c': torch.randn(4),
    }
    return tensors


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packs") / "run"
    with tc.Checkpointer(root, state=state(), settings=SMALL) as ckpt:
        ckpt.save(1, blocking=True)
    return root


def test_every_pack_opens_with_safetensors(root: Path) -> None:
    packs = sorted((root / "data").rglob("*.safetensors"))
    assert len(packs) > 5
    manifest = tc.Tier.open(root).manifest(tc.Tier.open(root).snapshots()[0].snapshot_id)
    assert {str(pack.relative_to(root)) for pack in packs} == {pack.key for pack in manifest.packs}
    for pack in packs:
        found = load_torch(pack)
        with safe_open(pack, "pt") as opened:  # type: ignore[no-untyped-call]
            assert set(opened.keys()) == set(found)
        padding = [tensor for name, tensor in found.items() if name.startswith("__pad.")]
        assert all(not tensor.any() for tensor in padding if tensor.dtype == torch.uint8)


def test_pieces_of_all_packs_by_name_are_the_tensors(root: Path) -> None:
    """By the manifest: which tensor of which pack is which box of which leaf."""
    tier = tc.Tier.open(root)
    manifest = tier.manifest(tier.snapshots()[0].snapshot_id)
    rebuilt = {leaf.path: torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype]) for leaf in manifest.leaves}
    by_start = [_tensors_by_start(root / pack.key) for pack in manifest.packs]
    for piece in manifest.pieces:
        leaf = manifest.leaves[piece.leaf]
        tensor = by_start[piece.pack][piece.start]
        box = tuple(slice(at, at + extent) for at, extent in zip(piece.offset, piece.shape, strict=True))
        rebuilt[leaf.path][box] = tensor.reshape(-1).view(torch.uint8).view(DTYPES[leaf.dtype]).view(piece.shape)
    names = decode_tree(manifest.tree)
    assert isinstance(names, dict)
    original = {manifest.leaves[names[key].index].path: value for key, value in state().items()}  # type: ignore[union-attr]
    assert original.keys() == rebuilt.keys()
    for path, value in original.items():
        expected = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        assert same_bits(expected, rebuilt[path]), path


def _tensors_by_start(pack: Path) -> dict[int, torch.Tensor]:
    header_bytes = 8 + int.from_bytes(pack.read_bytes()[:8], "little")
    found = load_torch(pack)
    starts: dict[int, torch.Tensor] = {}
    position = header_bytes
    with safe_open(pack, "pt") as opened:  # type: ignore[no-untyped-call]
        for name in opened.offset_keys():
            starts[position] = found[name]
            position += found[name].nbytes
    return starts


def test_whole_pieces_are_there_by_name_for_numpy_too(tmp_path: Path) -> None:
    """A small model is one pack whose tensors have the names and values of its parameters."""
    net = torch.nn.Linear(6, 4)
    with tc.Checkpointer(tmp_path / "run", state=tc.TrainState(model=net)) as ckpt:
        ckpt.save(1, blocking=True)
    (pack,) = (tmp_path / "run" / "data").rglob("*.safetensors")
    found = {name: value for name, value in load_numpy(pack).items() if not name.startswith("__pad.")}
    assert sorted(name.partition("[")[0] for name in found) == ["model/bias", "model/weight"]
    for name, value in found.items():
        parameter = net.get_parameter(name.partition("[")[0].rpartition("/")[2])
        assert np.array_equal(value.reshape(parameter.shape), parameter.detach().numpy())

"""I13: whatever byte is damaged, and however, the live state is what it was, bit for bit, until every byte has been verified.

With real modules, an optimizer and generators as the target. Files of a snapshot are damaged at many places in turn.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tieredckpt as tc
from tieredckpt.errors import CorruptionError, FormatError
from tieredckpt.format.packs import parse_header
from tieredckpt.settings import Settings

SETTINGS = Settings(pack_bytes=8192, piece_bytes=4096)


class Job:
    """A small training job, and its state as comparable values."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.counters = {"seen": seed, "history": [seed, float(seed)]}
        self.state = tc.TrainState(model=self.model, optimizer=self.optimizer, counters=self.counters)
        self.train()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 40)).square().mean().backward()
        self.optimizer.step()

    def everything(self) -> dict[str, object]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "counters": self.counters,
                "torch": torch.get_rng_state(),
                "numpy": np.random.get_state(),
            }
        )


def same(one: object, other: object) -> bool:
    """Bit for bit, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()  # type: ignore[attr-defined]
    if isinstance(one, np.ndarray):
        return one.tobytes() == other.tobytes()  # type: ignore[attr-defined]
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)  # type: ignore[call-overload, index]
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))  # type: ignore[arg-type]
    return one == other


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local tier with one snapshot, which no test changes for good."""
    root = tmp_path_factory.mktemp("live") / "run"
    job = Job(1)
    with tc.Checkpointer(root, settings=SETTINGS, state=job.state) as ckpt:
        ckpt.save(5, blocking=True)
    return root


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    def refuse(_state: object) -> None:
        raise AssertionError("Python's generator was set")

    monkeypatch.setattr(random, "setstate", refuse)  # its state cannot be compared: threads of other tests may draw from it
    return Job(2)


def damaged_places(root: Path) -> Iterator[tuple[Path, int]]:
    """Bytes that a restore reads: of pieces, of the manifest, of every record, of the small files."""
    for path in sorted((root / "data").rglob("*.safetensors")):
        data = path.read_bytes()
        for tensor in parse_header(data, len(data)).tensors:
            if not tensor.pad:
                yield from ((path, tensor.start + at) for at in {0, tensor.nbytes // 2, tensor.nbytes - 1})
    (manifest,) = root.rglob("manifest.json.zst")
    size = manifest.stat().st_size
    yield from ((manifest, at) for at in range(0, size, size // 12))
    for path in sorted((root / "log").iterdir()):
        size = path.stat().st_size
        yield from ((path, at) for at in range(0, size, size // 6))
    yield root / "format.json", 0


def test_i13_one_flipped_byte_anywhere_that_is_read_leaves_the_live_state_alone(saved: Path, job: Job) -> None:
    before = job.everything()
    places = list(damaged_places(saved))
    assert len(places) > 60
    for path, position in places:
        original = path.read_bytes()
        path.write_bytes(original[:position] + bytes([original[position] ^ 1]) + original[position + 1 :])
        log_before = sorted((saved / "log").iterdir())
        try:
            with (
                pytest.raises(FormatError),
                tc.Checkpointer(saved, settings=SETTINGS, state=job.state) as ckpt,
            ):
                ckpt.restore(snapshot=ckpt.snapshots()[0].snapshot_id)
        finally:
            path.write_bytes(original)
            for record in set((saved / "log").iterdir()) - set(log_before):
                record.unlink()  # so that the next round finds the run as it was
        changed = [part for part, now in job.everything().items() if not same(now, before[part])]
        assert not changed, f"byte {position} of {path.name} changed {changed}"


def test_verifying_with_crc_alone_finds_a_flipped_byte_too(saved: Path, job: Job) -> None:
    before = job.everything()
    path = sorted((saved / "data").rglob("*.safetensors"))[0]
    original = path.read_bytes()
    path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    log_before = sorted((saved / "log").iterdir())
    try:
        with pytest.raises(CorruptionError), tc.Checkpointer(saved, settings=SETTINGS, state=job.state, verify="crc") as ckpt:
            ckpt.restore()
    finally:
        path.write_bytes(original)
        for record in set((saved / "log").iterdir()) - set(log_before):
            record.unlink()
    assert same(job.everything(), before)


def test_i13_a_forged_piece_with_a_matching_crc_is_found_by_its_digest(saved: Path, job: Job) -> None:
    """A crc can be made to match; eight bytes at the end of the piece are enough."""
    path = sorted((saved / "data").rglob("*.safetensors"))[0]
    original = path.read_bytes()
    tensor = next(t for t in parse_header(original, len(original)).tensors if not t.pad)
    piece = original[tensor.start : tensor.start + tensor.nbytes]
    forged = forge(piece)
    assert forged != piece
    path.write_bytes(original[: tensor.start] + forged + original[tensor.start + tensor.nbytes :])
    before = job.everything()
    log_before = sorted((saved / "log").iterdir())
    try:
        with pytest.raises(CorruptionError, match="digest"), tc.Checkpointer(saved, settings=SETTINGS, state=job.state) as ckpt:
            ckpt.restore(snapshot=ckpt.snapshots()[0].snapshot_id)
    finally:
        path.write_bytes(original)
        for record in set((saved / "log").iterdir()) - set(log_before):
            record.unlink()
    assert same(job.everything(), before)


def test_the_undamaged_snapshot_restores_every_bit(saved: Path) -> None:
    """The control: the tests above would pass if nothing could be restored at all."""
    original, target = Job(1), Job(3)
    with tc.Checkpointer(saved, settings=SETTINGS, state=target.state) as ckpt:
        assert ckpt.restore().step == 5
    assert same(target.model.state_dict(), original.model.state_dict())
    assert same(target.optimizer.state_dict(), original.optimizer.state_dict())
    assert target.counters == original.counters


def forge(piece: bytes) -> bytes:
    """Another piece with the same crc64nvme: a change at the front, made up for in the last eight bytes (crc is linear)."""
    from awscrt.checksums import crc64nvme

    changed = bytearray(piece)
    changed[0] ^= 0xFF
    wanted = crc64nvme(piece)
    zero = crc64nvme(bytes(changed[:-8]) + bytes(8))
    columns = [crc64nvme(bytes(changed[:-8]) + (1 << bit).to_bytes(8, "little")) ^ zero for bit in range(64)]
    tail = solve(columns, wanted ^ zero)
    changed[-8:] = tail.to_bytes(8, "little")
    assert crc64nvme(bytes(changed)) == wanted
    return bytes(changed)


def solve(columns: list[int], wanted: int) -> int:
    """Which columns, added without carry, give `wanted`."""
    basis: dict[int, tuple[int, int]] = {}
    for bit, column in enumerate(columns):
        value, mask = column, 1 << bit
        while value and value.bit_length() in basis:
            other, other_mask = basis[value.bit_length()]
            value, mask = value ^ other, mask ^ other_mask
        basis[value.bit_length()] = (value, mask)
    found = 0
    while wanted:
        value, mask = basis[wanted.bit_length()]
        wanted, found = wanted ^ value, found ^ mask
    return found

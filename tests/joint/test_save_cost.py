"""What a joint save may cost: a few requests to the board, and the manifest is read only where it was not made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.joint.kit import Job, Rank, sharded
from tieredckpt.engine import joint_save
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.testing.ranks import LocalRanks


@pytest.mark.parametrize(("nodes", "readers"), [(1, 0), (2, 1), (4, 3)])
def test_leaders_read_the_manifest_but_not_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, readers: int
):
    read: list[str] = []

    def counted(data: bytes, digest: str) -> Manifest:
        manifest = decode_manifest(data, digest)
        read.append(manifest.snapshot)
        return manifest

    monkeypatch.setattr(joint_save, "decode_manifest", counted)

    def act(rank: Rank) -> str:
        state = {"w": sharded(40, rank.number, 4)}
        rank.ckpt.restore(state)
        return rank.ckpt.save(10, state).local.result().snapshot_id

    saved = Job(tmp_path, ranks=4, nodes=nodes).ok(act)
    assert read == [saved[0]] * readers


def test_many_pieces_are_no_more_notes_than_few(tmp_path: Path):
    def requests(total: int) -> list[int]:
        ranks = LocalRanks(4)

        def act(rank: Rank) -> None:
            state = {f"w{n}": sharded(total, rank.number, 4) for n in range(total)}
            rank.ckpt.restore(state)
            rank.ckpt.save(10, state).local.result()

        Job(tmp_path / str(total), ranks=4, store=ranks).ok(act)
        return [ranks.puts[rank] for rank in range(4)]

    assert requests(4) == requests(64)

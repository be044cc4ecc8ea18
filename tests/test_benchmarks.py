"""The benchmark's own honesty: what it measures really happens, and a contestant that cheats is found out."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks import bench, contestants, measure
from benchmarks.contestants import CONTESTANTS, AsyncDistributedCheckpoint, Contestant, SaveTiming, TorchSave
from benchmarks.floors import Floors
from benchmarks.memory import extra_bytes_in_child
from benchmarks.report import conclusions
from benchmarks.state import drop_from_page_cache, make_state, pull_into_page_cache, spoil, state_bytes

MIB = 1 << 20
PEERS = [name for name in CONTESTANTS if not name.startswith("tieredckpt")]


def is_cached(path: Path) -> bool:
    """Whether the first page can be read without asking the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("this file system cannot say what is in the page cache")
    finally:
        os.close(descriptor)


class TestState:
    def test_it_has_the_size_and_the_number_that_the_table_says(self):
        state = make_state(50 * MIB)
        assert len(state) == 200
        assert state_bytes(state) == 50 * MIB
        assert torch.equal(state["layers.7.weight"], make_state(50 * MIB)["layers.7.weight"])

    def test_cold_is_cold_and_warm_is_warm(self, tmp_path: Path):
        path = tmp_path / "deep" / "file"
        path.parent.mkdir()
        path.write_bytes(os.urandom(MIB))
        assert is_cached(path)
        drop_from_page_cache(tmp_path)
        assert not is_cached(path)
        pull_into_page_cache(tmp_path)
        assert is_cached(path)


class TestFloors:
    def test_what_is_written_is_what_is_read(self, tmp_path: Path):
        state = make_state(70 * MIB)
        floors = Floors(state, tmp_path / "raw")
        floors.copies()["copy, torch"]()
        floors.write()
        assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == ["00000.raw", "00001.raw"]
        stored = b"".join(path.read_bytes() for path in sorted((tmp_path / "raw").iterdir()))
        assert stored[: state_bytes(state)] == b"".join(tensor.numpy().tobytes() for tensor in state.values())
        for read in (floors.read, floors.read_buffered):
            spoil(state)
            floors.copies()["copy, torch"]()
            read()
            floors.write()
            assert b"".join(path.read_bytes() for path in sorted((tmp_path / "raw").iterdir())) == stored
        floors.close()

    @pytest.mark.parametrize("name", ["copy, numpy, 1 thread", "copy, numpy, 2 threads", "copy, torch"])
    def test_every_copy_copies_everything(self, tmp_path: Path, name: str):
        state = make_state(2 * MIB)
        floors = Floors(state, tmp_path / "raw")
        floors.copies()[name]()
        floors.write()
        floors.close()
        stored = (tmp_path / "raw" / "00000.raw").read_bytes()
        assert stored[: state_bytes(state)] == b"".join(tensor.numpy().tobytes() for tensor in state.values())


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_saves_again_and_loads_the_last_state(tmp_path: Path, name: str):
    state = make_state(2 * MIB)
    peer: Contestant = CONTESTANTS[name](state, tmp_path)
    for save in range(2):
        for tensor in state.values():
            tensor.add_(save)
        timing = peer.save()
        assert 0 < timing.pause_s <= timing.durable_s
    peer.close()
    expected = {key: tensor.clone() for key, tensor in state.items()}
    spoil(state)
    peer.load()
    assert all(torch.equal(state[key], expected[key]) for key in state)


class LoadsNothing:
    def __init__(self, state, folder) -> None:
        pass

    def save(self) -> SaveTiming:
        return SaveTiming(0.0, 0.0)

    def close(self) -> None:
        pass

    def load(self) -> None:
        pass


def test_a_contestant_that_loads_nothing_is_found_out(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(contestants.CONTESTANTS, "cheat", LoadsNothing)
    plan = measure.Plan(total_bytes=MIB, rounds=1, names=("cheat",))
    with pytest.raises(measure.WrongStateError, match="cheat"):
        measure.Measurement(plan, tmp_path, lambda text: None).run()


def test_memory_is_seen_where_a_copy_is_staged(tmp_path: Path):
    """One copy for the asynchronous peer, none for the synchronous one."""
    size = 128 * MIB
    (tmp_path / "async").mkdir()
    (tmp_path / "sync").mkdir()
    names = {type(CONTESTANTS[name](make_state(MIB), tmp_path)): name for name in PEERS}
    staged = extra_bytes_in_child(names[AsyncDistributedCheckpoint], size, 3, tmp_path / "async")
    unstaged = extra_bytes_in_child(names[TorchSave], size, 3, tmp_path / "sync")
    assert 0.9 < staged / size < 2.5
    assert unstaged / size < 0.5


def test_the_whole_command_prints_every_round_and_leaves_nothing(tmp_path: Path, capsys):
    arguments = ["--mib", "2", "--rounds", "2", "--dir", str(tmp_path), "--only", PEERS[0], "--only", PEERS[1]]
    assert bench.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for metric in ("pause_s", "durable_s", "cpu_s", "restore_cold_s", "restore_warm_s"):
        assert all(len(report["values"][metric][name]) == 2 for name in PEERS[:2])
    assert report["values"]["extra_bytes"].keys() == set(PEERS[:2])
    assert report["machine"]["torch"] == torch.__version__
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, capsys):
    assert bench.main(["--mib", str(1 << 40), "--dir", str(tmp_path)]) == 2
    assert "--dir" in capsys.readouterr().err


class TestConclusions:
    def medians(self, pause: float) -> dict[str, dict[str, float]]:
        others = {"tieredckpt": 1.0, "DCP": 2.0, "raw O_DIRECT write": 0.5}
        return {
            "pause_s": {"copy, numpy, 2 threads": 0.1, "copy, torch": 0.2, "tieredckpt": pause, "DCP": 2.0},
            "durable_s": others,
            "restore_cold_s": others,
            "restore_warm_s": others,
        }

    def test_a_missed_aim_is_said(self):
        assert "1.60×" in conclusions(self.medians(0.16))[0]
        assert conclusions(self.medians(0.16))[0].endswith("MISSED.")
        assert conclusions(self.medians(0.14))[0].endswith("met.")

    def test_peers_are_named_and_floors_are_not(self):
        assert conclusions(self.medians(0.1))[1] == "Durable: 2.00× as fast as DCP."

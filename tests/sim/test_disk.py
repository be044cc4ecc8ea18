"""The simulated disk: death at any file operation, power cuts, trouble, and locks that go with their process (C05, C10, C15, C17)."""

from __future__ import annotations

import os
import random
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.disk_model import read
from tests.faults.disk_scenes import fast_directory, small_thresholds
from tests.sim import bench, disk
from tests.sim.bench import told
from tests.sim.disk import Disk
from tests.sim.kernel import Kernel, Killed, Process
from tests.sim.trouble import Trouble
from tests.sim.watched import Watcher
from tieredckpt.errors import CapacityError, NotFoundError, StoreError, TieredCheckpointError
from tieredckpt.store.base import Created, is_local_tier_store

KEYS = [f"log/{number:020d}.json" for number in range(1, 5)] + [
    f"data/{hh}/pack-{number}" for hh in ("0a", "ff") for number in range(3)
]

OWN = {"a": "data/0a/", "b": "data/ff/"}
"""Who may delete what. Nobody deletes from the log."""


@pytest.fixture
def kernel() -> Kernel:
    return Kernel(1)


@pytest.fixture
def base() -> Iterator[Path]:
    with fast_directory() as directory:
        yield Path(directory)


@pytest.fixture
def node(kernel: Kernel, base: Path) -> Iterator[Disk]:
    made = Disk(kernel, base)
    yield made
    made.close()
    assert made.offences == []


def open_below(base: Path) -> list[str]:
    """What this process holds open there."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in paths if path.startswith(str(base))]


# ------------------------------------------------------------------------------------------ processes


def test_it_is_the_real_store_and_os_is_left_as_it_was(kernel: Kernel, node: Disk) -> None:
    before = {name: getattr(os, name) for name in (*Watcher.CHANGES, *Watcher.LOOKS)}
    mount = node.mount(bench.process(kernel))
    assert is_local_tier_store(mount)
    mount.put("data/0a/pack", [b"pa", b"ck"])
    assert mount.create("log/1.json", b"record") is Created.CREATED
    assert mount.create("log/1.json", b"other") is Created.EXISTS
    assert mount.stat("log/1.json").size == 6
    assert [found.key for found in mount.list("")] == ["data/0a/pack", "log/1.json"]
    memory = bytearray(2)
    mount.read_into("data/0a/pack", 2, memoryview(memory))
    assert memory == b"ck"
    assert mount.quarantine("data/0a/pack").read_bytes() == b"pack"
    assert mount.delete(["log/1.json", "log/absent"]) == []
    assert [found.key for found in node.store().list("")] == []
    assert {name: getattr(os, name) for name in before} == before


def test_two_nodes_have_two_disks_and_their_requests_interleave() -> None:
    seen = set()
    for seed in range(12):
        with fast_directory() as directory:
            kernel, nodes = Kernel(seed), []
            kernel.trace = []
            for name in ("node-1", "node-2"):
                Path(directory, name).mkdir()
                nodes.append(Disk(kernel, Path(directory, name)))

            def work(process: Process, node: Disk) -> None:
                node.mount(process).put("data/0a/pack", [process.name.encode()])

            pairs = [(bench.process(kernel, name, name), node) for name, node in zip("ab", nodes, strict=True)]
            bench.run(kernel, *((process, lambda p=process, n=node: work(p, n)) for process, node in pairs))
            assert [node.store().get("data/0a/pack", max_bytes=9) for node in nodes] == [b"a", b"b"]
            seen.add(tuple(line.split()[1] for line in kernel.trace))
            for node in nodes:
                node.close()
    assert len(seen) > 3


def test_c15_the_locks_of_a_process_live_as_long_as_it_does(kernel: Kernel, node: Disk, base: Path) -> None:
    one, other = bench.process(kernel, "one"), bench.process(kernel, "other")
    dying, living = node.mount(one), node.mount(other)
    dying.put("data/0a/a", [b"a"])
    living.put("data/0a/b", [b"b"])
    assert living.sweep_abandoned_temps() == 0, "both are alive"
    held = len(open_below(base))
    kernel.kill(one)
    assert living.sweep_abandoned_temps() == 0, "its descriptors are still open"
    node.bury(one)
    node.bury(one)
    assert 0 < len(open_below(base)) < held
    assert living.sweep_abandoned_temps() == 1
    with pytest.raises(Killed):
        dying.put("data/0a/c", [b"c"])
    kernel.kill(other)
    node.bury(other)
    assert open_below(base) == []


def test_a_descriptor_number_that_was_given_out_again_is_nobody_elses(kernel: Kernel, node: Disk, base: Path) -> None:
    """What a dead process had open is closed once: the numbers belong to whoever opens next."""
    processes = [bench.process(kernel, f"p{number}") for number in range(6)]
    mounts = [node.mount(process) for process in processes]
    for mount in mounts:
        mount.put(f"data/0a/{mounts.index(mount)}", [b"x"])
    for process in processes[::2]:
        kernel.kill(process)
        node.bury(process)
    for number in range(20):
        for mount in mounts[1::2]:
            mount.put(f"data/ff/{number}-{mounts.index(mount)}", [b"y" * number])
    assert len(list(node.store().list("data/ff/"))) == 60
    for mount in mounts[1::2]:
        mount.close()
    assert open_below(base) == []


def dies_in(kernel: Kernel, node: Disk, dies_at: int, work: Callable[[disk.Mount], object]) -> bool:
    """A process whose `dies_at`-th change of the disk never happens; False if it had no more to do."""
    process = bench.process(kernel, f"dies at {dies_at}")
    mount = node.mount(process)
    process.dies_at = dies_at
    with suppress(Killed):
        work(mount)
        kernel.kill(process)
        node.bury(process)
        return False
    assert process.dead
    return True


def test_c15_death_before_each_change_leaves_a_whole_object_or_none(kernel: Kernel, node: Disk) -> None:
    """And a temporary that the next process sweeps; nothing that the dead one would have done on its way out is done."""
    left, there = 0, Counter()
    for number in range(1, 30):
        key = f"data/{number:02x}/pack"
        died = dies_in(kernel, node, number, lambda mount, key=key: mount.put(key, [b"pack" * 1000]))
        if not died:
            break
        found = told(lambda key=key: node.store().get(key, max_bytes=4000))
        assert found == b"pack" * 1000 or isinstance(found, NotFoundError)
        there[type(found) is bytes] += 1
        left += len(list((node.path / "tmp").glob("*/*")))
        sweeper = node.mount(bench.process(kernel, f"sweeper {number}"))
        sweeper.sweep_abandoned_temps()
        sweeper.close()
        assert list((node.path / "tmp").glob("*")) == []
    assert 8 < number < 29
    assert there[True] >= 2
    assert there[False] >= 5
    assert left >= 4


# ------------------------------------------------------------------------------------------ power


class Life:
    """Processes on one disk that write, die, and lose power, by turns; everything acknowledged is remembered."""

    def __init__(self, seed: int, base: Path) -> None:
        self.rng = random.Random(seed)
        self.kernel = Kernel(seed)
        self.node = Disk(self.kernel, base)
        self.acknowledged: dict[str, bytes] = {}
        self.deleted: set[str] = set()
        self.lost: list[str] = []
        self.said: list[str] = []

    def lead(self, lives: int) -> None:
        for life in range(lives):
            processes = [bench.process(self.kernel, f"{life}{name}") for name in "ab"]
            for process in processes:
                process.dies_at = self.rng.choice((None, self.rng.randrange(1, 30)))
            bench.run(self.kernel, *((process, lambda process=process: self.work(process)) for process in processes))
            for process in processes:
                self.kernel.kill(process)
                self.node.bury(process)
            if self.rng.random() < 0.7:
                self.said.append(self.node.power_cut(self.rng))
            self.check()
        self.node.close()

    def work(self, process: Process) -> None:
        """Whoever is told that an object is there has to find it after a power cut: its writer, or one who found it and settled it."""
        mount = self.node.mount(process)
        mount.sweep_abandoned_temps()
        for _ in range(self.rng.randrange(1, 6)):
            key = self.rng.choice([key for key in KEYS if key.startswith(("log/", OWN[process.name[-1]]))])
            match self.rng.choice(("create", "create", "settle", "delete")):
                case "create":
                    data = f"{key} {process.name}".encode() * self.rng.randrange(1, 600)
                    if mount.create(key, data) is Created.CREATED:
                        self.acknowledged[key] = data
                case "settle" if key.startswith("log/"):
                    with suppress(NotFoundError):
                        self.acknowledged[key] = settled(mount, key)
                case "delete" if not key.startswith("log/"):
                    self.acknowledged.pop(key, None)
                    mount.delete([key])

    def check(self) -> None:
        store = told(self.node.store)
        for key in KEYS:
            found = store if isinstance(store, NotFoundError) else told(lambda key=key: store.get(key, max_bytes=1 << 20))
            if key in self.acknowledged and found != self.acknowledged[key]:
                self.lost.append(key)
            elif isinstance(found, bytes) and not found.startswith(key.encode()):
                self.lost.append(f"{key} is torn")
        self.acknowledged = {key: data for key, data in self.acknowledged.items() if key not in self.lost}


def settled(mount: disk.Mount, key: str) -> bytes:
    found = mount.get(key, max_bytes=1 << 20)
    mount.settle([key])
    return found


def lives(seeds: int) -> tuple[list[int], list[str]]:
    """The seeds that lost something, and what the power cuts left."""
    losing, said = [], []
    with small_thresholds():
        for seed in range(seeds):
            with fast_directory() as directory:
                life = Life(seed, Path(directory))
                life.lead(6)
                said += life.said
                if life.lost:
                    losing.append(seed)
                assert life.node.offences == []
    return losing, said


SEEDS = 100


def test_i3_c10_what_was_acknowledged_survives_every_power_cut(swept: Callable[[str], None]) -> None:
    losing, said = lives(SEEDS)
    assert losing == []
    fates = {text.partition(": ")[2].split()[0] for text in said}
    assert fates >= {"none", "all", "only", "torn"}
    assert len(set(said)) > 30
    swept(f"simulated disk: {SEEDS} lives, {len(said)} power cuts")


def test_c10_what_is_found_after_a_death_is_durable_once_it_is_settled(base: Path) -> None:
    """Its writer died before each of its changes, among them the fsync of the name: it can be seen, and need not survive."""
    found = 0
    for dies_at in range(1, 20):
        for seed in range(8):
            kernel, place = Kernel(seed), base / f"{dies_at}-{seed}"
            place.mkdir()
            node = Disk(kernel, place)
            died = dies_in(kernel, node, dies_at, lambda mount: mount.create("log/1.json", b"record"))
            reader = bench.process(kernel, "reader")
            answer = told(lambda node=node, reader=reader: settled(node.mount(reader), "log/1.json"))
            kernel.kill(reader)
            node.power_cut(random.Random(seed))
            if answer == b"record":
                found += 1
                assert node.store().get("log/1.json", max_bytes=9) == b"record"
            else:
                assert isinstance(answer, NotFoundError)
            node.close()
        if not died:
            break
    assert found >= 24


@pytest.mark.parametrize("ignored", [stat.S_ISDIR, stat.S_ISREG], ids=["directories", "files"])
def test_c10_without_an_fsync_something_acknowledged_is_lost(
    ignored: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Watcher._fsync

    def fsync(self: Watcher, fd: int) -> None:
        if not ignored(os.fstat(fd).st_mode):
            real(self, fd)

    monkeypatch.setattr(Watcher, "_fsync", fsync)
    losing, _ = lives(12)
    assert len(losing) >= 6


def test_a_cut_takes_the_power_of_the_dead_only(kernel: Kernel, node: Disk) -> None:
    process = bench.process(kernel)
    node.mount(process)
    with pytest.raises(AssertionError, match="without power"):
        node.power_cut(random.Random(1))
    kernel.kill(process)
    assert "unsynced" in node.power_cut(random.Random(1))


def test_the_tier_itself_may_not_survive_and_the_view_is_of_what_is_there_now(kernel: Kernel, node: Disk) -> None:
    """Its name is durable before anything in it is acknowledged; one who died before has left no tier, or an empty one."""
    with pytest.raises(NotFoundError):
        node.store()
    outcomes = set()
    for seed in range(10):
        process = bench.process(kernel, f"p{seed}")
        process.dies_at = 2  # the fsync of the name
        with pytest.raises(Killed):
            node.mount(process)
        node.power_cut(random.Random(seed))
        outcomes.add(type(told(node.store)))
        node.path.rmdir() if node.path.exists() else None
        node._begin()
    assert outcomes == {disk.View, NotFoundError}
    living = bench.process(kernel, "p")
    node.mount(living).put("data/0a/pack", [b"pack"])
    view = node.store()
    kernel.kill(living)
    node.power_cut(random.Random(1))
    assert view.get("data/0a/pack", max_bytes=9) == b"pack"


def test_who_dies_behind_a_record_leaves_it_to_be_seen_and_not_durable(kernel: Kernel, node: Disk) -> None:
    """What a `settle` is for: others may act on a record that the next power cut takes back."""
    found = set()
    for seed in range(12):
        process, key = bench.process(kernel, f"p{seed}"), f"log/{seed + 1:020}.json"
        mount = node.mount(process)
        process.dies_behind_record = True
        mount.put("data/0a/pack" + str(seed), [b"pack"])
        with pytest.raises(Killed):
            mount.create(key, b"record")
        assert node.store().get(key, max_bytes=9) == b"record"
        node.power_cut(random.Random(seed))
        found.add(node.store().stat(key) is None)
    assert found == {True, False}


def test_what_somebody_outside_changes_is_part_of_the_record(kernel: Kernel, node: Disk, base: Path) -> None:
    process = bench.process(kernel)
    mount, view = node.mount(process), node.store()
    mount.put("data/0a/pack", [b"pack"])
    view.delete(["data/0a/pack"])
    view.put("data/0a/pack", [b"damaged"])
    assert mount.get("data/0a/pack", max_bytes=9) == b"damaged"
    kernel.kill(process)
    for seed in range(5):
        node.power_cut(random.Random(seed))
        assert view.get("data/0a/pack", max_bytes=9) == b"damaged"
    assert open_below(base) == []


# ------------------------------------------------------------------------------------------ trouble


def test_c05_a_full_disk_refuses_and_keeps_what_is_there(kernel: Kernel, node: Disk) -> None:
    mount = node.mount(bench.process(kernel))
    mount.put("data/0a/old", [b"old"])
    node.trouble = Trouble.full(random.Random(1))
    assert mount.free_bytes() == 0
    refused = [told(lambda number=number: mount.put(f"data/0a/{number}", [b"new"])) for number in range(10)]
    assert {type(error) for error in refused} == {CapacityError}
    assert mount.get("data/0a/old", max_bytes=9) == b"old"
    assert set(node.trouble.counts) == {"create"}
    node.trouble = None
    mount.put("data/0a/0", [b"new"])
    assert [found.key for found in mount.list("data/")] == ["data/0a/0", "data/0a/old"]


def test_c05_a_small_disk_has_room_again_when_something_was_deleted(kernel: Kernel, node: Disk) -> None:
    mount = node.mount(bench.process(kernel))
    node.capacity_bytes = 10_000
    mount.put("data/0a/a", [bytes(6000)])
    assert mount.free_bytes() == 4000 // 4096 * 4096
    assert isinstance(told(lambda: mount.put("data/0a/b", [bytes(6000)])), CapacityError)
    mount.delete(["data/0a/a"])
    mount.put("data/0a/b", [bytes(6000)])
    assert list((node.path / "tmp").glob("*/*")) == []


def test_a_read_only_disk_is_read_and_not_changed(kernel: Kernel, node: Disk) -> None:
    mount = node.mount(bench.process(kernel))
    mount.put("data/0a/old", [b"old"])
    before = read(node.path)
    node.trouble = Trouble.read_only(random.Random(1))
    errors = [told(lambda: mount.create("log/1.json", b"")), *(failure.error for failure in mount.delete(["data/0a/old"]))]
    assert [type(error) for error in errors] == [StoreError, StoreError]
    assert all("EROFS" in str(error) for error in errors)
    assert mount.get("data/0a/old", max_bytes=9) == b"old"
    assert read(node.path) == before


def test_c10_what_an_fsync_refused_is_not_acknowledged_and_may_be_gone(kernel: Kernel, node: Disk) -> None:
    seen = Counter()
    for seed in range(20):
        process = bench.process(kernel, f"p{seed}")
        mount = node.mount(process)
        key = f"data/0a/{seed}"
        mount.put(f"data/0a/before-{seed}", [b"b"])
        node.trouble = Trouble.failing_sync(random.Random(seed), 0.5)
        answer = told(lambda mount=mount, key=key: mount.put(key, [b"pack"]))
        node.trouble = None
        assert answer is None or isinstance(answer, StoreError)
        kernel.kill(process)
        node.power_cut(random.Random(seed))
        there = told(lambda key=key: node.store().get(key, max_bytes=9))
        assert there == b"pack" or (isinstance(there, NotFoundError) and answer is not None)
        seen[answer is None, there == b"pack"] += 1
    assert len(seen) == 3, seen


def test_c10_a_process_may_sync_what_another_one_could_not(kernel: Kernel, node: Disk) -> None:
    """It was told nothing; the one that was told never syncs that file again, and says so."""
    dies_in(kernel, node, 9, lambda mount: mount.create("log/1.json", b"record"))
    one, other = (node.mount(bench.process(kernel, name)) for name in ("one", "other"))
    assert one.get("log/1.json", max_bytes=9) == b"record"
    node.trouble = Trouble.failing_sync(random.Random(1), 1.0)
    assert isinstance(told(lambda: one.settle(["log/1.json"])), StoreError)
    node.trouble = None
    assert "cannot be proven" in str(told(lambda: one.settle(["log/1.json"])))
    other.settle(["log/1.json"])
    assert node.offences == []


def test_c17_a_short_write_is_gone_on_with(kernel: Kernel, node: Disk) -> None:
    mount, data = node.mount(bench.process(kernel)), random.Random(1).randbytes(20_000)
    node.trouble = Trouble.short_writes(random.Random(1))
    mount.put("data/0a/pack", [data])
    assert node.trouble.counts["pwritev"] > 0
    assert mount.get("data/0a/pack", max_bytes=20_000) == data


def test_errors_name_the_tier_and_not_the_place_of_the_directory(kernel: Kernel, node: Disk, base: Path) -> None:
    """Otherwise one history would be another one in another directory."""
    mount = node.mount(bench.process(kernel))
    node.trouble = Trouble.full(random.Random(1))
    for request in (lambda: mount.get("log/1.json", max_bytes=1), lambda: mount.create("log/1.json", b"record")):
        error = told(request)
        assert isinstance(error, TieredCheckpointError)
        assert "disk/tier/log/1.json" in str(error)
        assert str(base) not in str(error)


# ------------------------------------------------------------------------------------------ long lives, and other places


def test_a_long_life_is_not_a_long_list(kernel: Kernel, node: Disk) -> None:
    mount = node.mount(bench.process(kernel))
    for number in range(400):
        mount.put(f"data/0a/{number}", [b"pack"])
        mount.delete([f"data/0a/{number - 5}"])
    assert node._watcher.ops == []
    assert node.pending <= disk.PENDING_MOST
    assert len(node._live.files) <= disk.PENDING_MOST


def test_the_same_seed_is_the_same_history_in_another_directory() -> None:
    def history(seed: int, name: str) -> tuple[str, list[str]]:
        with fast_directory() as directory:
            place = Path(directory, name)
            place.mkdir()
            life = Life(seed, place)
            life.lead(4)
            return life.kernel.digest, life.said

    assert history(3, "one") == history(3, "another-place")
    assert history(3, "one") != history(4, "one")


def test_a_directory_is_listed_sorted(base: Path) -> None:
    """Whatever order the file system has: what a sweep removes first is part of a history."""
    for number in (3, 1, 2):
        (base / f"f{number}").touch()
    watcher = Watcher(base)
    with watcher.recording():
        assert os.listdir(base) == ["f1", "f2", "f3"]

"""Sharded leaves: boxes in, boxes out, whatever the layouts on both sides. C100, I4.

Values are `arange`, so that every element says where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tieredckpt as tc
from tieredckpt.errors import InternalError, UsageError
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.reading import LandedPiece
from tieredckpt.pytorch.capture import capture
from tieredckpt.pytorch.landing import check_landed
from tieredckpt.pytorch.shards import mesh_of, shard_of
from tieredckpt.settings import PAGE_BYTES, Settings

SMALL = Settings(piece_bytes=PAGE_BYTES, pack_bytes=64 * PAGE_BYTES)
SHAPES = [(0,), (1,), (3,), (6,), (5000,), (7, 300), (300, 7), (5, 6, 70)]


def arange(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


def spread(full: torch.Tensor, count: int, dim: int) -> tc.Sharded:
    """As torch.chunk, with the empty boxes that it leaves out."""
    size = -(-full.shape[dim] // count)
    begins = [min(size * index, full.shape[dim]) for index in range(count + 1)]
    locals_ = [full.narrow(dim, a, b - a).clone() for a, b in pairwise(begins)]
    offsets = [tuple(a if axis == dim else 0 for axis in range(full.ndim)) for a in begins[:-1]]
    return tc.Sharded(locals_, tuple(full.shape), offsets)


def zeroed(value: tc.Sharded) -> tc.Sharded:
    for local in value.local:
        local.zero_()
    return value


def joined(value: tc.Sharded) -> torch.Tensor:
    """NaN where no box is."""
    full = torch.full(tuple(value.global_shape), float("nan"))
    for local, offset in zip(value.local, value.offset, strict=True):
        full[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))] = local.float()
    return full


def open_run(tmp_path: Path, **options: object) -> tc.Checkpointer:
    return tc.Checkpointer(str(tmp_path / "run"), settings=SMALL, **options)  # type: ignore[arg-type]


@pytest.fixture
def fake_world() -> Iterator[object]:
    """Sets up a process group that moves nothing: `be(rank, world)` makes this process one of its ranks."""

    def be(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield be
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_any_boxes_are_restored_into_any_others(n: int, tmp_path: Path) -> None:
    """C100: sizes 0, 1, 3 and 6 over 4 ranks are legal."""
    cases = [(shape, dim) for shape in SHAPES for dim in range(len(shape))]
    state = {f"{shape}/{dim}": spread(arange(shape), n, dim) for shape, dim in cases}
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, state, blocking=True)
    for m in (1, 2, 3, 4, 8):
        target = {f"{shape}/{dim}": zeroed(spread(arange(shape), m, (dim + m) % len(shape))) for shape, dim in cases}
        with open_run(tmp_path) as ckpt:
            ckpt.restore(target)
        for shape, dim in cases:
            assert torch.equal(joined(target[f"{shape}/{dim}"]), arange(shape)), (shape, dim, m)


def test_sharded_into_plain_and_plain_into_sharded_with_other_dtypes(tmp_path: Path) -> None:
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, {"a": spread(arange((30, 50)), 4, 1), "b": arange((30, 50))}, blocking=True)
    target = {"a": torch.zeros(30, 50), "b": zeroed(spread(arange((30, 50), torch.float64), 3, 1))}
    with open_run(tmp_path) as ckpt:
        ckpt.restore(target, allow=["b"])
    assert torch.equal(target["a"], arange((30, 50)))
    assert torch.equal(joined(target["b"]), arange((30, 50)))
    assert target["b"].local[0].dtype == torch.float64


def test_arrays_of_strides_are_cut_and_filled_in_place(tmp_path: Path) -> None:
    full = np.arange(6000).reshape(60, 100)
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, {"a": tc.Sharded([full[:, 30:], full[:, :30]], full.shape, [(0, 30), (0, 0)])}, blocking=True)
    memory = np.zeros((100, 60), dtype=full.dtype)
    with open_run(tmp_path) as ckpt:
        ckpt.restore({"a": tc.Sharded([memory.T[:17], memory.T[17:]], full.shape, [(0, 0), (17, 0)])})
    assert np.array_equal(memory.T, full)


def test_padding_is_no_data(tmp_path: Path) -> None:
    """ZeRO: a flat buffer of 10 elements on 4 ranks of 3, and one more rank than there is data for."""
    locals_ = [torch.arange(start, start + 3.0) for start in (0, 3, 6, 9, 12)]
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, {"flat": tc.Sharded(locals_, (10,), [(0,), (3,), (6,), (9,), (12,)])}, blocking=True)
    plain, padded = torch.zeros(10), torch.full((7,), -1.0)
    with open_run(tmp_path) as ckpt:
        ckpt.restore({"flat": plain})
    with open_run(tmp_path) as ckpt:
        ckpt.restore({"flat": tc.Sharded(padded, (10,), (5,))})
    assert torch.equal(plain, torch.arange(10.0))
    assert padded.tolist() == [5, 6, 7, 8, 9, -1, -1], "padding is not touched"


@pytest.mark.parametrize(
    ("local", "shape", "offset", "words"),
    [
        (torch.ones(2), (4, 4), (0, 0), "as many dimensions"),
        (torch.ones(2), (4,), (0, 0), "as many dimensions"),
        (torch.ones(2), (4,), (-1,), r"\(-1,\) is negative"),
        (torch.ones(2), (-4,), (0,), "negative extent"),
        ([torch.ones(2), torch.ones(2)], (4,), [(0,), (1,)], r"\[0:2\] and \[1:3\] overlap"),
        ([torch.ones(2), torch.ones(2).double()], (4,), [(0,), (2,)], "one dtype.*float32.*float64"),
        ([torch.ones(2)], (4,), [(0,), (2,)], "1 local tensors with 2 offsets"),
        ([], (4,), [], "at least one"),
        (torch.ones(2).to_sparse(), (4,), (0,), "layout"),
    ],
)
def test_what_is_wrong_is_named(local: object, shape: tuple[int, ...], offset: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tc.Sharded(local, shape, offset)


def test_a_part_alone_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    """I4: a snapshot with a gap would be found out only when it is needed."""
    with open_run(tmp_path) as ckpt:
        with pytest.raises(UsageError, match=r"model/w: is spread over many ranks: .*\(2, 4\) at \(2, 0\).* 16 of 24 elements"):
            ckpt.save(1, {"model": {"w": tc.Sharded(torch.ones(2, 4), (6, 4), (2, 0))}}, blocking=True)
        with pytest.raises(UsageError, match="holds nothing, and 4 of 4"):
            ckpt.save(1, {"w": tc.Sharded(torch.ones(0), (4,), (0,))}, blocking=True)
        ckpt.save(1, {"w": torch.ones(1)}, blocking=True)
    with tc.Tier.open(str(tmp_path / "run")) as tier:
        assert [snapshot.step for snapshot in tier.snapshots()] == [1]


def test_a_target_of_another_global_shape_is_a_difference(tmp_path: Path) -> None:
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, {"w": torch.ones(6)}, blocking=True)
    target = torch.zeros(3)
    with open_run(tmp_path) as ckpt, pytest.raises(tc.MismatchError, match=r"\(6,\) is stored, the target has \(7,\)"):
        ckpt.restore({"w": tc.Sharded(target, (7,), (0,))})
    memory = torch.zeros(3)
    twice = tc.Sharded([memory, memory], (6,), [(0,), (3,)])
    with open_run(tmp_path) as ckpt, pytest.raises(tc.MismatchError, match="two of its boxes share memory"):
        ckpt.restore({"w": twice})
    assert not target.any()
    assert not memory.any()


def test_a_part_is_restored_from_the_pieces_that_meet_it(tmp_path: Path) -> None:
    """What is read is what is wanted, and the rest of the pieces at its edges."""
    rows = arange((256, 1024))  # a piece is a row
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, {"w": rows, "other": torch.ones(9999)}, blocking=True)
    local = torch.zeros(3, 500)
    with open_run(tmp_path) as ckpt:
        report = ckpt.restore(
            {"w": tc.Sharded(local, (256, 1024), (100, 300)), "other": tc.Sharded(torch.ones(0), (9999,), (0,))}
        )
    assert torch.equal(local, rows[100:103, 300:800])
    assert sum(report.sources.values()) <= 4 * PAGE_BYTES


def test_tied_shards_are_stored_once_and_stay_tied() -> None:
    """C3: by memory and boxes; the same memory as another box is no alias."""
    full = arange((4, 4))
    halves = [full[:2], full[2:]]
    tied = capture({name: tc.Sharded(halves, (4, 4), [(0, 0), (2, 0)]) for name in "ab"}).content
    assert [leaf.alias_of for leaf in tied.leaves] == [-1, 0]
    apart = capture(
        {"a": tc.Sharded(halves, (4, 4), [(0, 0), (2, 0)]), "b": tc.Sharded(halves[::-1], (4, 4), [(0, 0), (2, 0)])}
    ).content
    assert [leaf.alias_of for leaf in apart.leaves] == [-1, -1]
    assert [leaf.storage for leaf in apart.leaves] == [0, 0], "they share memory, and that is told"
    alone = capture({"a": tc.Sharded([full[:, :2], full[:, 2:]], (4, 4), [(0, 0), (0, 2)]), "b": torch.ones(3)}).content
    assert alone.leaves[0].storage == capture({"b": torch.ones(3)}).content.leaves[0].storage, "boxes of one leaf may interleave"


def test_boxes_of_the_base_are_used_where_they_tile_what_is_held() -> None:
    leaf = Leaf(path="w", dtype="float32", shape=(40,), kind="torch")
    known = [Box((0,), (10,)), Box((10,), (10,)), Box((20,), (20,))]
    held = (Box((30,), (10,)), Box((0,), (20,)))
    pieces = lay_out([leaf], SMALL, lambda _: known, {0: held}).pieces
    assert [piece.box for piece in pieces] == [held[0], known[0], known[1]]
    across = Box((5,), (15,))
    assert [piece.box for piece in lay_out([leaf], SMALL, lambda _: known, {0: (across,)}).pieces] == [across], "cut anew"


def test_landed_boxes_are_counted() -> None:
    leaf = Leaf(path="w", dtype="uint8", shape=(8,), kind="numpy")
    landed = {0: (LandedPiece(Box((0,), (4,)), memoryview(bytes(4))),)}
    check_landed([leaf], landed, {0: (Box((1,), (3,)),)})
    check_landed([leaf], landed, {0: ()})
    for wanted in ({0: (Box((1,), (4,)),)}, {0: None}, {0: (Box((0,), (2,)), Box((6,), (2,)))}):
        with pytest.raises(InternalError, match="w: "):
            check_landed([leaf], landed, wanted)


# ------------------------------------------------------------------------------------------------ DTensor


MESHES = [(1,), (2,), (3,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 3)]
LINES = [[Shard(0)], [Shard(1)], [Replicate()]]
PLANES = [
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(1), Replicate()],
    [_StridedShard(0, split_factor=2), Shard(1)],
    [_StridedShard(0, split_factor=3), Replicate()],
    [Replicate(), _StridedShard(1, split_factor=2)],
]


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (1, 6), (3, 0)], ids=str)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_the_boxes_of_a_dtensor_hold_what_they_say(mesh_shape: tuple[int, ...], shape: tuple[int, int], fake_world) -> None:
    full, world = arange(shape), int(np.prod(mesh_shape))
    for placements in LINES if len(mesh_shape) == 1 else PLANES:
        union = torch.full(shape, float("nan"))
        for rank in range(world):
            fake_world(rank, world)
            mesh = DeviceMesh("cpu", torch.arange(world).reshape(mesh_shape))
            shard = shard_of(distribute_tensor(full, mesh, placements, src_data_rank=None))
            assert shard is not None
            assert shard.global_shape == shape
            for box, values in shard.parts:
                assert torch.equal(values, full[box.slices]), (placements, rank)
                union[box.slices] = values
        assert torch.equal(union, full), placements


def test_fsdp_over_tensor_parallel(fake_world) -> None:
    """As FSDP2 places what is split already: the tensor-parallel dimension is cut first, though it comes last in the mesh."""
    full = arange((16, 3))
    union = torch.zeros(16, 3)
    for rank in range(4):
        fake_world(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = divmod(rank, 2)
        local = full.chunk(2)[tp].chunk(2)[dp]
        value = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False)
        assert mesh_of(value) == {"dp": 2, "tp": 2}
        shard = shard_of(value)
        assert shard is not None
        for box, values in shard.parts:
            assert torch.equal(values, full[box.slices])
            union[box.slices] += 1
    assert (union == 1).all(), "each element is held by one rank"


def test_what_a_dtensor_cannot_say_is_refused(fake_world) -> None:
    fake_world(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(UsageError, match=r"w: DTensor with the placements .*Replicate\(\) or Shard"):
        capture({"w": DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)})
    wrong = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False, shape=torch.Size((9,)), stride=(1,))
    with pytest.raises(UsageError, match=r"w: DTensor of shape \(9,\).*holds \(3,\) here"):
        capture({"w": wrong})


def test_modules_and_optimizers_of_dtensors(fake_world, tmp_path: Path) -> None:
    """Moments are as they were also where the new optimizer has none yet, and as spread as their parameters."""
    fake_world(0, 1)
    mesh = init_device_mesh("cpu", (1,))

    def job(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(5, 3, bias=False)
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = job(1)
    model.weight.grad = DTensor.from_local(torch.ones(3, 5), mesh, [Shard(0)])
    optimizer.step()
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}, blocking=True)
    again, fresh = job(2)
    graph = (again.weight * again.weight).sum()
    with open_run(tmp_path) as ckpt:
        ckpt.restore({"model": again, "optimizer": fresh})
    assert torch.equal(again.weight.to_local(), model.weight.to_local())
    moment = fresh.state[again.weight]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert torch.equal(moment.to_local(), optimizer.state[model.weight]["exp_avg"].to_local())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def test_a_module_of_fsdp2(fake_world, tmp_path: Path) -> None:
    """Its class is one of torch.distributed, and its parameters are DTensors."""
    fake_world(0, 1)
    mesh = init_device_mesh("cpu", (1,))
    model = fully_shard(torch.nn.Linear(5, 3), mesh=mesh)
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, {"model": model}, blocking=True)
    again = fully_shard(torch.nn.Linear(5, 3), mesh=mesh)
    with open_run(tmp_path) as ckpt:
        ckpt.restore({"model": again})
    assert isinstance(again.weight, DTensor)
    assert torch.equal(again.weight.to_local(), model.weight.to_local())


def test_a_sharded_tensor_with_several_local_shards(fake_world, tmp_path: Path) -> None:
    """Stored whole, from its boxes; restored into one that is cut along the other dimension."""
    fake_world(0, 1)
    full = arange((6, 4))

    def sharded(values: torch.Tensor, dim: int) -> ShardedTensor:
        parts = values.chunk(2, dim)
        offsets = [[0, 0], [0, 0]]
        offsets[1][dim] = parts[0].shape[dim]
        locals_ = [
            LocalShard(part.clone(), ShardMetadata(offset, list(part.shape), "rank:0/cpu"))
            for part, offset in zip(parts, offsets, strict=True)
        ]
        return init_from_local_shards(locals_, *values.shape)

    with open_run(tmp_path) as ckpt:
        ckpt.save(1, {"w": sharded(full, 0)}, blocking=True)
    target = sharded(torch.zeros(6, 4), 1)
    with open_run(tmp_path) as ckpt:
        ckpt.restore({"w": target})
    assert torch.equal(torch.cat([shard.tensor for shard in target.local_shards()], 1), full)
    with tc.Tier.open(str(tmp_path / "run")) as tier:
        assert torch.equal(tier.load()["w"], full)


def test_incremental_saves_of_shards_refer_to_what_has_not_changed(tmp_path: Path) -> None:
    """Also when it is held in other boxes: pieces are cut at the same places."""
    full = arange((64, 1024))
    with open_run(tmp_path, incremental=tc.Incremental()) as ckpt:
        ckpt.save(1, {"w": spread(full, 4, 0)}, blocking=True)
        full[5] += 1
        ckpt.save(2, {"w": spread(full, 8, 0)}, blocking=True)
    with tc.Tier.open(str(tmp_path / "run")) as tier:
        first, second = tier.snapshots()
        assert second.bytes_new < first.bytes_new / 8
        loaded = tier.load(step=2)
    assert torch.equal(loaded["w"], full)


def test_leaves_of_which_nothing_is_held_are_no_aliases() -> None:
    empty = tc.Sharded(torch.ones(0), (4,), (4,))
    assert [leaf.alias_of for leaf in capture({"a": empty, "b": empty}).content.leaves] == [-1, -1]


def test_a_graph_that_needs_the_old_values_of_a_dtensor_notices(fake_world, tmp_path: Path) -> None:
    fake_world(0, 1)
    mesh = init_device_mesh("cpu", (1,))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, {"w": weight}, blocking=True)
    graph = (weight * weight).sum()
    with open_run(tmp_path) as ckpt:
        ckpt.restore({"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def two_into_one_memory(kind: str) -> dict[str, object]:
    memory, other = torch.zeros(4), torch.zeros(4)
    if kind == "one part is another leaf":
        return {"a": tc.Sharded([memory, other], (8,), [(0,), (4,)]), "b": memory}
    if kind == "two boxes overlap":
        return {"a": tc.Sharded([memory, memory[:2]], (6,), [(0,), (4,)])}
    return {"a": tc.Sharded([memory.view(2, 2)[:, 0], memory[1:3]], (4,), [(0,), (2,)])}  # elements 0, 2 and 1, 2


@pytest.mark.parametrize("kind", ["one part is another leaf", "two boxes overlap", "strides meet"])
def test_a_target_with_two_values_for_one_memory_is_refused(kind: str, tmp_path: Path) -> None:
    """I15: filled twice, one of the two would be lost without a word."""
    target = two_into_one_memory(kind)
    full = {name: arange(tuple(value.global_shape if name == "a" else (4,))) for name, value in target.items()}  # type: ignore[attr-defined]
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, full, blocking=True)
    with open_run(tmp_path) as ckpt, pytest.raises(tc.MismatchError, match="memory"):
        ckpt.restore(target)
    assert all(not local.any() for local in target["a"].local), "nothing was changed"  # type: ignore[attr-defined]


def test_boxes_that_interleave_in_one_memory_are_fine(tmp_path: Path) -> None:
    full, memory = arange((6, 4)), torch.zeros(6, 4)
    with open_run(tmp_path) as ckpt:
        ckpt.save(1, {"w": full}, blocking=True)
    with open_run(tmp_path) as ckpt:
        ckpt.restore({"w": tc.Sharded([memory[:, :2], memory[:, 2:]], (6, 4), [(0, 0), (0, 2)])})
    assert torch.equal(memory, full)


def test_offsets_that_were_computed_are_integers_of_any_kind(tmp_path: Path) -> None:
    with open_run(tmp_path) as ckpt:
        ckpt.save(
            1, {"w": tc.Sharded([arange((4,)), arange((4,))], np.array([8]), [torch.tensor([0]), (np.int64(4),)])}, blocking=True
        )
    with tc.Tier.open(str(tmp_path / "run")) as tier:
        assert torch.equal(tier.load()["w"], torch.cat([arange((4,)), arange((4,))]))


@pytest.mark.parametrize(
    "given",
    [(torch.zeros(4), 8, 0), (torch.zeros(4), (8,), 0), ([torch.zeros(4)], (8,), (0,)), (None, (8,), (0,)), (3.0, (), ()),
     (torch.zeros(4), (8,), (0.0,)), (["x"], (8,), [(0,)])],
)  # fmt: skip
def test_what_is_no_sharded_is_a_usage_error(given: tuple[object, object, object]) -> None:
    with pytest.raises(UsageError, match="Sharded"):
        tc.Sharded(*given)  # type: ignore[arg-type]


def test_one_memory_as_two_leaves_of_different_shapes_is_no_alias() -> None:
    local = arange((4,))
    captured = capture({"a": local, "b": tc.Sharded(local, (8,), (0,))})
    assert [leaf.alias_of for leaf in captured.content.leaves] == [-1, -1]
    with pytest.raises(UsageError, match="b"):
        captured.content.refuse_incomplete()


def test_a_sharded_in_the_state_of_an_object_is_refused() -> None:
    class Home:
        def state_dict(self) -> dict[str, object]:
            return {"w": tc.Sharded([torch.zeros(4), torch.zeros(4)], (8,), [(0,), (4,)])}

        def load_state_dict(self, state: dict[str, object]) -> None:
            raise AssertionError("never loaded")

    with pytest.raises(UsageError, match="home/w: a Sharded inside of an object"):
        capture({"home": Home()})

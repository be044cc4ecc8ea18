"""What capture takes, copies and refuses (I10, C94, C112, C116, C117, C120, C121, C124, C125)."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tieredckpt as tc
from tests.pytorch.rig import same_bits, store
from tieredckpt.errors import NotYetAvailableError, UsageError
from tieredckpt.model.tree import LeafRef, PerRankNodes, TorchDevice, TorchDtype, TorchSize
from tieredckpt.pytorch.capture import capture
from tieredckpt.pytorch.train_state import TrainState


class Cursor:
    """A data sampler as users write them."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.order = torch.arange(10)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]


class Distance(torch.Tensor):
    """A subclass that means something."""


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    lr: float = 0.1


Point = namedtuple("Point", "x y")

PLAIN: dict[Any, Any] = {
    "none": None,
    "flags": [True, False],
    "ints": (0, -1, 2**200, 1),
    "floats": [0.5, -0.0, float("inf"), float("nan"), 5e-324],
    "text": "naïve/\x00",
    "bytes": b"\x00\xff",
    0: "int key",
    "0": "text key",
    None: "none key",
    True: "bool key",
    (1, "a"): "tuple key",
    "counter": Counter({2: 1, 5: 3}),
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "nested": {"list": [], "tuple": (), "dict": {}},
    "numpy": [np.float32(1.1), np.int64(-5), np.bool_(True), np.float64(0.1), np.complex128(1j)],
    "torch": [torch.bfloat16, torch.Size([2, 3]), torch.device("cuda:1")],
    "generator": np.random.Generator(np.random.PCG64(7)).bit_generator.state,
}


def exactly(a: object, b: object) -> bool:
    """Same types and values all the way down; NaN equals NaN, 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return [*map(repr, a)] == [*map(repr, b)] and all(exactly(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        assert isinstance(b, list | tuple)
        return len(a) == len(b) and all(map(exactly, a, b))
    return repr(a) == repr(b)


def test_plain_values_come_back_exactly() -> None:
    stored = store({"plain": PLAIN, "w": torch.ones(1)})
    assert exactly(stored.whole()["plain"], PLAIN)
    target: dict[str, Any] = {"plain": {}, "w": torch.zeros(1)}
    inner = target["plain"]
    stored.restore(target)
    assert exactly(target["plain"], PLAIN)
    assert target["plain"] is inner


def test_c112_plain_values_replace_those_of_the_target() -> None:
    target = {"epoch": 0, "best": None, "range": (0, 0), "seen": [1], "w": torch.zeros(2)}
    seen = target["seen"]
    state = {"epoch": 20, "best": 0.25, "range": (3, 4, 5), "seen": [4, 5, 6], "w": torch.ones(2)}
    store(state).restore(target)
    assert target["seen"] is seen
    assert {key: target[key] for key in ("epoch", "best", "range", "seen")} == {
        "epoch": 20,
        "best": 0.25,
        "range": (3, 4, 5),
        "seen": [4, 5, 6],
    }
    assert torch.equal(target["w"], torch.ones(2))


def test_neutral_tree_has_no_torch_values() -> None:
    tree: Any = capture({"a": torch.ones(2), "b": [torch.float16, torch.Size([1]), torch.device("cpu")]}).content.tree
    assert tree == {"a": LeafRef(0), "b": [TorchDtype("float16"), TorchSize((1,)), TorchDevice("cpu")]}


def test_c125_what_is_done_after_capture_and_staging_changes_nothing() -> None:
    cursor = Cursor(3)
    shared = torch.ones(5).share_memory_()
    state: dict[str, Any] = {
        "w": torch.arange(3000.0),
        "view": torch.arange(100.0).view(10, 10)[:, ::2],
        "shared": shared,
        "array": np.arange(50),
        "log": [1, {"x": [2]}],
        "count": Counter("aab"),
        "data": cursor,
        "model": nn.Linear(3, 3),
    }
    expected = {key: value.clone() for key, value in state["model"].state_dict().items()}
    stored = store(state)
    for key in ("w", "view", "shared"):
        state[key].fill_(-1)
    state["array"][:] = -1
    state["log"][1]["x"].append(3)
    state["log"].clear()
    state["count"]["z"] = 9
    cursor.position = 99
    cursor.order.zero_()
    nn.init.zeros_(state["model"].weight)
    state["new"] = 1
    whole = stored.whole()
    assert torch.equal(whole["w"], torch.arange(3000.0))
    assert torch.equal(whole["view"], torch.arange(100.0).view(10, 10)[:, ::2])
    assert torch.equal(whole["shared"], torch.ones(5))
    assert np.array_equal(whole["array"], np.arange(50))
    assert whole["log"] == [1, {"x": [2]}]
    assert whole["count"] == Counter("aab")
    assert whole["data"]["position"] == 3
    assert torch.equal(whole["data"]["order"], torch.arange(10))
    assert same_bits(whole["model"]["weight"], expected["weight"])
    assert "new" not in whole


def test_c94_tied_tensors_are_stored_once_and_come_back_as_one() -> None:
    weight = torch.randn(40, 50)
    captured = capture({"a": weight, "b": weight, "same view": weight[:], "transposed": weight.t(), "part": weight[3:]})
    assert [leaf.alias_of for leaf in captured.content.leaves] == [-1, 0, 0, -1, -1]
    assert [source is None for source in captured.sources] == [False, True, True, False, False]
    groups = [leaf.storage for leaf in captured.content.leaves]
    assert groups[0] == groups[3] == groups[4] >= 0
    stored = store({"a": weight, "b": weight})
    assert stored.layout.bytes_total == weight.nbytes
    whole = stored.whole()
    assert whole["a"] is whole["b"]
    target = {"a": torch.zeros(40, 50), "b": torch.zeros(40, 50)}
    stored.restore(target)
    assert torch.equal(target["a"], weight)
    assert torch.equal(target["b"], weight)


def test_separate_memory_is_in_no_group_and_equal_values_are_no_aliases() -> None:
    leaves = capture([torch.ones(4), torch.ones(4), torch.ones(0), torch.ones(0), np.ones(4)]).content.leaves
    assert {leaf.storage for leaf in leaves} == {-1}
    assert {leaf.alias_of for leaf in leaves} == {-1}


def test_tied_weights_of_a_module() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    model["head"].weight = model["embed"].weight
    stored = store(model)
    assert len(stored.layout.pieces) == 1
    fresh = nn.ModuleDict({"embed": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    fresh["head"].weight = fresh["embed"].weight
    stored.restore(fresh)
    assert same_bits(fresh["head"].weight, model["embed"].weight)
    assert fresh["head"].weight is fresh["embed"].weight


def test_module_with_extra_state_and_buffers() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

        def get_extra_state(self) -> dict[str, Any]:
            return {"seen": self.seen, "hist": torch.full((2,), float(self.seen))}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.seen, self.hist = state["seen"], state["hist"]

    old, new = nn.Sequential(Counting()), nn.Sequential(Counting())
    old[0].seen, old[0].mean = 41, torch.ones(3)
    stored = store(old)
    stored.restore(new)
    assert new[0].seen == 41
    assert torch.equal(new[0].hist, torch.full((2,), 41.0))
    assert torch.equal(new[0].mean, torch.ones(3))
    assert stored.match(new).uncovered == ("0.scratch",), "C95"


def test_stateful_objects_get_their_state_back() -> None:
    fresh = Cursor()
    store({"data": Cursor(7)}).restore({"data": fresh})
    assert fresh.position == 7
    assert torch.equal(fresh.order, torch.arange(10))


def refused() -> dict[str, tuple[Any, str]]:
    dense = torch.ones(2, 2)
    cases: dict[str, tuple[Any, str]] = {
        "meta (C121)": (torch.ones(2, device="meta"), "meta device"),
        "sparse (C120)": (dense.to_sparse(), "sparse_coo"),
        "compressed": (dense.to_sparse_csr(), "sparse_csr"),
        "nested": (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "is nested"),
        "quantized (C120)": (torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), "is quantized"),
        "subclass (C120)": (torch.ones(2).as_subclass(Distance), "subclass, Distance"),
        "lazy": (nn.LazyLinear(2), "is not initialized"),
        "structured array": (np.zeros(2, dtype=[("a", "i4")]), "dtype"),
        "object array": (np.array([None]), "dtype object"),
        "text array": (np.array(["a"]), "dtype <U1"),
        "time array": (np.array([1], dtype="M8[s]"), "dtype datetime64"),
        "masked array": (np.ma.masked_array([1]), "subclass, MaskedArray"),
        "enum (C117)": (Color.RED, "Color"),
        "int enum (C117)": (Level.LOW, "Level"),
        "dataclass (C117)": (Config(), "Config"),
        "namedtuple (C117)": (Point(1, 2), "Point"),
        "path (C117)": (Path("/tmp"), "Path"),
        "set": ({1, 2}, "set"),
        "function": (len, "function"),
        "class with state": (Cursor, "Cursor|type"),
        "generator": (torch.Generator(), "Generator"),
        "dict subclass": (type("Special", (dict,), {})(a=1), "Special"),
    }
    if np.dtype(np.longdouble).itemsize > 8:
        cases["long double"] = (np.ones(1, dtype=np.longdouble), "up to 64 bits")
    if hasattr(torch, "uint4"):
        cases["sub-byte"] = (torch.zeros(2, dtype=torch.uint8).view(torch.uint4), "uint4")
    return cases


@pytest.mark.parametrize("case", refused())
def test_refused_by_name(case: str) -> None:
    value, words = refused()[case]
    with pytest.raises(UsageError, match=rf"(?s)model/deep/1.*({words})"):
        capture({"model": {"deep": [torch.ones(3), value]}})


def test_tensors_of_many_ranks_whose_place_is_unknown_are_not_there_yet() -> None:
    flat = type("FlatParameter", (torch.nn.Parameter,), {"__module__": "torch.distributed.fsdp"})
    spread = flat(torch.ones(4))
    with pytest.raises(NotYetAvailableError, match="w: FlatParameter is spread over many ranks"):
        capture({"w": spread})


@pytest.mark.parametrize("state", [None, {}, [], {"a": {}, "b": [(), None]}, TrainState()], ids=repr)
def test_nothing_in_it(state: object) -> None:
    with pytest.raises(UsageError, match="nothing in it"):
        capture(state)


def test_a_container_that_holds_itself() -> None:
    state: dict[str, Any] = {"a": []}
    state["a"].append(state)
    with pytest.raises(UsageError, match="a/0: this container holds itself"):
        capture(state)
    state = {"a": 1}
    for _ in range(5000):
        state = {"b": state}
    with pytest.raises(UsageError, match="nested at most 100 deep"):
        capture(state)
    twice = [1]
    assert capture({"x": twice, "y": twice}).content.tree == {"x": [1], "y": [1]}


def test_object_whose_state_is_no_dict() -> None:
    class Odd(Cursor):
        def state_dict(self) -> Any:
            return 3

    with pytest.raises(UsageError, match=r"odd: Odd.state_dict\(\) returned int"):
        capture({"odd": Odd()})


def test_environment_names_versions() -> None:
    environment = capture({"a": 1}).content.environment
    assert environment["torch"] == torch.__version__
    assert environment["python"] == sys.version.split()[0]
    assert environment["numpy"] == np.__version__


def test_train_state_components_and_consistency_point() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    state = TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=Cursor(12),
        counters={"tokens": 2**40, "ratio": 0.5, "huge": 2**70, "done": False},
        ema=nn.Linear(2, 2),
        epoch=3,
    )
    content = capture(state).content
    assert [(c.name, c.kind, c.level) for c in content.components] == [
        ("model", "model", "weights"),
        ("optimizer", "optimizer", "training"),
        ("scheduler", "scheduler", "training"),
        ("data", "data", "strict"),
        ("counters", "extra", "training"),
        ("ema", "model", "weights"),
        ("epoch", "extra", "training"),
        ("rng", "rng", "strict"),
    ]
    assert content.consistency == {
        "optimizer.step": 4,
        "scheduler.last_epoch": 4,
        "scheduler._step_count": 5,
        "data.position": 12,
        "counters/tokens": 2**40,
        "epoch": 3,
    }


def test_train_state_refuses_what_has_no_state() -> None:
    with pytest.raises(UsageError, match=r"TrainState\(model=\) takes an object with state_dict.*got Tensor"):
        TrainState(model=torch.ones(2))
    with pytest.raises(UsageError, match=r"TrainState\(scheduler=\)"):
        TrainState(scheduler=[3])
    with pytest.raises(UsageError, match='"rng" is taken'):
        TrainState(model=nn.Linear(1, 1), rng=1)


def test_train_state_gives_and_takes_components() -> None:
    state = TrainState(model=nn.Linear(1, 1), epoch=0)
    state["epoch"] = 4
    assert state["epoch"] == 4
    with pytest.raises(UsageError, match="no component 'epcoh'; it has model, epoch"):
        state["epcoh"] = 5
    fresh = TrainState(model=nn.Linear(1, 1), epoch=0)
    store(state).restore(fresh)
    assert fresh["epoch"] == 4
    assert repr(fresh) == "TrainState(model=Linear, epoch=int)"


def test_where_modules_and_optimizers_stand() -> None:
    model, head = nn.Linear(2, 2), nn.ModuleDict({"out": nn.Linear(2, 1)})
    state = TrainState(
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        data=Cursor(),
        heads={(1, "a"): [head], "count": 1},
        mine=tc.PerRank({"model": nn.Linear(1, 1)}),
    )
    content = capture(state).content
    assert content.modules == {("model",), ("heads", (1, "a"), 0)}
    assert content.optimizers == {("optimizer",)}
    assert capture(model).content.modules == {()}
    assert capture({"model": model, "own": tc.PerRank(torch.optim.SGD(model.parameters()))}).content.optimizers == frozenset()


@pytest.mark.parametrize("ranks", [1, 3])
def test_leaves_of_one_rank_come_last_where_there_are_several_ranks(ranks: int) -> None:
    tied, boxes = torch.full((4,), 2.0), tc.Sharded(torch.ones(2), (8,), (4,))
    own = [tied, torch.zeros(3), tied]
    weight = torch.full((5,), 3.0)
    state = {"own": tc.PerRank({"tensors": own, "shard": boxes}), "w": weight, "same": weight, "part": weight[1:]}
    captured = capture(state, 0, ranks)
    content = captured.content
    names = ["own/tensors/0", "own/tensors/1", "own/tensors/2", "own/shard", "w", "same", "part"]
    place = [3, 4, 5, 6, 0, 1, 2] if ranks > 1 else [0, 1, 2, 3, 4, 5, 6]
    assert [content.leaves[index].path for index in place] == names
    assert [content.leaves[index].alias_of for index in place] == [-1, -1, place[0], -1, -1, place[4], -1]
    assert {index for index, leaf in enumerate(content.leaves) if leaf.storage >= 0} == {place[4], place[6]}
    assert list(content.held) == [place[3]]
    first = [None if parts is None else parts[0].values.flatten()[0].item() for parts in captured.sources]
    assert [first[index] for index in place] == [2.0, 0.0, None, 1.0, 3.0, None, 3.0]
    assert content.tree == {
        "own": PerRankNodes({0: {"tensors": [LeafRef(index) for index in place[:3]], "shard": LeafRef(place[3])}}),
        "w": LeafRef(place[4]),
        "same": LeafRef(place[5]),
        "part": LeafRef(place[6]),
    }

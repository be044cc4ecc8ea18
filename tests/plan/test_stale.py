"""When a save is the one before once more, and when that only looks so. A false alarm is worse than none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from tieredckpt.format.manifest import Component, Piece
from tieredckpt.model.digest import digest
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef, Node
from tieredckpt.plan.stale import Footprint, alarm_text, footprint, stale_leaves


@dataclass(frozen=True)
class State:
    """A model with two parameters and a buffer, and an optimizer that holds the parameters."""

    step: int = 10
    weight: bytes = b"w"
    bias: bytes = b"b"
    lr: float | LeafRef = 0.1
    held: tuple[str, ...] = ("model.weight", "model.bias")
    requires_grad: bool = True
    scaler: dict[str, Node] | None = None
    kind: str = "scaler"
    algorithm: str = "blake3"
    cut: int = 1
    extra: dict[str, Node] = field(default_factory=dict)

    def footprint(self) -> Footprint:
        leaves = [
            Leaf(path="model/weight", dtype="uint8", shape=(2,), requires_grad=self.requires_grad),
            Leaf(path="model/bias", dtype="uint8", shape=(2,), requires_grad=self.requires_grad),
            Leaf(path="model/mean", dtype="uint8", shape=(2,)),
        ]
        group: dict[str, Node] = {"lr": self.lr, "params": list(self.held)}
        tree: dict[str, Node] = {
            "model": {"weight": LeafRef(0), "bias": LeafRef(1), "mean": LeafRef(2)},
            "optimizer": {"state": {}, "param_groups": [group]},
            **self.extra,
        }
        components = [Component(name="model", kind="model", level="weights")]
        if self.scaler is not None:
            tree["scaler"] = self.scaler
            components.append(Component(name="scaler", kind=self.kind, level="training"))  # type: ignore[arg-type]
        pieces = [
            Piece(leaf, (offset,), (2 // self.cut,), 0, 0, 1, "0" * 16, digest(self.algorithm, data + bytes([offset])))  # type: ignore[arg-type]
            for leaf, data in enumerate((self.weight, self.bias, b"mean"))
            for offset in range(self.cut)
        ]
        return footprint(self.step, tree, leaves, components, pieces)


def alarm(before: State, now: State) -> tuple[str, ...]:
    return stale_leaves(before.footprint(), now.footprint())


BOTH = ("model/bias", "model/weight")
SCALE = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}


def test_the_same_parameters_after_more_steps_are_reported_by_name():
    assert alarm(State(10), State(11)) == BOTH
    assert alarm(State(10), State(5000)) == BOTH


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param(State(10), State(11, weight=b"W", bias=b"B"), id="all have changed"),
        pytest.param(State(10), State(11, bias=b"B"), id="one has changed: the other had no gradient"),
        pytest.param(State(10), State(10), id="the same step again: a roll-back, or a second save"),
        pytest.param(State(10), State(9), id="an earlier step"),
        pytest.param(State(10, lr=0.0), State(11, lr=0.0), id="lr 0"),
        pytest.param(State(10, lr=0.0), State(11, lr=0.1), id="the first step of a warm-up: lr was 0 during it"),
        pytest.param(State(10, lr=0.1), State(11, lr=0.0), id="the schedule has come to its end"),
        pytest.param(State(10, lr=-0.1), State(11, lr=math.nan), id="no learning rate"),
        pytest.param(State(10, lr=LeafRef(2)), State(11, lr=LeafRef(2)), id="lr is a tensor: unknown"),
        pytest.param(State(10, requires_grad=False), State(11, requires_grad=False), id="frozen"),
        pytest.param(State(10, held=()), State(11, held=()), id="held by no optimizer"),
        pytest.param(State(10, held=("other.weight",)), State(11, held=("other.weight",)), id="other names"),
        pytest.param(State(10, held=("model.mean",)), State(11, held=("model.mean",)), id="a buffer is no parameter"),
        pytest.param(State(10, held=("model.bias",)), State(11, held=("model.weight",)), id="watched in one of them only"),
        pytest.param(State(10), State(11, algorithm="sha256"), id="other digests"),
        pytest.param(State(10), State(11, cut=2), id="cut differently"),
        pytest.param(State(10, scaler=SCALE), State(11, scaler=SCALE | {"scale": 512.0}), id="a scaler has skipped the step"),
        pytest.param(State(10), State(11, scaler=SCALE), id="a scaler is new"),
        pytest.param(State(10, scaler=SCALE), State(11), id="a scaler is gone"),
        pytest.param(
            State(10, scaler={"scale": LeafRef(2), "growth_tracker": 0}), State(11, scaler={"scale": LeafRef(2), "growth_tracker": 0}),
            id="a scale that is a tensor: unknown",
        ),
        pytest.param(State(10, scaler={"own": 1}), State(11, scaler={"own": 1}), id="a scaler of an unknown kind"),
    ],
)  # fmt: skip
def test_there_is_nothing_to_report(before: State, now: State):
    assert alarm(before, now) == ()


@pytest.mark.parametrize(
    "scaler",
    [
        pytest.param({**SCALE, "_growth_tracker": 8}, id="it has counted a good step"),
        pytest.param({**SCALE, "scale": 2048.0, "_growth_tracker": 0}, id="it has grown"),
    ],
)
def test_a_scaler_that_has_not_skipped_is_no_excuse(scaler: dict[str, Node]):
    assert alarm(State(10, scaler=SCALE), State(11, scaler=scaler)) == BOTH


def test_a_disabled_scaler_and_things_that_are_no_scaler_are_no_excuse():
    assert alarm(State(10, scaler={}), State(11, scaler={})) == BOTH
    extra: dict[str, Node] = {"image": {"scale": 2.0}}
    assert alarm(State(10, extra=extra), State(11, extra={"image": {"scale": 1.0}})) == BOTH


def test_only_what_is_watched_in_both_is_compared():
    """More was unfrozen in between: what was trained before is what tells."""
    assert alarm(State(10, held=("model.weight",)), State(11)) == ("model/weight",)
    assert alarm(State(10, held=("model.weight",)), State(11, bias=b"B")) == ("model/weight",)


def test_of_tied_parameters_the_one_that_has_the_bytes_is_watched():
    leaves = [
        Leaf(path="model/head", dtype="uint8", shape=(1,), requires_grad=True),
        Leaf(path="model/embed", dtype="uint8", shape=(1,), requires_grad=True, alias_of=0),
        Leaf(path="model/empty", dtype="uint8", shape=(0,), requires_grad=True),
    ]
    tree: Node = {
        "model": {"head": LeafRef(0), "embed": LeafRef(1), "empty": LeafRef(2)},
        "optimizers": [{"param_groups": [{"lr": 1, "params": ["model.embed", "model.empty"]}]}],
    }
    piece = Piece(0, (0,), (1,), 0, 0, 1, "0" * 16, digest("blake3", b"x"))
    found = footprint(1, tree, leaves, (), [piece])
    assert set(found.watched) == {"model/head"}


@pytest.mark.parametrize(
    "groups",
    [None, 3, [], [3], [{"lr": 0.1}], [{"params": ["model.weight"]}], [{"lr": "0.1", "params": ["model.weight"]}],
     [{"lr": 0.1, "params": [0, 1]}], [{"lr": 0.1, "params": "model.weight"}]],
)  # fmt: skip
def test_what_only_looks_like_an_optimizer_watches_nothing(groups: Node):
    tree: Node = {"model": {"weight": LeafRef(0)}, "optimizer": {"param_groups": groups}}
    leaf = Leaf(path="model/weight", dtype="uint8", shape=(1,), requires_grad=True)
    piece = Piece(0, (0,), (1,), 0, 0, 1, "0" * 16, digest("blake3", b"x"))
    assert footprint(1, tree, [leaf], (), [piece]).watched == {}


def test_the_text_names_steps_and_a_few_parameters():
    text = alarm_text(State(10).footprint(), 11, [f"model/{n}" for n in range(9)])
    for part in ("step 11", "step 10", "model/0", "model/2", "and 6 more"):
        assert part in text
    assert "model/3" not in text


@pytest.mark.parametrize("spoil", [lambda s: replace(s, weight=b"W"), lambda s: replace(s, step=10)])
def test_the_alarm_is_about_this_pair_alone(spoil: Callable[[State], State]):
    assert alarm(State(10), State(11))
    assert not alarm(State(10), spoil(State(11)))

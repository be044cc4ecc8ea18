"""Load: carry out a match with the landed bytes. Last hop of a restore.

What can be wrong has been looked for before: `match` has compared, the engine has verified, `check_landed` has counted. What is
left to fail is the `load_state_dict` of an object that refuses its state, as a data loader does that was given other data. So objects
that are not torch's own are asked first, while nothing else has been touched (I13); the error says what was loaded already. Random
number generators come last, because loading other things may draw from them (C80).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import assert_never, cast

import torch
from torch.autograd.graph import increment_version

from tieredckpt.errors import MismatchError, UsageError
from tieredckpt.model.tree import Path, format_path
from tieredckpt.plan.reading import LandedPieces
from tieredckpt.pytorch.binding import (
    Binding,
    Fill,
    IntoDict,
    IntoList,
    IntoModule,
    IntoObject,
    IntoOptimizer,
    IntoPerRank,
    IntoRng,
    Keep,
    NewTuple,
    NewValue,
    Redistribute,
    walk,
)
from tieredckpt.pytorch.cycles import cycle_collection_paused
from tieredckpt.pytorch.differences import capped
from tieredckpt.pytorch.landing import Landing, check_landed
from tieredckpt.pytorch.match import Match
from tieredckpt.pytorch.match_ranks import redistributed
from tieredckpt.pytorch.objects import is_stateful, kind_of
from tieredckpt.pytorch.optimizer import load_named_state
from tieredckpt.pytorch.rng import restore_rng
from tieredckpt.pytorch.tensors import is_many_ranks
from tieredckpt.pytorch.transfer import Transfer


@cycle_collection_paused()
def load(match: Match, landed: LandedPieces, executor: Executor | None = None) -> object:
    """Overwrite the target of the match. Returns the restored tree: the target's own containers, tensors and objects, and what is
    new in them; the values of a TrainState come as a dict by name. `executor` copies the bytes; None: the caller's thread.

    MismatchError for a match with differences: nothing was loaded. UsageError when an object refuses its state.
    """
    if match.differences:
        raise MismatchError(match.summary(), [str(difference) for difference in match.differences])
    check_landed(match.leaves, landed, match.needed)
    with torch.no_grad(), Transfer(executor) as transfer:
        loading = _Loading(Landing(match.leaves, landed, transfer), transfer)
        loading.redistribute(match.binding)
        loading.load_objects(match.binding)
        restored = loading.carry_out(match.binding)
    if loading.rng is not None:
        restore_rng(loading.rng.node, loading.rng.skip)
    return restored


class _Loading:
    def __init__(self, landing: Landing, transfer: Transfer) -> None:
        self.rng: IntoRng | None = None
        self._landing = landing
        self._transfer = transfer
        self._touched: list[str] = []
        self._made: dict[int, object] = {}

    def redistribute(self, binding: Binding) -> None:
        """Ask the functions that make the value of this rank of those of others, while nothing has been touched."""
        parts = [part for part in walk(binding) if isinstance(part, Redistribute)]
        values = [{rank: self._landing.values(node) for rank, node in part.node.by_rank.items()} for part in parts]
        self._transfer.finish()
        for part, stored in zip(parts, values, strict=True):
            self._made[id(part)] = redistributed(part.function, stored, part.rank, part.ranks, part.path)

    def load_objects(self, binding: Binding) -> None:
        """Every object but modules and optimizers: those that may refuse before those of which `match` has compared the settings."""
        objects = [part for part in walk(binding) if isinstance(part, IntoObject)]
        for part in sorted(objects, key=lambda part: kind_of(part.target) in ("scheduler", "scaler")):
            self._into_object(part)
        for made in (part for part in walk(binding) if isinstance(part, Redistribute)):
            if is_stateful(made.target.value):
                give = partial(made.target.value.load_state_dict, cast("dict[str, object]", self._made[id(made)]))
                self._hand_over(made.path, made.target.value, give)

    def _into_object(self, binding: IntoObject) -> None:
        state = self._landing.values(binding.node)
        assert isinstance(state, dict)
        self._hand_over(binding.path, binding.target, lambda: binding.target.load_state_dict(state))

    def carry_out(self, binding: Binding) -> object:
        """Do what the binding says; returns what now stands at its place."""
        match binding:
            case Keep():
                return binding.value
            case Fill():
                self._landing.fill(binding.shard, binding.leaf)
                _note_change(binding.target)
                return binding.target
            case NewValue():
                return self._landing.values(binding.node)
            case IntoDict():
                return self._into_dict(binding)
            case IntoList():
                binding.target[:] = [self.carry_out(element) for element in binding.elements]
                return binding.target
            case NewTuple():
                return tuple(self.carry_out(element) for element in binding.elements)
            case IntoModule():
                return self._into_module(binding)
            case IntoOptimizer():
                return self._into_optimizer(binding)
            case IntoObject():
                return binding.target  # loaded by `load_objects`, first
            case IntoPerRank():
                binding.target.value = self.carry_out(binding.value)
                return binding.target
            case Redistribute():
                if not is_stateful(binding.target.value):
                    binding.target.value = self._made[id(binding)]
                return binding.target  # an object has been given its state by `load_objects`
            case IntoRng():
                raise AssertionError("random number generators are restored by `load`, last")
            case _:
                assert_never(binding)

    def _into_dict(self, binding: IntoDict) -> object:
        for key, entry in binding.entries:
            if isinstance(entry, IntoRng):
                self.rng = entry
            else:
                binding.target[key] = self.carry_out(entry)
        return binding.target

    def _into_module(self, binding: IntoModule) -> object:
        """The tensors of the state are the module's own memory; where they are not, the module copies from them."""
        state = binding.state
        self._touched.append(format_path(binding.path))
        names = {key for key, _ in binding.entries}
        for key, entry in binding.entries:
            state[key] = self.carry_out(entry)
        for key in [key for key in state if key not in names]:
            del state[key]
        self._hand_over(binding.path, binding.target, lambda: binding.target.load_state_dict(state, strict=binding.complete))
        return binding.target

    def _into_optimizer(self, binding: IntoOptimizer) -> object:
        state = self._landing.values(binding.node)
        assert isinstance(state, dict)
        self._touched.append(format_path(binding.path))
        state["state"] = self.carry_out(binding.state)
        self._hand_over(binding.path, binding.target, lambda: load_named_state(binding.target, state, binding.names))
        return binding.target

    def _hand_over(self, path: Path, target: object, give: Callable[[], object]) -> None:
        """Let an object take its state, once every byte of it is there."""
        self._transfer.finish()
        try:
            give()
        except Exception as error:
            if self._touched:
                advice = f"The target is PARTLY loaded, with {capped(self._touched)}: do not train on; make a new one and restore again"
            else:
                advice = "Nothing else was loaded: give an object that takes this state, and restore again"
            raise UsageError(
                f"{format_path(path)}: load_state_dict of {type(target).__name__} refused its stored state "
                f"({type(error).__name__}: {error}). {advice}"
            ) from error
        self._touched.append(format_path(path))


def _note_change(target: object) -> None:
    """A DTensor has a version of its own, apart from the one of the tensor that it holds, which autograd looks at."""
    if isinstance(target, torch.Tensor) and is_many_ranks(target):
        increment_version(target)

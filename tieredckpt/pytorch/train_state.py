"""TrainState: the named components of a training run.

The names decide what a resume restores at which level, and tell the optimizer whose parameters it holds. The states of the random
number generators are added at capture.
"""

from __future__ import annotations

from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import Component
from tieredckpt.pytorch.objects import LEVEL_OF_KIND, Kind, is_stateful, kind_of
from tieredckpt.pytorch.per_rank import PerRank

RNG = "rng"
"""Name of the component that capture adds."""

_MAX_COMPONENTS = 500
_MAX_NAME_CHARS = 255


class TrainState:
    """Model, optimizer, scheduler, scaler, data and anything else, by name.

    model, optimizer, scheduler, scaler  one object, or a dict, list or tuple of them
    data    sampler or loader: anything with `state_dict` and `load_state_dict`, or plain values
    more    any name: objects, tensors, plain values such as `counters={"tokens": 0}`

    Restoring overwrites tensors in place, replaces plain values in their dict or list, and calls `load_state_dict` of objects. A
    component that is itself a plain value is replaced here: read it as `state["name"]`. Levels: "weights" restores modules,
    "training" all but data and random numbers, "strict" everything.

    Not stored: functions (the lambdas of `LambdaLR` stay the target's own), gradients (save between `optimizer.step()` and the
    next backward pass), and the state of worker processes of a data loader. Their base seed is drawn from torch's generator, which is
    stored: a loader that starts after the restore seeds its workers as the uninterrupted run would have.
    """

    def __init__(
        self,
        *,
        model: object = None,
        optimizer: object = None,
        scheduler: object = None,
        scaler: object = None,
        data: object = None,
        **more: object,
    ) -> None:
        if RNG in more:
            raise UsageError('TrainState: the name "rng" is taken; the random number generators are included by themselves')
        if len(more) > _MAX_COMPONENTS or any(len(name) > _MAX_NAME_CHARS for name in more):
            raise UsageError(
                f"TrainState takes up to {_MAX_COMPONENTS} components with names of up to {_MAX_NAME_CHARS} characters: put many things "
                "into one dict"
            )
        named: dict[Kind, object] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        for kind, value in named.items():
            if value is not None and not _only_stateful(value):
                raise UsageError(
                    f"TrainState({kind}=) takes an object with state_dict and load_state_dict, or a dict, list or tuple of such "
                    f"objects, got {type(value).__name__}; give other values a name of their own"
                )
        named["data"] = data
        self.components: dict[str, object] = {kind: value for kind, value in named.items() if value is not None} | more
        self._kinds: dict[str, Kind] = {kind: kind for kind in named} | {name: kind_of(value) for name, value in more.items()}

    def __getitem__(self, name: str) -> object:
        return self.components[name]

    def __setitem__(self, name: str, value: object) -> None:
        """Give a component that exists another value."""
        if name not in self.components:
            raise UsageError(f"TrainState has no component {name!r}; it has {', '.join(self.components) or 'none'}")
        self.components[name] = value

    def __repr__(self) -> str:
        return f"TrainState({', '.join(f'{name}={type(value).__name__}' for name, value in self.components.items())})"

    def describe(self) -> tuple[Component, ...]:
        """Name, kind and level of every component, the random number generators last."""
        kinds: dict[str, Kind] = {name: self._kinds[name] for name in self.components} | {RNG: "rng"}
        return tuple(Component(name=name, kind=kind, level=LEVEL_OF_KIND[kind]) for name, kind in kinds.items())


def _only_stateful(value: object) -> bool:
    match value:
        case dict():
            return all(map(_only_stateful, value.values()))
        case list() | tuple():
            return all(map(_only_stateful, value))
        case PerRank():
            return _only_stateful(value.value)
        case _:
            return is_stateful(value)

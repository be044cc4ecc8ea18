"""The consistency point: counters of a state that must agree about how far training has come.

For people and for checks by name ("optimizer.step is 5 but scheduler.last_epoch is 4"). Read from the neutral tree where the
numbers are plain; an optimizer's step counts are tensors and are read from the live object. It is a summary: what does not fit in
the manifest's field for it (a seed of 64 bits, the ten thousand numbers of a vocabulary) is left out here, and stored in the tree
like everything else. All ranks must find the same: the steps of a ZeroRedundancyOptimizer, of which a rank has some or none, are left out.
"""

from __future__ import annotations

from itertools import islice

import torch

from tieredckpt.model.fields import MAX_INT
from tieredckpt.model.tree import Path, format_path
from tieredckpt.pytorch.objects import OptimizerLike, is_optimizer, is_stateful
from tieredckpt.pytorch.zero import is_zero

_MAX_NAMES = 1000
_MAX_NAME_CHARS = 255
_MAX_PLAIN_DEPTH = 2
"""Plain integers count at the top and in a dict there, such as `counters`; deeper ones are data."""
_COUNTERS = ("last_epoch", "_step_count", "epoch", "step", "samples", "tokens", "position", "batches", "micro_step")
"""Names under which schedulers and data loaders keep their place."""


def consistency_point(state: object, tree: object) -> dict[str, int | float | str]:
    """Name of counter → its value, for every optimizer, every other stateful object, and plain integers near the top of a state."""
    fitting = ((name, value) for name, value in _counters(state, tree, ()).items() if len(name) <= _MAX_NAME_CHARS)
    return dict(islice(fitting, _MAX_NAMES))


def _counters(state: object, tree: object, path: Path) -> dict[str, int | float | str]:
    found: dict[str, int | float | str] = {}
    match state, tree:
        case _ if is_optimizer(state):
            step = None if is_zero(state) else optimizer_step(state)
            found |= {} if step is None else {f"{format_path(path)}.step": step}
        case _, dict() if is_stateful(state):
            found |= {f"{format_path(path)}.{name}": tree[name] for name in _COUNTERS if _is_count(tree.get(name))}
        case dict(), dict():
            for key, value in state.items():
                found |= _counters(value, tree[key], (*path, key))
        case ((list() | tuple()), (list() | tuple())):
            for index, (value, node) in enumerate(zip(state, tree, strict=True)):
                found |= _counters(value, node, (*path, index)) if is_stateful(value) else {}
        case int(), int() if 0 < len(path) <= _MAX_PLAIN_DEPTH and _is_count(tree):
            found[format_path(path)] = tree
    return found


def optimizer_step(optimizer: OptimizerLike) -> int | None:
    """The largest step count of any parameter; None for an optimizer that has none or does not count."""
    state = optimizer.state_dict()["state"]
    assert isinstance(state, dict)
    counts = [entry["step"] for entry in state.values() if isinstance(entry, dict) and "step" in entry]
    steps = [int(count) for count in counts if isinstance(count, int | float)]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for count in counts:
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            by_device.setdefault(count.device, []).append(count.detach().reshape(()).to(torch.float64))
    steps += [int(torch.stack(group).max().item()) for group in by_device.values()]
    return max(steps, default=None)


def _is_count(value: object) -> bool:
    return type(value) is int and abs(value) <= MAX_INT

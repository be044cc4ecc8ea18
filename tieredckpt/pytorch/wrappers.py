"""Wrappers: modules around a module that say nothing of their own, and the names without them.

Between torch's names (`module.layers.0.weight` under DistributedDataParallel, `_orig_mod.layers.0.weight` under torch.compile) and
the stored ones (`layers.0.weight`). The failure it exists for: a snapshot that fits only a job that was wrapped in the same way, since
every name in it is another one. So a wrapper, wherever in a module it is, leaves no trace in a name.

Also here: what a module of fully_shard (FSDP2) needs before its parameters are asked for, the module that cannot be stored, FSDP1, and
the buffers of which a rank has only a copy, that DistributedDataParallel is about to write over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn
from torch.distributed import ProcessGroup

from tieredckpt.errors import UsageError

_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")
_INNER = {
    _DDP: "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper"): "_checkpoint_wrapped_module",
}
"""Class → under which name it has the module inside. By name: importing them costs seconds, and who has one has imported it."""


def plain_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Each of the names that the module gives → the one that the module inside of all wrappers would give.

    UsageError where two become one: a wrapper that has been given a parameter or buffer of its own.
    """
    plain = {name: _plain_name(module, name) for name in names}
    origin: dict[str, str] = {}
    for name, short in plain.items():
        if origin.setdefault(short, name) != name:
            raise UsageError(
                f"{origin[short]!r} and {name!r} of {type(module).__name__} are both stored as {short!r}: rename one"
            )
    return plain


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters by plain name, also under further names.

    After a forward pass without a backward pass a module of fully_shard may have gathered parameters in place of its own, which no
    optimizer knows. They are given up here, as its `state_dict()` does too.
    """
    for inner in module.modules():
        if is_fully_sharded(inner):
            inner.reshard()  # type: ignore[operator] # a method that fully_shard gave it
    parameters = dict(module.named_parameters(remove_duplicate=False))
    plain = plain_names(module, parameters)
    yield from ((plain[name], parameter) for name, parameter in parameters.items())


def written_over(module: nn.Module, group: ProcessGroup | None) -> frozenset[str]:
    """Plain names of the buffers that another rank's are copied over before they are used: by DistributedDataParallel, at its next step.

    Between two steps each rank has its own (statistics of its own batches), and only those of the first rank of the group count. None on
    that rank; none where the user has turned that off, or has replaced it by a hook; none where that rank is not one of `group` (None:
    of all), whose ranks save the module without it.
    """
    found: set[str] = set()
    for prefix, ddp in module.named_modules():
        if not _is_ddp(ddp) or not getattr(ddp, "broadcast_buffers", False) or hasattr(ddp, "buffer_hook"):
            continue
        if not _counts_elsewhere(ddp, group):
            continue
        own = ddp.get_submodule("module")
        ignored: Collection[str] = getattr(ddp, "parameters_to_ignore", ())
        names = (name for name, _ in own.named_buffers(remove_duplicate=False) if name not in ignored)
        found.update(_plain_name(module, ".".join(filter(None, (prefix, "module", name)))) for name in names)
    return frozenset(found)


def _counts_elsewhere(ddp: nn.Module, group: ProcessGroup | None) -> bool:
    """Is the first rank of this DistributedDataParallel another one of `group`?"""
    own = ddp.process_group
    if not isinstance(own, ProcessGroup):
        return False
    try:
        first = torch.distributed.get_global_rank(own, 0)
        return first != torch.distributed.get_rank() and first in torch.distributed.get_process_group_ranks(group)
    except ValueError:  # a group that has been destroyed: nothing is copied any more
        return False


def is_fully_sharded(module: nn.Module) -> bool:
    """A module of FSDP2: its class is made by torch.distributed, its parameters are DTensors."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def module_problem(module: nn.Module) -> str | None:
    """Why it cannot be saved or restored; None if it can. Asked before its `state_dict()`, which in FSDP1 may be a collective."""
    if any(_is_class(inner, "torch.distributed.fsdp", "FullyShardedDataParallel") for inner in module.modules()):
        return (
            "FullyShardedDataParallel (FSDP1) has its parameters in flat buffers that are spread over many ranks, and only a "
            "collective tells what is where: use fully_shard (FSDP2), or declare the parts with Sharded"
        )
    known = is_fully_sharded(module) or _inner_name(module) is not None
    if known or not type(module).__module__.startswith("torch.distributed"):
        return None
    return (
        f"{type(module).__name__} is spread over many ranks in a way that this version does not know: give its parts with Sharded"
    )


def _plain_name(module: nn.Module, name: str) -> str:
    """Follows the name through the modules. Some wrappers take themselves out of their names: the inner module is asked then."""
    kept: list[str] = []
    here: nn.Module | None = module
    for part in name.split("."):
        while here is not None and (inner := _inner_name(here)) is not None and part != inner and not _has(here, part):
            here = here._modules[inner]
        if here is None or part != _inner_name(here):
            kept.append(part)
        here = None if here is None else here._modules.get(part)
    return ".".join(kept)


def _inner_name(module: nn.Module) -> str | None:
    for base in type(module).__mro__:
        inner = _INNER.get((base.__module__, base.__name__))
        if inner is not None:
            return inner
    return None


def _is_ddp(module: nn.Module) -> bool:
    return any((base.__module__, base.__name__) == _DDP for base in type(module).__mro__)


def _has(module: nn.Module, part: str) -> bool:
    return part in module._parameters or part in module._buffers or part in module._modules


def _is_class(module: nn.Module, package: str, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.startswith(package) for base in type(module).__mro__)

"""`PerRank`: state that belongs to one rank of a job, and what becomes of it in a job of another size.

A position in a shard of the data, a cache, the random numbers of one rank: every rank saves its own value at the same path, and takes
its own back. Where the stored ranks are not those of the job that restores, nothing fits by itself; the user has to say what to do,
and until then it is refused. The failure this exists for: rank 3 going on with the data position of rank 0, unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Literal, TypeAlias, TypeVar

from tieredckpt.errors import UsageError

Value = TypeVar("Value")

Redistribution: TypeAlias = Callable[[dict[int, object], int, int], object]
"""(stored values by rank, this rank, ranks of this job) → the value of this rank."""

OnResize: TypeAlias = Literal["refuse", "drop", "by_index"] | Redistribution
"""What to do with values of other ranks than those of this job; see `PerRank`."""

_POLICIES = ("refuse", "drop", "by_index")


class PerRank(Generic[Value]):
    """State that every rank has for itself: `TrainState(..., cursor=PerRank({"shard": 3, "row": 0}))`.

    value      any state: tensors, plain values, containers, objects with a state dict. Restoring fills its tensors in place and puts
               a new plain value here. No PerRank may be inside, and none in what an object's `state_dict` returns: wrap the object.
    on_resize  when the ranks that saved are not the ranks of this job:
               "refuse"    a difference (kind "world"), which stops a restore
               "drop"      every rank keeps what its target has
               "by_index"  rank r takes the value of rank r; where there is none, it keeps what the target has
               function    `function(values, rank, ranks)` returns the value of this rank. `values`: every stored value by rank, tensors
                           whole and on the CPU. What it returns takes the place of `value`, or is given to its `load_state_dict`
                           if it is an object. Called on every rank, before anything of the target is changed.

    Which one was followed is in the report of the restore. UsageError for an `on_resize` that is none of these.
    """

    def __init__(self, value: Value, on_resize: OnResize = "refuse") -> None:
        self.value = value
        self.on_resize = checked_policy(on_resize)

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class PerRankValues(Mapping[int, object]):
    """Rank → the value that it stored, ascending: what stands for a `PerRank` in a state that is loaded without a target."""

    def __init__(self, values: Mapping[int, object]) -> None:
        self._values = dict(sorted(values.items()))

    def __getitem__(self, rank: int) -> object:
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"PerRankValues({self._values!r})"


def checked_policy(policy: OnResize) -> OnResize:
    """The policy itself. UsageError if it is none."""
    if callable(policy) or (isinstance(policy, str) and policy in _POLICIES):
        return policy
    raise UsageError(f"on_resize takes {', '.join(map(repr, _POLICIES))} or a function of (values, rank, ranks), got {policy!r}")

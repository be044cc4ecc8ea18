"""What the checks are written with: expectations whose messages speak of the store, and data that can be made again."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tieredckpt.store.base import ObjectStat, ObjectStore
from tieredckpt.testing.store_checks.bench import CheckFailed

_T = TypeVar("_T")
_P = ParamSpec("_P")
_E = TypeVar("_E", bound=Exception)

GRACE_S = 0.05
"""How long a wrong store is given to use memory that is no longer its own."""

_SHOWN = 60
_TOGETHER_TIMEOUT_S = 60.0


def expect(condition: bool, otherwise: str) -> None:
    """CheckFailed with `otherwise` unless the condition holds."""
    if not condition:
        raise CheckFailed(otherwise)


def expect_bytes(seen: bytes | bytearray | memoryview | None, wanted: bytes | bytearray | memoryview, what: str) -> None:
    """CheckFailed unless `seen` has the wanted bytes; says where they differ first."""
    if seen is None:
        raise CheckFailed(f"{what}: nothing is stored, {len(wanted)} bytes were expected")
    seen, wanted = bytes(seen), bytes(wanted)
    if seen == wanted:
        return
    first = next((n for n, (a, b) in enumerate(zip(seen, wanted, strict=False)) if a != b), min(len(seen), len(wanted)))
    raise CheckFailed(
        f"{what}: {len(seen)} bytes, {len(wanted)} were expected; they differ from byte {first} on: "
        f"{seen[first : first + 20]!r} instead of {wanted[first : first + 20]!r}"
    )


def expect_keys(seen: Iterable[str], wanted: Sequence[str], what: str) -> None:
    """CheckFailed unless exactly the wanted keys come, in this order; says which are missing, too many or out of order."""
    found, wanted = list(seen), list(wanted)
    if found == wanted:
        return
    missing = sorted(set(wanted) - set(found))
    extra = sorted(set(found) - set(wanted))
    if missing or extra:
        raise CheckFailed(
            f"{what}: {len(found)} keys, {len(wanted)} were expected; missing: {_few(missing)}; should not be there: {_few(extra)}"
        )
    if len(found) != len(set(found)):
        raise CheckFailed(f"{what}: keys come more than once: {_few(sorted({key for key in found if found.count(key) > 1}))}")
    place = next(n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
    raise CheckFailed(f"{what}: not in key order: {found[place]!r} comes where {wanted[place]!r} belongs")


def expect_error(errors: type[_E], what: str, call: Callable[_P, object], *arguments: _P.args, **named: _P.kwargs) -> _E:
    """The error of that class that `call` raises; CheckFailed if it returns or raises anything else."""
    try:
        result = call(*arguments, **named)
    except errors as error:
        return error
    except Exception as other:
        raise CheckFailed(f"{what} must raise {errors.__name__}, it raised {type(other).__name__}: {other}") from other
    raise CheckFailed(f"{what} must raise {errors.__name__}, it returned {_short(result)}")


def hooked(hook: _T | None, name: str) -> _T:
    """The hook; CheckFailed where an ability is declared and the bench has no way to it."""
    if hook is None:
        raise CheckFailed(f"the ability is declared, and the bench has no hook `{name}` to check it with")
    return hook


def listed(store: ObjectStore, prefix: str = "", *, after: str = "") -> list[str]:
    return [item.key for item in store.list(prefix, after=after)]


def expect_absent(store: ObjectStore, key: str, what: str) -> None:
    """CheckFailed if `stat` or `list` show an object at the key."""
    found = store.stat(key)
    expect(found is None, f"{what}: stat({key!r}) still finds {_size(found)} bytes")
    expect(key not in listed(store), f"{what}: the list still has {key!r}")


def noise(size: int, seed: int | str) -> bytes:
    """Bytes that nothing can make smaller, the same for the same seed."""
    return random.Random(seed).randbytes(size)


def pages(size: int, *, seed: int) -> memoryview:
    """Page-aligned memory filled with `noise`."""
    memory = memoryview(mmap.mmap(-1, max(1, size)))[:size]
    memory[:] = noise(size, seed)
    return memory


def together(count: int, act: Callable[[int], _T]) -> list[_T]:
    """Run `act(0) … act(count - 1)` at the same moment, each in its own thread."""
    barrier = threading.Barrier(count)

    def run(n: int) -> _T:
        barrier.wait(_TOGETHER_TIMEOUT_S)
        return act(n)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def store_all(raw_set: Callable[[str, bytes], None], keys: Sequence[str], data: bytes = b"x") -> None:
    """Store the same bytes under many keys, several at a time."""
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda key: raw_set(key, data), keys):
            pass


def _size(stat: ObjectStat | None) -> int:
    return -1 if stat is None else stat.size


def _few(keys: Sequence[str]) -> str:
    if not keys:
        return "none"
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(map(repr, keys[:3])) + more


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"

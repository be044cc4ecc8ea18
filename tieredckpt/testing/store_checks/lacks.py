"""Showing that an ability which is declared missing is really missing.

The failure it exists for: a declaration that was true once. A backend that has learned something is told so, and its declaration
is changed; then the checks of that ability guard it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tieredckpt.errors import ConflictError
from tieredckpt.store.base import Created
from tieredckpt.testing.store_checks.bench import Bench, CheckFailed
from tieredckpt.testing.store_checks.tools import expect


def _cannot_tell_conflicts(bench: Bench) -> None:
    bench.store.put("lack/conflict", [b"first"])
    try:
        bench.store.put("lack/conflict", [b"other"])
    except ConflictError as error:
        raise CheckFailed("`put` notices other bytes under its key after all: declare tells_conflicts=True") from error


def _several_winners(bench: Bench) -> None:
    outcomes = [bench.store.create("lack/winner", data) for data in (b"first", b"second")]
    expect(
        outcomes == [Created.CREATED, Created.CREATED],
        "a second create of a key is refused: declare one_winner=True, or say in cannot_show why a race cannot be shown",
    )


def _forgets_when_killed(bench: Bench) -> None:
    if bench.hooks.kill is None:
        raise CheckFailed("survives_kill is declared missing: give the bench the hook `kill`, or say why this cannot be shown")
    with bench.hooks.kill({f"lack/{n}": b"gone" for n in range(8)}) as killed:
        kept = [key for key in killed.acknowledged if killed.store.stat(key) is not None]
    expect(not kept, f"{len(kept)} acknowledged objects outlived kill −9 after all: declare survives_kill=True")


LACKS: Mapping[str, Callable[[Bench], None]] = {
    "tells_conflicts": _cannot_tell_conflicts,
    "one_winner": _several_winners,
    "survives_kill": _forgets_when_killed,
}

"""What is retired, swept and deleted, and what has to stay."""

from __future__ import annotations

from tests.seeded_bugs.bug import LIVES, Exploration, Known, SeededBug, nodes

COLLECTOR = "tieredckpt/engine/collector.py"
GC = "tieredckpt/plan/gc.py"
LINEAGE = "tieredckpt/plan/lineage.py"

BUGS = (
    SeededBug(
        "log record deleted by GC",
        COLLECTOR,
        "    failures = store.delete(sample) if sample else ()\n",
        "    failures = store.delete([*sample, keys.record_key(1)]) if sample else ()\n",
        (nodes("tests/engine/test_collection.py"), LIVES),
        Known.RECORD_DELETED,
    ),
    SeededBug(
        "live packs wanted for a sweep",
        GC,
        "        if key not in named_by_live and key not in state.condemned_packs\n",
        "        if key not in state.condemned_packs\n",
        (nodes("tests/plan/test_gc.py"),),
        blind="not within 75 seeds: the log refuses it",
    ),
    SeededBug(
        "pins ignored by retention",
        GC,
        "    if name in state.pinned:\n",
        "    if name in state.pinned and state.hold:\n",
        (nodes("tests/plan/test_gc.py"),),
        Known.PINS_IGNORED,
        blind="not within 75 seeds: the log refuses it",
    ),
    SeededBug(
        "bytes first, record last",
        COLLECTOR,
        "            self._refresh_for_session()\n            for start in range(0, len(plan.retire), _RETIRE_AT_ONCE):\n",
        "            self._tier.store.delete([item.subject for item in plan.sweep_packs])\n"
        "            self._refresh_for_session()\n            for start in range(0, len(plan.retire), _RETIRE_AT_ONCE):\n",
        (nodes("tests/engine/test_collection.py"), LIVES),
    ),
    SeededBug(
        "a fenced collector goes on",
        COLLECTOR,
        "        if self._session is not None and state.newest != self._session:\n            raise FencedError(",
        "        if self._session is not None and state.seq < 0:\n            raise FencedError(",
        (nodes("tests/engine/test_sessions.py"),),
        blind="not within 150 seeds: the log refuses its records",
    ),
    SeededBug(
        "what may still be sent is swept as a leftover",
        LINEAGE,
        "    return not _may_still_be_sent(state, snapshot)\n",
        "    return True\n",
        (nodes("tests/plan/test_gc.py"), LIVES),
    ),
    SeededBug(
        "what nobody can send any more is kept for ever",
        LINEAGE,
        "    return wanted and not _behind_head(state, snapshot)\n",
        "    return wanted\n",
        (nodes("tests/plan/test_gc.py"), Exploration("restart on the same node"), LIVES),
    ),
    SeededBug(
        "condemned packs of what was never committed stay for ever",
        GC,
        "    packs = (item for found in stored.packs.values() for item in found.items() if item[0] in state.condemned_packs)\n",
        "    packs = (item for owner, found in stored.packs.items() if owner in state.retired for item in found.items())\n",
        (nodes("tests/plan/test_gc.py", "tests/engine/test_leftovers.py"), LIVES),
    ),
    SeededBug(
        "what still has to be sent is evicted",
        "tieredckpt/plan/uploads.py",
        "    return frozenset(name for name in queue(local, remote, policy, unsendable) if not _is_superseded(name, local, remote))\n",
        "    return frozenset()\n",
        (nodes("tests/plan/test_uploads.py"), Exploration("eviction"), LIVES),
    ),
)

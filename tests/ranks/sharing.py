"""What ranks do that read for each other while one of them dies: functions of (rank, ranks, **args). See `kit`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tieredckpt as tc
from tests.joint.kit import content, sharded
from tieredckpt.engine.council import Council

ROWS = 20_000
SETTINGS = tc.Settings(piece_bytes=64 << 10, pack_bytes=256 << 10, rank_timeout_s=6.0)


def state(rank: int, ranks: int, *, fill: float | None = None) -> dict[str, Any]:
    """Rows, and what all hold: that is read for all of the node by one."""
    same = np.arange(ROWS * 7, dtype=np.float64) if fill is None else np.full(ROWS * 7, float(fill))
    return {"w": sharded(ROWS, rank, ranks, fill=fill), "same": same}


def is_restored(found: dict[str, Any], rank: int, ranks: int) -> bool:
    return bool((found["w"].local == content(ROWS, rank, ranks)).all() and (found["same"] == np.arange(ROWS * 7)).all())


def is_untouched(found: dict[str, Any]) -> bool:
    return bool((found["w"].local == -1).all() and (found["same"] == -1).all())


def shared_here() -> list[str]:
    """Memory that this process has in common with others."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:tieredckpt" in line]


def restore_while_one_waits(rank: int, ranks: int, place: str, where: tuple[str, bool], victim: int) -> dict[str, Any]:
    """The victim stands still in its part of an exchange, or behind it, until it is killed. The others tell how it went."""
    if rank == victim:
        _stand_still(Path(place, "there"), *where)
    target = state(rank, ranks, fill=-1)
    with tc.Checkpointer(Path(place, "node"), settings=SETTINGS) as ckpt:
        try:
            ckpt.restore(target)
        except tc.RankFailedError as error:
            return {"ranks": list(error.ranks), "untouched": is_untouched(target), "shared": shared_here()}
    return {"ranks": [], "untouched": False, "shared": shared_here()}


def _stand_still(there: Path, exchange: str, after: bool) -> None:
    troubled = Council.exchange

    def stand(council: Council, topic: str, mine: Callable[[], bytes], *args: Any) -> Any:
        def stands() -> bytes:
            said = mine() if after else b""
            there.touch()
            time.sleep(1000)
            return said

        return troubled(council, topic, stands if topic.endswith(f"-{exchange}") else mine, *args)

    Council.exchange = stand  # type: ignore[assignment,method-assign]

"""What a `Checkpointer` opens first: the stores of its two tiers, and the board of its ranks.

Between the arguments of users and the engine.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack

from torch.distributed import ProcessGroup, group

from tieredckpt.engine.board import Board
from tieredckpt.engine.meeting import meet
from tieredckpt.env import Env
from tieredckpt.errors import UsageError
from tieredckpt.pytorch.c10d import notes_of
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.url import open_store, parse_url

_boards: Counter[str] = Counter()
"""How many checkpointers this process has opened in each process group: all its ranks open the same ones, in the same order."""


def open_stores(
    local: str | os.PathLike[str] | None, remote: str | None, options: Mapping[str, object] | None, settings: Settings, env: Env
) -> tuple[ObjectStore | None, ObjectStore | None]:
    """The local and the remote store. UsageError for places that cannot be tiers."""
    if remote is None and options:
        raise UsageError("storage_options= belong to the remote tier, and there is none")
    if local is not None and parse_url(local).scheme not in ("file", "memory"):
        raise UsageError("local= is a directory on a fast disk; a bucket is given as remote=, as in Checkpointer(None, 's3://…')")
    if local is None and remote is None:
        raise UsageError("give a local directory, a remote URL or both")
    with ExitStack() as opened:  # the remote one first: a typing error in a URL leaves no local directory behind
        there = None if remote is None else open_store(remote, options, settings=settings, env=env)
        if there is not None:
            opened.callback(there.close)
        here = None if local is None else open_store(local, None, settings=settings, env=env)
        if here is not None:
            opened.callback(here.close)
        if here is not None and there is not None and here.label == there.label:
            raise UsageError(f"both tiers are in the same place: {here.label}")
        opened.pop_all()
    return here, there


def open_board(process_group: object, timeout_s: float, env: Env) -> Board | None:
    """The board of the ranks of a process group (None: of the default one); None in a job of one process.

    A `Board` is taken as it is: of ranks that are not processes of torch. UsageError for anything else. RankFailedError where not all
    ranks open theirs.
    """
    if isinstance(process_group, Board):
        return process_group if process_group.size > 1 else None
    if process_group is not None and not isinstance(process_group, ProcessGroup):
        raise UsageError(f"process_group= takes a process group of torch.distributed, got {type(process_group).__name__}")
    found = notes_of(process_group, env=env)
    if found is None:
        return None
    notes, rank, size = found
    name = _name(process_group or group.WORLD)
    _boards[name] += 1
    prefix = f"tieredckpt/{name}/{_boards[name]}"

    def board(prefix: str) -> Board:
        return Board(notes, rank=rank, size=size, env=env, timeout_s=timeout_s, prefix=prefix)

    try:
        return board(f"{prefix}/{meet(board(prefix))}")
    except BaseException:
        notes.close()
        raise


def _name(process_group: ProcessGroup | None) -> str:
    assert process_group is not None  # torch.distributed is initialized, or there would be no ranks
    return str(process_group.group_name)

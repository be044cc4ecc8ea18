"""A tier of bad input driven through what a user calls: every reading command, loading, and a restore."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import torch

import tieredckpt as tc
from tests.cli.kit import run
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.store.memory import MemoryStore

OK, FAILURE, USAGE, DAMAGE, NO_SNAPSHOT, NO_REPOSITORY = 0, 1, 2, 3, 4, 10

_numbers = count()


@dataclass(slots=True)
class Outcomes:
    """What became of each call: an exit code, or the error (None: there was none). `wrong`: what must never happen."""

    codes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, TieredCheckpointError | None] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """`load`, and every command that has to read a manifest or the log for it, said no."""
        return self.errors["load"] is not None


@contextmanager
def bucket(objects: Mapping[str, bytes]) -> Iterator[tuple[str, MemoryStore]]:
    """A store of this process that holds `objects`, and its URL."""
    store = MemoryStore.named(name := f"hostile-{next(_numbers)}")
    for key, data in objects.items():
        store.create(key, data)
    try:
        yield f"memory://{name}", store
    finally:
        store.delete([stat.key for stat in store.list("")])


def drive(place: str, scratch: Path) -> Outcomes:
    """Every call that only reads. `scratch`: a directory for `pull`, which is removed."""
    found = Outcomes()
    commands: dict[str, tuple[object, ...]] = {
        "ls": ("ls", place, "--all"),
        "ls --json": ("ls", place, "--json"),
        "log": ("log", place),
        "verify": ("verify", place),
        "du": ("du", place),
        "diff": ("diff", place, "20", "30"),
        "show": ("show", place, "30"),
        "gc": ("gc", place, "--keep-last", "1", "--keep-within", "1"),
        "pull": ("pull", place, scratch),
    }
    for name, command in commands.items():
        try:
            found.codes[name] = run(*command).code
        except Exception as error:  # what is looked for, MemoryError and RecursionError among it
            found.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    shutil.rmtree(scratch, ignore_errors=True)
    _call(found, "load", lambda: _load(place))
    return found


def restore(found: Outcomes, local: Path, place: str) -> None:
    """A restore of step 30 on a new node; the target must be bit for bit as it was where it is refused."""
    model = {"weight": torch.full((65, 256), 7.0), "bias": torch.full((40,), 7.0, dtype=torch.bfloat16)}
    target = {"model": model, "counts": np.full((5, 6), 7, np.int64)}
    before = copy.deepcopy(target)

    def call() -> None:
        with tc.Checkpointer(local, place) as ckpt:
            ckpt.restore(target, step=30, keys=["model/weight", "model/bias", "counts"])

    _call(found, "restore", call)
    shutil.rmtree(local, ignore_errors=True)
    same = all(torch.equal(model[name], before["model"][name]) for name in model)
    same = same and np.array_equal(target["counts"], before["counts"])
    if same != (found.errors["restore"] is not None):
        found.wrong.append("restore: the target was changed" if not same else "restore: the target is what it was")


def _load(place: str) -> None:
    with tc.Tier.open(place) as tier:
        tier.load(step=30)


def _call(found: Outcomes, name: str, call: Callable[[], None]) -> None:
    try:
        call()
        found.errors[name] = None
    except TieredCheckpointError as error:
        found.errors[name] = error
    except Exception as error:
        found.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        found.errors[name] = None

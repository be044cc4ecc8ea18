"""A run in a few lines, without torch: content of a few kilobytes, stores of the test's choice, and a background driven by hand.

With `InlineEnv` everything happens on the calling thread in a fixed order and time is virtual, so a test can count requests, break
each of them in turn, and wait out any back-off in no time. `spawn` runs nothing there: `send` does what the uploader's thread would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from threading import Condition

from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.restorer import Fresh
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import StoreError
from tieredckpt.format.manifest import Manifest
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.choose import NEWEST, Wanted
from tieredckpt.plan.content import Content
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.policies import KeepAll, Retention
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.probe import PROBE_PREFIX
from tieredckpt.testing.faults import Call
from tieredckpt.testing.store_checks.tools import noise

SMALL = Settings(
    pack_bytes=8192, piece_bytes=4096, copy_threads=1, upload_threads=1, request_timeout_s=5.0, commit_timeout_s=20.0
)
"""Several packs with several pieces each, and padding between them, from a few kilobytes."""

KEEP_ALL = Retention(local=KeepAll(), remote=KeepAll())

LEAVES = (
    Leaf(path="bias", dtype="uint8", shape=(5000,), kind="numpy"),
    Leaf(path="weight", dtype="float32", shape=(30, 100), kind="numpy"),
)
"""5000 and 12000 bytes: the last piece of each is no multiple of a page."""


def values(step: int) -> list[bytes]:
    """What the leaves hold at `step`."""
    return [noise(leaf.nbytes, f"{step} {leaf.path}") for leaf in LEAVES]


_seeds = count(1)


def start(local: ObjectStore | None, remote: ObjectStore | None, env: Env | None = None, **options: object) -> Run:
    """Both tiers opened; no session yet."""
    settings = {"settings": SMALL, "retention": KEEP_ALL, **options}
    return Run(local, remote, RunOptions(**settings), env or InlineEnv(next(_seeds)))  # type: ignore[arg-type]


def save(run: Run, step: int) -> SaveHandle:
    """Save `values(step)`; with an `InlineEnv` its local story is over when this returns."""
    layout = lay_out(LEAVES, SMALL)
    handle = run.begin_save(step, 0.0)
    arena = run.stage(layout)
    held = values(step)
    for piece in layout.pieces:
        leaf = LEAVES[piece.leaf]
        start_byte = sum(o * s for o, s in zip(piece.box.offset, _strides(leaf), strict=True))
        arena.view[piece.slot : piece.slot + piece.nbytes] = held[piece.leaf][start_byte : start_byte + piece.nbytes]
    tree = {"bias": LeafRef(0), "weight": LeafRef(1), "step": step}
    run.submit(handle, Content(tree, LEAVES), layout, arena, saved_at=1.7e9 + step, metrics={}, tags=())
    return handle


def restore(run: Run, wanted: Wanted = NEWEST, *, rehydrate: bool = True) -> Landed | Fresh:
    """Restore, compare every byte with what was saved, and let the local tier be filled again."""
    result = run.restore(wanted, _whole)
    if isinstance(result, Landed):
        check_landed(result)
        run.refill(result, rehydrate=rehydrate)
    return result


def restored_step(result: Landed | Fresh) -> int:
    """The step that a restore landed, 0 when fresh."""
    return result.manifest.step if isinstance(result, Landed) else 0


def check_landed(landed: Landed) -> None:
    """Every byte of staging memory is what was saved at that step."""
    held = values(landed.manifest.step)
    pieces = landed.pieces()
    for index, leaf in enumerate(LEAVES):
        found = bytearray(leaf.nbytes)
        for piece in pieces[index]:
            at = sum(o * s for o, s in zip(piece.box.offset, _strides(leaf), strict=True))
            found[at : at + len(piece.data)] = piece.data
        assert bytes(found) == held[index], f"{leaf.path} of step {landed.manifest.step} is not what was saved"


def send(run: Run, most: int = 50) -> None:
    """Do what the uploader's thread does, at most `most` steps, until there is nothing to do or it has failed several times."""
    worker = run.background.worker
    assert worker is not None
    idle = 0
    for _ in range(most):
        idle = 0 if worker.attempt() else idle + 1
        if idle == 3:
            return


def failures(run: Run) -> list[BaseException]:
    """What the next calls of a trainer would raise, one after the other."""
    return list(iter(run.take_failure, None))


def creates(calls: list[Call]) -> list[Call]:
    """The conditional puts among `calls`."""
    return [call for call in calls if call.method == "create"]


def deleted(calls: list[Call]) -> list[str]:
    """Keys that were asked to be deleted, without the probe's own scratch."""
    asked = (key for call in calls if call.method == "delete" for key in call.keys)
    return [key for key in asked if not key.startswith(PROBE_PREFIX)]


def objects(store: ObjectStore) -> Mapping[str, bytes]:
    """Everything that is stored, read directly."""
    return {stat.key: store.get(stat.key, max_bytes=1 << 30) for stat in store.list("")}


class Gate:
    """A store that is in order until `failure` is set: then the next `times` calls of `only` (all, if empty) raise it."""

    METHODS = frozenset({"stat", "get", "read_into", "list", "create", "put", "delete", "settle"})

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.failure: BaseException | None = None
        self.only: frozenset[str] = frozenset()
        self.times = 10**9
        self.refused: list[str] = []

    def __getattr__(self, name: str) -> object:
        method = getattr(self.inner, name)
        if name not in self.METHODS:
            return method

        def guarded(*args: object, **kwargs: object) -> object:
            if self.failure is not None and self.times and (not self.only or name in self.only):
                self.times -= 1
                self.refused.append(name)
                raise self.failure
            return method(*args, **kwargs)

        return guarded


def outage() -> StoreError:
    return StoreError("HTTP 503 SlowDown", retryable=True)


class HastyEnv(Env):
    """Real threads, and nobody waits long."""

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.002))

    def wait(self, condition: Condition, timeout_s: float | None) -> bool:
        return super().wait(condition, 0.01 if timeout_s is None else min(timeout_s, 0.01))


def _whole(manifest: Manifest, tree: object) -> range:
    return range(len(manifest.leaves))


def _strides(leaf: Leaf) -> Iterator[int]:
    """Bytes from one index to the next, per dimension."""
    size = leaf.nbytes
    for extent in leaf.shape:
        size //= extent
        yield size

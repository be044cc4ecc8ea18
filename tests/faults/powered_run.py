"""Work on a disk whose power fails: `python -m tests.faults.powered_run`, a server that forks one child for each life.

A life is one process on the mounted image, from its start to the power cut. One job per line of standard input, as JSON; what the
child says comes back on standard output, one line for each thing that it was told is durable, written before it goes on. The
server imports once and forks in milliseconds, so that a cut costs what the file system needs to recover.

The child cuts the power itself and is gone with it: right after the n-th event of its life (a system call that matters to
durability, or an acknowledgement that it has just passed on), so that nothing happens in between; or after a time, in the middle of
whatever its threads do.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn

from tests.faults import numbered_run
from tests.loop_images import cut_power
from tieredckpt.engine.handle import Outcome
from tieredckpt.env import Env
from tieredckpt.settings import KIB, PAGE_BYTES
from tieredckpt.store.base import Buffer, Created
from tieredckpt.store.local import LocalStore

CALLS = ("fsync", "link", "rename", "mkdir", "unlink", "rmdir", "pwritev", "ftruncate")
"""System calls after which a cut is worth a try. Together with "told", an acknowledgement, these are the events."""

Event = Literal["any", "told", "fsync", "link"]


@dataclass(frozen=True)
class Job:
    """One life. The power goes off right after the `nth` event of kind `event`, or `after_s` seconds after the start; at 0 it stays on.

    what     "run": a training run resumes, saves `saves` times, and closes; with `whole`, it also delivers and collects everything
             "store": the operations of `store_plan(seed)` on a LocalStore
    """

    what: Literal["run", "store"]
    mount: str
    local: str
    remote: str | None = None
    saves: int = 3
    whole: bool = False
    seed: int = 0
    event: Event = "any"
    nth: int = 0
    after_s: float = 0.0


class Fuse:
    """Counts the events of this process and cuts the power right after the chosen one."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._count = 0
        self._events = 0

    def watch(self) -> None:
        """From now on the system calls of this process count, and time passes."""
        for name in CALLS:
            setattr(os, name, self._counting(name, getattr(os, name)))
        if self._job.after_s:
            timer = threading.Timer(self._job.after_s, self._cut_now)
            timer.daemon = True
            timer.start()

    def _counting(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(call)
        def counted(*arguments: object, **options: object) -> object:
            result = call(*arguments, **options)
            self.after(name)
            return result

        return counted

    def after(self, event: str) -> None:
        with self._lock:
            self._events += 1
            self._count += self._job.event in ("any", event)
            if self._job.nth and self._count == self._job.nth:
                self._cut()

    def _cut_now(self) -> None:
        with self._lock:
            self._cut()

    def _cut(self) -> None:
        cut_power(Path(self._job.mount))
        os.write(1, b"cut\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, *words: object) -> None:
        """Say on standard output that something is durable. It is out of this process before this returns."""
        os.write(1, (" ".join(map(str, words)) + "\n").encode())
        self.after("told")

    def disarm(self) -> None:
        """From now on the power stays on. Does not return if it has failed: what this process makes of that is of no interest."""
        self._lock.acquire()

    def tell_events(self) -> None:
        os.write(1, f"events {self._events}\n".encode())


# -------------------------------------------------------------------------------------------------- a training run


def live_run(job: Job, fuse: Fuse) -> None:
    run = numbered_run.open_run(job.local, job.remote)
    assert run.local is not None
    fuse.tell("opened", run.local.run, run.local.node)
    step = numbered_run.restore(run)
    fuse.tell("resumed", step)
    handles = []
    for _ in range(job.saves):
        step += 1
        handles.append(numbered_run.save(run, step))
        handles[-1].local.add_done_callback(functools.partial(_tell_committed, fuse, "local", handles[-1].local))
        if job.remote is not None:
            handles[-1].remote.add_done_callback(functools.partial(_tell_committed, fuse, "remote", handles[-1].remote))
    run.wait("local", 60)
    if job.whole:
        run.wait("remote", 60)
        run.gc(dry_run=False)
    run.close()
    if (failure := run.take_failure()) is not None:
        raise failure
    fuse.tell("closed")


def _tell_committed(fuse: Fuse, tier: str, outcome: Outcome, _future: object) -> None:
    if outcome.failure() is None and (info := outcome.result()) is not None:
        fuse.tell(tier, info.snapshot_id)


# -------------------------------------------------------------------------------------------------- operations of a store


@dataclass(frozen=True)
class Operation:
    """One call of a LocalStore. A `found` object was made by somebody else who did not sync it, nor its directory."""

    kind: Literal["put", "create", "put found", "create found", "delete", "put again", "quarantine", "set aside"]
    key: str


def content_of(key: str) -> list[Buffer]:
    """The bytes of a key, in parts as a pack comes: a header, and page-aligned memory; large enough to go around the page cache, or not."""
    chance = random.Random(key)
    size = chance.choice((1, 100, 4096, 5000, 300 * KIB, 300 * KIB + 17))
    header = chance.randbytes(PAGE_BYTES)
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = chance.randbytes(size)
    return [header, memory]


def bytes_of(key: str) -> bytes:
    return b"".join(bytes(part) for part in content_of(key))


def store_plan(seed: int) -> list[Operation]:
    """Fourteen operations, the same for the child that does them and for the parent that checks what is left of them."""
    chance = random.Random(seed)
    plan: list[Operation] = []
    there: list[str] = []
    deleted: list[str] = []
    for number in range(14):
        kind = chance.choice(("put", "create", "put found", "create found", "delete", "put again", "quarantine", "set aside"))
        if kind == "put again" and deleted:
            key = deleted.pop()
            there.append(key)
        elif kind in ("delete", "quarantine") and there:
            key = there.pop(chance.randrange(len(there)))
            if kind == "delete":
                deleted.append(key)
        elif kind == "set aside" and there:
            key = chance.choice(there).split("/")[0]
            there, deleted = ([k for k in some if not k.startswith(f"{key}/")] for some in (there, deleted))
        else:
            kind = chance.choice(("put", "create", "put found", "create found"))
            key = "/".join([chance.choice("ab"), *chance.choice(("", "c", "cd")), f"object-{number}"])
            there.append(key)
        plan.append(Operation(kind, key))  # type: ignore[arg-type]
    return plan


def live_store(job: Job, fuse: Fuse) -> None:
    store = LocalStore(job.local, env=Env(), create=True)
    for number, operation in enumerate(store_plan(job.seed)):
        _do(store, Path(job.local), operation)
        fuse.tell("done", number)
    store.close()
    fuse.tell("closed")


def _do(store: LocalStore, root: Path, operation: Operation) -> None:
    key = operation.key
    if operation.kind.endswith("found"):
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(bytes_of(key))
    match operation.kind:
        case "put" | "put again" | "put found":
            store.put(key, content_of(key))
        case "create":
            assert store.create(key, bytes_of(key)) is Created.CREATED
        case "create found":
            assert store.create(key, bytes_of(key)) is Created.EXISTS
            store.settle([key])
        case "delete":
            assert not store.delete([key])
        case "quarantine":
            store.quarantine(key)
        case "set aside":
            assert store.set_aside(key) is not None


# -------------------------------------------------------------------------------------------------- the server


def live(job: Job) -> NoReturn:
    """A child's whole life. What goes wrong in it is told, unless the power failed."""
    fuse = Fuse(job)
    try:
        fuse.watch()
        (live_run if job.what == "run" else live_store)(job, fuse)
        fuse.disarm()
        fuse.tell_events()
    except BaseException:
        fuse.disarm()
        os.write(1, f"failed {json.dumps(traceback.format_exc())}\n".encode())
        os._exit(1)
    os._exit(0)


def main() -> None:
    for line in sys.stdin:
        job = Job(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            live(job)
        os.waitpid(pid, 0)
        os.write(1, b"ended\n")


def to_line(job: Job) -> str:
    return json.dumps(asdict(job)) + "\n"


if __name__ == "__main__":
    main()

"""The store that the ranks of a torch job share, as the engine's `Notes` (`engine.board`).

`torchrun` starts a TCPStore; the process group has a client of it, which training uses too. Four failures make the shape of this:

- A blocking wait holds its client (C129): a background thread that waits would stop the trainer. So the client is a clone, and a wait
  asks again and again whether the key is there, and sleeps in between; several threads can wait through one client. (Waits of the
  client itself also write a warning to stderr at each timeout.)
- A host that is stopped or cut off without a word does not answer, and most calls of a client wait for an answer without an end. So
  they are made on a thread of their own, and the caller waits for it for a bounded time.
- A note may be taken away by whoever left it between two requests. `get` would wait for it to come back, and all others behind it.
- Clients raise several classes of RuntimeError. All of them are a StoreError here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, wait
from datetime import timedelta
from typing import TypeVar

import torch.distributed
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from tieredckpt.env import Deadline, Env
from tieredckpt.errors import StoreError, UsageError

_T = TypeVar("_T")

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.1
"""Between two looks at a key: a wait that is short costs little, one that is long asks ten times a second."""


def notes_of(
    group: torch.distributed.ProcessGroup | None, *, env: Env, answer_timeout_s: float = 60.0
) -> tuple[C10dNotes, int, int] | None:
    """The notes, this process's rank and the number of ranks of `group` (default: the default group).

    None in a job of one process: no process group, or one of size 1. UsageError if this process is not in `group`.
    `answer_timeout_s`: a store that does not answer a request for so long is out of reach.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        if group is None:
            return None
        raise UsageError("process_group= was given, but torch.distributed is not initialized")
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if rank < 0:
        raise UsageError("this process does not belong to the process group that was given")
    if size == 1:
        return None
    store = distributed_c10d._get_process_group_store(group or distributed_c10d._get_default_group())
    return C10dNotes(store, env=env, answer_timeout_s=answer_timeout_s), rank, size


_NOTHING = "tieredckpt: no note is there"


class C10dNotes:
    """`Notes` in any c10d store: TCPStore, FileStore, HashStore, PrefixStore."""

    def __init__(self, store: Store, *, env: Env, answer_timeout_s: float = 60.0) -> None:
        self._env = env
        self._answer_timeout_s = answer_timeout_s
        self._given = store
        """Kept: a clone does not keep the host alive, and rank 0 may destroy its process group while notes are still awaited."""
        self._calls = env.executor("notes", 1)
        self._store = self._ask("connecting", lambda: _client(store, answer_timeout_s))

    def put(self, key: str, data: bytes) -> None:
        self._ask(f"posting {key}", lambda: self._store.set(key, data))  # type: ignore[arg-type]  # it takes bytes; the stub says str

    def get(self, key: str, timeout_s: float) -> bytes | None:
        deadline, pause_s = Deadline(self._env, timeout_s), _FIRST_PAUSE_S
        while (found := self._ask(f"looking for {key}", lambda: self._look(key))) is None:
            left = deadline.remaining()
            if not left:
                return None
            self._env.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return found

    def delete(self, key: str) -> None:
        self._ask(f"removing {key}", lambda: self._store.delete_key(key))

    def close(self) -> None:
        """The client itself goes when its last request has ended."""
        self._calls.shutdown(wait=False)

    def _look(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        # Not `get`, which would wait for a note that was taken away meanwhile. This one changes nothing, there or not.
        found = bytes(self._store.compare_set(key, _NOTHING, _NOTHING))
        return None if found == _NOTHING.encode() else found

    def _ask(self, doing: str, call: Callable[[], _T]) -> _T:
        return _bounded(self._calls, doing, call, self._answer_timeout_s)


def _bounded(calls: Executor, doing: str, call: Callable[[], _T], timeout_s: float) -> _T:
    """What `call` gives, made on the thread of `calls`. Requests behind one that hangs are withdrawn, and never sent later."""
    try:
        answer = calls.submit(call)
    except RuntimeError as error:
        raise StoreError(f"{doing}: the store of the ranks has been closed here", retryable=False) from error
    wait([answer], timeout_s)  # outside: what a signal handler raises here is the user's, and no answer
    if not answer.done():
        answer.cancel()
        raise StoreError(f"{doing}: the store of the ranks has not answered for {timeout_s:g} s", retryable=True)
    try:
        return answer.result()
    except RuntimeError as error:  # DistStoreError, DistNetworkError, and plain ones
        first = str(error).partition("\n")[0]  # a native stack trace may follow
        raise StoreError(f"{doing}: the store of the ranks is out of reach ({first})", retryable=True) from error


def _client(store: Store, timeout_s: float) -> Store:
    """A client of its own, with its own timeout. Where this torch cannot make one, the one there is: no call here is long."""
    clone = getattr(store, "clone", None)
    if clone is None:
        return store
    client: Store = clone()
    client.set_timeout(timedelta(seconds=timeout_s))
    return client

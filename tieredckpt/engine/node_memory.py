"""Memory that the ranks of one node share while they restore: one reads a piece, all see it.

Between the landing of one rank and that of its neighbours. The leader makes the memory, in its local tier, the others join it by a
name; then the name goes, so that nothing stays when the ranks have died. Where the disk has no room for it, or cannot share, each
rank reads for itself.
"""

from __future__ import annotations

import logging

from tieredckpt.errors import CapacityError, InternalError, StoreError
from tieredckpt.store.base import Memory, ObjectStore, is_sharing_store

_log = logging.getLogger(__name__)


class NodeMemory:
    """What one rank has of it. `store`: the local tier of the node, if there is one."""

    def __init__(self, store: ObjectStore | None) -> None:
        self._store = store
        self._memory: Memory | None = None
        self._name = ""

    @property
    def host(self) -> str:
        """Where this rank can share memory; empty: nowhere. A directory that several hosts have is one node, and no memory of theirs."""
        return self._store.memory_host() if is_sharing_store(self._store) else ""

    def offer(self, nbytes: int) -> str:
        """On the leader: make it. Its name, or nothing where it cannot be."""
        if not is_sharing_store(self._store):
            return ""
        try:
            self._name, self._memory = self._store.share_memory(nbytes)
        except (StoreError, CapacityError) as error:
            _log.warning("the ranks of this node cannot share what they read, each reads for itself: %s", error)
        return self._name

    def join(self, name: str, nbytes: int) -> None:
        """On the others. NotFoundError where the leader has taken the name away; StoreError."""
        if self._memory is None:
            if not is_sharing_store(self._store):
                raise InternalError("the local tier of the leader can share memory, and that of this rank cannot")
            self._memory = self._store.join_memory(name, nbytes)

    def unname(self) -> None:
        """On the leader, once all have joined, or will not."""
        name, self._name = self._name, ""
        if name and is_sharing_store(self._store):
            try:
                self._store.unname_memory(name)
            except StoreError as error:
                _log.warning("shared memory stays on the disk until the next start: %s", error)

    @property
    def view(self) -> memoryview:
        if self._memory is None:
            raise InternalError("this rank has not joined the memory of its node")
        return self._memory.view

    def release(self) -> None:
        """Idempotent. Views must not be used afterwards."""
        self.unname()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.release()

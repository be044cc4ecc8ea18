"""Python's cycle collector, kept out of the moments in which training stands still.

A walk over ten thousand tensors allocates enough to set off full collections. Each looks at every object of the process, beside
torch for longer than the walk itself takes, and finds nothing here: what a walk makes has no cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cycle_collection_paused() -> Iterator[None]:
    """A block, or as a decorator a function, without collections; for short work on the trainer's thread that waits for nobody."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

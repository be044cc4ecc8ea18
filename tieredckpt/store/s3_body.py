"""A request body over several buffers, without joining them.

boto3 wants a file or one `bytes`. The length is known beforehand, so no body is ever sent in chunks of unknown number (C21).
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence

from tieredckpt.settings import MIB
from tieredckpt.store.base import Buffer


class PartsBody(io.RawIOBase):
    """Reads the concatenation of `parts`; can be read again from the beginning, as a repeated request needs."""

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._views = [view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes]
        self._starts = [0]
        for view in self._views:
            self._starts.append(self._starts[-1] + view.nbytes)
        self._position = 0

    def __len__(self) -> int:
        return self._starts[-1]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self)}[whence]
        self._position = min(max(0, base + offset), len(self))
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """At most `size` bytes (everything for -1), never short before the end: a short block would end the body early."""
        left = len(self) - self._position
        left = left if size is None or size < 0 else min(size, left)
        blocks = []
        while left:
            index = bisect_right(self._starts, self._position) - 1
            begin = self._position - self._starts[index]
            block = self._views[index][begin : begin + left]
            blocks.append(bytes(block))
            self._position += block.nbytes
            left -= block.nbytes
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def readall(self) -> bytes:
        return self.read(-1)

    def readinto(self, buffer: object) -> int:
        out = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # RawIOBase declares a writable buffer
        data = self.read(min(out.nbytes, MIB))
        out[: len(data)] = data
        return len(data)

"""How the bytes of a piece are stored: as they are, or as one zstd frame where that is smaller.

Between raw bytes and packs. The failure it exists for: a small stored piece that claims to be huge and takes the memory of whoever
reads it. A piece lands only in memory for the raw bytes of its box, and a frame that says otherwise, or gives fewer or more, is
damage; where only a digest is wanted, the frame is read block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import zstandard

from tieredckpt.errors import CorruptionError
from tieredckpt.settings import MIB

Codec = Literal["raw", "zstd"]

ZSTD_LEVEL = 1
"""Training state compresses little and comes in gigabytes: the fastest level gets nearly all there is to get."""

_RUN_OF_ONE_BYTE = 1
"""The kind of block that is stored as one byte, whatever its size."""

MAX_RAW_BYTES = 5 << 30
"""Of one piece: no store takes a larger object in one put."""


def compress(raw: memoryview) -> bytes | None:
    """The zstd frame of `raw`, or None where it would not be smaller."""
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(raw)
    return frame if len(frame) < raw.nbytes else None


def decompress_into(stored: memoryview, raw: memoryview) -> None:
    """Fill `raw` from the frame `stored`. CorruptionError unless it is one frame of exactly that many bytes."""
    check_frame(stored, raw.nbytes)
    with _reading(stored) as reader:
        done = 0
        while done < raw.nbytes and (count := reader.readinto(raw[done:])):
            done += count
        _check_end(raw.nbytes - done, reader.readinto(bytearray(1)))


def check_frame(stored: memoryview, raw_bytes: int) -> None:
    """CorruptionError unless `stored` is one frame that says that it holds so many bytes."""
    size = _declared_bytes(stored, MAX_RAW_BYTES)
    if size != raw_bytes:
        raise CorruptionError(f"a compressed piece says that it has {size} bytes and should have {raw_bytes}")


def raw_blocks(stored: memoryview, most_bytes: int = MAX_RAW_BYTES) -> Iterator[memoryview]:
    """The raw bytes of one frame, a block at a time; a block is good until the next is asked for.

    CorruptionError if it is not one whole frame, if it is larger than it says, or than `most_bytes`.
    """
    left = _declared_bytes(stored, most_bytes)
    block = memoryview(bytearray(min(MIB, left)))
    with _reading(stored) as reader:
        while left and (count := reader.readinto(block[:left])):
            left -= count
            yield block[:count]
        _check_end(left, reader.readinto(bytearray(1)))


@contextmanager
def _reading(stored: memoryview) -> Iterator[zstandard.ZstdDecompressionReader]:
    """The raw bytes of what is one whole frame. CorruptionError, also for what the decoder says while they are read."""
    if _frame_bytes(stored) != stored.nbytes:
        raise CorruptionError("a compressed piece is not one zstd frame: it is cut off, or something follows it")
    try:
        with zstandard.ZstdDecompressor().stream_reader(stored) as reader:
            yield reader
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a compressed piece is not one zstd frame: {error}") from error


def _check_end(missing_bytes: int, more_bytes: int) -> None:
    if missing_bytes:
        raise CorruptionError(f"a compressed piece ends {missing_bytes} bytes too early")
    if more_bytes:
        raise CorruptionError("a compressed piece holds more than it says")


def _declared_bytes(stored: memoryview, most_bytes: int) -> int:
    try:
        size = zstandard.get_frame_parameters(stored).content_size
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a compressed piece is not one zstd frame: {error}") from error
    if not 0 < size <= most_bytes:  # an unknown one is -1 or 2^64 - 1
        raise CorruptionError(f"a compressed piece says that it has {size} bytes; at most {most_bytes} are possible")
    return size


def _frame_bytes(stored: memoryview) -> int:
    """Where the frame at the beginning of `stored` ends, by the headers of its blocks (RFC 8878, 3.1.1); -1 if it does not end there.

    A decoder does not tell: it gives what the blocks hold, and waits for more.
    """
    end = zstandard.frame_header_size(stored)
    last = False
    while not last and end < stored.nbytes:
        header = int.from_bytes(stored[end : end + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        end += 3 + (1 if kind == _RUN_OF_ONE_BYTE else size)
    if not last:
        return -1
    return end + 4 * zstandard.get_frame_parameters(stored).has_checksum

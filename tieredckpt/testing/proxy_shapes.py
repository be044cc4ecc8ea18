"""How a body reaches the other side: cut short, held up half way, or slowly. Generators over a body's pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tieredckpt.testing.proxy_http import Piece

_SLICE_S = 0.1


def cut(pieces: Iterator[Piece], after: int) -> tuple[list[Piece], bool]:
    """The first `after` bytes, and whether there would have been more."""
    kept: list[Piece] = []
    left = after
    for raw, content in pieces:
        kept.append((raw[:left], content[:left]))
        if len(raw) > left:
            return kept, True
        left -= len(raw)
    return kept, False


def stalled(pieces: Iterator[Piece], after: int, wait: Callable[[], None]) -> Iterator[Piece]:
    """All of it, with a wait after the first `after` bytes; none if it is shorter."""
    left = after
    for raw, content in pieces:
        if 0 <= left < len(raw):
            yield raw[:left], content[:left]
            wait()
            yield raw[left:], content[left:]
            left = -1
        else:
            yield raw, content
            left -= len(raw) if left >= 0 else 0


def slowed(pieces: Iterator[Piece], bytes_per_s: float, wait: Callable[[float], None]) -> Iterator[Piece]:
    """All of it, at this pace; what stands before it goes at once."""
    yield b"", b""
    step = max(1, int(bytes_per_s * _SLICE_S))
    for raw, content in pieces:
        for start in range(0, len(raw), step):
            wait(min(step, len(raw) - start) / bytes_per_s)
            yield raw[start : start + step], b"" if start else content

"""One frame of exactly the raw bytes, or damage: nothing that is stored decides how much memory its reader takes (I13, C144)."""

from __future__ import annotations

import io
import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.errors import CorruptionError
from tieredckpt.format import codec
from tieredckpt.format.codec import compress, decompress_into, raw_blocks
from tieredckpt.settings import KIB, MIB
from tieredckpt.testing.store_checks.tools import noise

RAW = b"training state " * 1000


def frame_of(data: bytes, *, size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=size).compress(data)


def landed(stored: bytes, nbytes: int) -> bytes:
    raw = memoryview(bytearray(nbytes))
    decompress_into(memoryview(stored), raw)
    return bytes(raw)


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.integers(1, 300))
def test_what_gets_smaller_comes_back_and_what_does_not_is_left_raw(part: bytes, times: int):
    raw = part * times
    frame = compress(memoryview(raw))
    if frame is None:
        assert len(frame_of(raw)) >= len(raw) - 8
    else:
        assert len(frame) < len(raw)
        assert landed(frame, len(raw)) == raw


def test_noise_is_never_stored_larger():
    assert compress(memoryview(noise(100_000, 1))) is None


@pytest.mark.parametrize(
    "stored",
    [
        frame_of(RAW + b"x"),
        frame_of(RAW[:-1]),
        frame_of(RAW, size=False),
        frame_of(RAW)[:-1],
        frame_of(RAW)[:5],
        b"",
        b"no frame at all",
        frame_of(RAW) + b"\0",
        frame_of(RAW) + frame_of(b"more"),
        frame_of(RAW) + frame_of(b""),
        frame_of(RAW[:100]) + frame_of(RAW[100:]),
        frame_of(b"") + frame_of(RAW),
        frame_of(RAW) + (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc",
        frame_of(b""),
    ],
    ids=[
        "one-byte-more", "one-byte-less", "no-size", "cut", "header-cut", "nothing", "noise", "trailing-byte", "second-frame",
        "empty-second-frame", "split", "empty-first-frame", "skippable-frame-behind", "empty",
    ],
)  # fmt: skip
def test_anything_but_one_frame_of_the_raw_bytes_is_damage(stored: bytes):
    with pytest.raises(CorruptionError, match="compressed piece"):
        landed(stored, len(RAW))


@pytest.mark.parametrize("nbytes", [3 * MIB, 5 << 30])
def test_a_frame_that_claims_much_allocates_nothing_for_it(nbytes: int):
    """The header says `nbytes`; the window of such a frame is as large."""
    bomb = bytearray(frame_of(RAW))
    header = (0xFD2FB528).to_bytes(4, "little") + bytes([0b11100000]) + nbytes.to_bytes(8, "little")
    bomb[: zstandard.frame_header_size(bytes(bomb))] = header
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError):
            landed(bytes(bomb), len(RAW))
        with pytest.raises(CorruptionError):
            for _ in raw_blocks(memoryview(bytes(bomb))):
                pass
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_i13_a_piece_lands_where_it_belongs_and_takes_no_memory_beside_that():
    frame, small = (memoryview(frame_of(b"ab" * half)) for half in (4 * MIB, 1000))
    raw = memoryview(bytearray(8 * MIB))
    tracemalloc.start()
    try:
        decompress_into(frame, raw)
        assert b"".join(map(bytes, raw_blocks(small))) == b"ab" * 1000
        assert tracemalloc.get_traced_memory()[1] < 64 * KIB
    finally:
        tracemalloc.stop()
    assert raw == b"ab" * (4 * MIB)


@pytest.mark.parametrize("given", [RAW[:-1], b"", RAW + b"x", 2 * RAW], ids=["one-less", "none", "one-more", "twice"])
def test_a_decoder_that_gives_other_than_the_frame_says_is_not_believed(monkeypatch: pytest.MonkeyPatch, given: bytes):
    """zstd's own compares at the end of a frame; where crc alone is verified, what had not been written would be taken for good."""

    class Decoder:
        def stream_reader(self, _stored: memoryview) -> io.BytesIO:
            return io.BytesIO(given)

    frame = memoryview(frame_of(RAW))
    monkeypatch.setattr(codec.zstandard, "ZstdDecompressor", Decoder)
    with pytest.raises(CorruptionError, match=r"too early|more than it says"):
        landed(bytes(frame), len(RAW))
    with pytest.raises(CorruptionError, match=r"too early|more than it says"):
        list(raw_blocks(frame))


def test_every_flipped_bit_is_damage_or_other_bytes_or_the_same_ones():
    """Never anything but a typed error: what is not refused is left to the checksums."""
    frame = frame_of(RAW[:300])
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert len(landed(bytes(flipped), 300)) == 300
        except CorruptionError:
            continue

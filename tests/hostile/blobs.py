"""Bad packs and bad zstd frames: headers that lie about lengths, places and names; frames that hold other than they say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

from tests.hostile.forge import Json, changed, dump
from tests.hostile.mutations import mutations

PAGE = 4096
MAGIC = b"\x28\xb5\x2f\xfd"


def split(pack: bytes) -> tuple[Json, bytes]:
    """The header of a pack as a document, and its data."""
    length = int.from_bytes(pack[:8], "little")
    return json.loads(pack[8 : 8 + length]), pack[8 + length :]


def joined(text: bytes, data: bytes) -> bytes:
    """A pack with this header: its length and its spaces are right."""
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length) + data


def bad_packs(pack: bytes) -> Iterator[tuple[str, bytes]]:
    """From a good pack that has more than one piece."""
    header, data = split(pack)
    yield from _bad_bytes(pack)
    for name, text in mutations({"__metadata__": header["__metadata__"]} | _first(header)):
        if not name.startswith("__metadata__.") or "zstd" in name:
            yield name, joined(text, data)
    for name, change in _HEADERS.items():
        yield name, joined(dump(changed(header, change)), data)


def _bad_bytes(pack: bytes) -> Iterator[tuple[str, bytes]]:
    length = int.from_bytes(pack[:8], "little")
    yield "empty", b""
    yield "seven bytes", pack[:7]
    yield "only a length", pack[:8]
    yield "half a header", pack[:2048]
    yield "only a header", pack[: 8 + length]
    yield "a byte too few", pack[:-1]
    yield "a byte too many", pack + b"\0"
    yield "a page too many", pack + bytes(PAGE)
    for name, number in {"no length": 0, "another length": length + PAGE, "an odd length": length + 1}.items():
        yield name, number.to_bytes(8, "little") + pack[8:]
    for number in (10**8 // PAGE * PAGE - 8 + PAGE, 2**31, 2**53, 2**63 - 8, 2**64 - 8):
        yield f"a length of {number}", number.to_bytes(8, "little") + pack[8:]
    yield "a length in the other order", length.to_bytes(8, "big") + pack[8:]
    yield "a header of zeros", pack[:8] + bytes(length) + pack[8 + length :]
    yield "tabs for spaces", pack[: 8 + length].replace(b"  ", b"\t\t") + pack[8 + length :]
    yield "a zip file", b"PK\x03\x04" + pack[4:]
    yield "a pickle", b"\x80\x04cposix\nsystem\n(S'true'\ntR." + pack[30:]
    yield "a deep header", joined(b"[" * 100_000, b"")


def _first(header: Json) -> dict[str, Json]:
    """The first tensor: what is wrong with one is wrong with all."""
    name = min((name for name in header if not name.startswith("__")), key=lambda name: header[name]["data_offsets"][0])
    return {name: header[name]}


def _tensor(index: int, **fields: Any) -> Callable[[Json], None]:
    def change(header: Json) -> None:
        names = sorted((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][0])
        header[names[index]].update(fields)

    return change


def _shift(header: Json) -> None:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + 1 for offset in entry["data_offsets"]]


def _rename(old: str, new: str) -> Callable[[Json], Json]:
    return lambda header: {new if name == old else name: entry for name, entry in header.items()}


def _marks(text: str) -> Callable[[Json], None]:
    return lambda header: header["__metadata__"].update(zstd=text)


_HEADERS: dict[str, Callable[[Json], Json | None]] = {
    "all tensors a byte further": _shift,
    "a tensor that overlaps the next": _tensor(0, data_offsets=[0, 131], shape=[131]),
    "a tensor that leaves a hole": _tensor(0, data_offsets=[0, 100], shape=[100]),
    "a tensor backwards": _tensor(0, data_offsets=[130, 0]),
    "a tensor with an empty range": _tensor(0, data_offsets=[0, 0], shape=[0]),
    "a tensor behind the end": _tensor(-1, data_offsets=[2**53 - 2, 2**53 - 1], shape=[1], dtype="U8"),
    "a shape whose product overflows": _tensor(0, shape=[2**32, 2**32]),
    "64 dimensions": _tensor(0, shape=[2**53 - 1] * 64),
    "65 dimensions": _tensor(0, shape=[1] * 65),
    "an unknown dtype": _tensor(0, dtype="O"),
    "a dtype in lower case": _tensor(0, dtype="u8"),
    "a pad that is a piece": _rename("__pad.0", "__pat.0"),
    "a pad with a leading zero": _rename("__pad.0", "__pad.00"),
    "no metadata": lambda header: header.pop("__metadata__") and None,
    "metadata that are numbers": lambda header: header["__metadata__"].update(zstd=0),
    "no tensor": lambda header: {"__metadata__": header["__metadata__"]},
    "a compressed piece that is not there": _marks("99"),
    "a compressed piece twice": _marks("0 0"),
    "a compressed piece that is no bytes": _marks("1"),
    "a compressed piece by a pad's number": _marks("-1"),
    "a compressed piece with a leading zero": _marks("00"),
    "no compressed piece": _marks(""),
}


def frame(raw: bytes, level: int = 1) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(raw)


def claiming(size: int, blocks: bytes) -> bytes:
    """A frame that says `size`, whatever its blocks hold (RFC 8878: single segment, 8 bytes of content size)."""
    return MAGIC + bytes([0b1110_0000]) + size.to_bytes(8, "little") + blocks


def run_of_zeros(blocks: int) -> bytes:
    """Blocks of 128 KiB of one byte, 4 bytes each; the last one ends the frame."""
    sizes = [(128 * 1024) << 3 | 1 << 1 | (number == blocks - 1) for number in range(blocks)]
    return b"".join(size.to_bytes(3, "little") + b"\0" for size in sizes)


def bad_frames(raw_bytes: int) -> Iterator[tuple[str, bytes]]:
    """None of them holds exactly `raw_bytes`, and says so."""
    good = frame(bytes(raw_bytes))
    yield "empty", b""
    yield "no magic", b"\0" + good[1:]
    yield "only magic", MAGIC
    yield "only a header", good[:6]
    yield "cut off", good[:-1]
    yield "trailing byte", good + b"\0"
    yield "two frames", good + good
    yield "fewer bytes", frame(bytes(raw_bytes - 1))
    yield "more bytes", frame(bytes(raw_bytes + 1))
    yield "no size", zstandard.ZstdCompressor(write_content_size=False).compress(bytes(raw_bytes))
    yield "skippable", b"\x50\x2a\x4d\x18" + raw_bytes.to_bytes(4, "little") + bytes(raw_bytes)
    yield "skippable in front", b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + good
    yield "a dictionary", MAGIC + bytes([0b1110_0001, 7]) + good[5:]
    yield "a reserved bit", MAGIC + bytes([good[4] | 8]) + good[5:]
    yield "gzip", b"\x1f\x8b\x08" + good[3:]
    for size in (0, raw_bytes - 1, raw_bytes + 1, 2**31, 2**53, 2**63, 2**64 - 2, 2**64 - 1):
        yield f"says {size}", claiming(size, run_of_zeros(1))
    yield "says little and holds much", claiming(raw_bytes, run_of_zeros(8192))
    yield "says much and holds little", claiming(2**40, run_of_zeros(1))
    yield "a block of a kind that is reserved", claiming(raw_bytes, (raw_bytes << 3 | 3 << 1 | 1).to_bytes(3, "little"))
    yield "no last block", claiming(raw_bytes, b"\0\0\0")
    yield "every byte and no last block", claiming(raw_bytes, (raw_bytes << 3 | 1 << 1).to_bytes(3, "little") + b"\0")

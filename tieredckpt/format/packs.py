"""Packs: the stored objects that hold pieces. A pack is a valid safetensors file.

    8 bytes   length of the header, little-endian
    header    canonical JSON (names → dtype, shape, data_offsets), padded with spaces so that 8 + header is a multiple of 4096
    data      pieces, each at a multiple of 4096 from the beginning of the file; gaps are zero tensors `__pad.<n>`

Between pieces (`format.manifest`) and bytes. Pieces are aligned so that they can be written by O_DIRECT straight from staging;
safetensors allows no holes, hence the fillers. The header repeats what the manifest says, so that any safetensors reader can open
a pack; tieredckpt itself reads by the manifest, and `verify` compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import msgspec

from tieredckpt.errors import FormatError
from tieredckpt.format import canonical
from tieredckpt.format.codec import Codec
from tieredckpt.model.box import Box
from tieredckpt.model.digest import Buffer, DigestAlgorithm, algorithm_of, new_hasher
from tieredckpt.model.fields import Count
from tieredckpt.model.leaf import DTYPE_BYTES, Extents
from tieredckpt.settings import PAGE_BYTES

MAX_HEADER_BYTES = 100_000_000
"""safetensors refuses larger ones."""

LENGTH_BYTES = 8

SAFETENSORS_DTYPES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""Names of the dtypes that safetensors' loaders know. Pieces of the others are U8, one element per byte."""

_BYTES_OF = {name: DTYPE_BYTES[dtype] for dtype, name in SAFETENSORS_DTYPES.items()}
_METADATA = "__metadata__"
_ZSTD = "zstd"
_PAD = re.compile(r"__pad\.(0|[1-9][0-9]*)")
_WHAT = "pack header"


@dataclass(frozen=True, slots=True)
class PackItem:
    """A piece on its way into a pack. `dtype` and `shape` are those of its raw bytes, `nbytes` counts the stored ones."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    codec: Codec = "raw"


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Where everything in a pack lies.

    header  the first bytes of the file: length, JSON, spaces; a multiple of 4096
    starts  of each piece, from the beginning of the file, multiples of 4096
    padded  bytes from the start of each piece to the start of the next, zero beyond the piece; the last one has no filler
    nbytes  of the whole file
    """

    header: bytes
    starts: tuple[int, ...]
    padded: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackTensor:
    """One tensor of a pack's header; `start` counts from the beginning of the file. `pad`: a filler, whose bytes must be zero.

    A compressed piece is a tensor of bytes; which ones are is in the header's metadata.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    pad: bool
    codec: Codec = "raw"


@dataclass(frozen=True, slots=True)
class ParsedPack:
    """A checked header: its size (length bytes included), its tensors in file order without a hole, and its metadata."""

    header_bytes: int
    tensors: tuple[PackTensor, ...]
    metadata: dict[str, str]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Extents
    data_offsets: tuple[Count, Count]


def piece_name(path: str, box: Box, shape: tuple[int, ...]) -> str:
    """A piece's tensor name: the leaf's path, with `[a:b,c:d]` if the box is not the whole leaf. Injective."""
    if box == Box.whole(shape):
        return path
    return f"{path}[{','.join(f'{start}:{stop}' for start, stop in zip(box.offset, box.end, strict=True))}]"


def build_layout(entries: Sequence[PackItem], metadata: Mapping[str, str]) -> PackLayout:
    """The layout of a pack that holds `entries` in this order. FormatError if they cannot make a pack."""
    if not entries:
        raise FormatError("a pack holds at least one piece")
    header: dict[str, _Entry | dict[str, str]] = {_METADATA: {**metadata, **_codec_marks(entries)}}
    offsets = []
    position = 0
    for index, item in enumerate(entries):
        offsets.append(position)
        _add(header, item.name, _entry(item, position))
        end = position + item.nbytes
        position = -(-end // PAGE_BYTES) * PAGE_BYTES
        if position != end and index + 1 < len(entries):
            _add(header, f"__pad.{index}", _Entry("U8", (position - end,), (end, position)))
    first = _pad_header(canonical.dump(header, what=_WHAT))
    starts = tuple(len(first) + offset for offset in offsets)
    nbytes = starts[-1] + entries[-1].nbytes
    ends = (*starts[1:], nbytes)
    return PackLayout(first, starts, tuple(end - start for start, end in zip(starts, ends, strict=True)), nbytes)


def parse_header(data: Buffer, total_bytes: int) -> ParsedPack:
    """The header of a pack of `total_bytes`, of which `data` holds at least the header. FormatError if it is not valid."""
    length = header_bytes(data) - LENGTH_BYTES
    if LENGTH_BYTES + length > min(len(data), total_bytes):
        raise FormatError(f"{_WHAT}: says it has {length} bytes, more than there are")
    text = bytes(data[LENGTH_BYTES : LENGTH_BYTES + length]).rstrip(b" ")
    raw = canonical.load(text, dict[str, msgspec.Raw], what=_WHAT)
    metadata = canonical.load(bytes(raw.pop(_METADATA, b"{}")), dict[str, str], what=_WHAT)
    entries = {name: canonical.load(bytes(entry), _Entry, what=f"{_WHAT}, {name[:120]!r}") for name, entry in raw.items()}
    if canonical.dump({_METADATA: metadata, **entries}, what=_WHAT) != text:
        raise FormatError(f"{_WHAT}: not canonical JSON (order or repetition of names, spaces, spelling)")
    tensors = _with_codecs(_check_entries(entries, LENGTH_BYTES + length, total_bytes), metadata)
    return ParsedPack(LENGTH_BYTES + length, tensors, metadata)


def header_bytes(data: Buffer) -> int:
    """Size of the header, its 8 length bytes included, from the first 8 bytes of a pack. FormatError if it is not allowed."""
    if len(data) < LENGTH_BYTES:
        raise FormatError(f"{_WHAT}: {len(data)} bytes are too few for its length")
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"{_WHAT}: {length} bytes, more than the {MAX_HEADER_BYTES} allowed")
    if (LENGTH_BYTES + length) % PAGE_BYTES or not length:
        raise FormatError(f"{_WHAT}: {length} bytes, which do not end at a multiple of {PAGE_BYTES}")
    return LENGTH_BYTES + length


def pack_digest(header: Buffer, piece_digests: Sequence[str], algorithm: DigestAlgorithm) -> str:
    """The digest of a pack: H(8 length bytes ‖ header ‖ its pieces' digests in order, 32 bytes each), tagged.

    `header` begins with the length bytes. Every stored byte is hashed once: fillers are zero, and checked to be.
    """
    hasher = new_hasher(algorithm)
    hasher.update(header)
    for piece in piece_digests:
        if algorithm_of(piece) != algorithm:
            raise FormatError(f"a pack with a {algorithm} digest holds a piece with the digest {piece[:80]}")
        hasher.update(bytes.fromhex(piece.partition(":")[2]))
    return f"{algorithm}:{hasher.hexdigest()}"


def _entry(item: PackItem, position: int) -> _Entry:
    size = DTYPE_BYTES.get(item.dtype)
    if size is None:
        raise FormatError(f"piece {item.name!r} has the unknown dtype {item.dtype!r}")
    raw = size * prod(item.shape)
    if item.nbytes < 1 or (item.nbytes != raw if item.codec == "raw" else item.nbytes >= raw):
        raise FormatError(f"piece {item.name!r}: {item.nbytes} bytes for {item.dtype} {item.shape}")
    if item.name.startswith("__"):
        raise FormatError(f"a piece cannot have the reserved name {item.name!r}")
    name = SAFETENSORS_DTYPES.get(item.dtype) if item.codec == "raw" else None
    offsets = (position, position + item.nbytes)
    return _Entry("U8", (item.nbytes,), offsets) if name is None else _Entry(name, item.shape, offsets)


def _codec_marks(entries: Sequence[PackItem]) -> dict[str, str]:
    """Metadata that says which pieces (counted from 0, without fillers) are zstd frames; nothing if none is."""
    compressed = [str(index) for index, item in enumerate(entries) if item.codec == "zstd"]
    return {_ZSTD: " ".join(compressed)} if compressed else {}


def _with_codecs(tensors: tuple[PackTensor, ...], metadata: Mapping[str, str]) -> tuple[PackTensor, ...]:
    """The tensors, those that the metadata marks as zstd frames. FormatError for a mark that marks nothing."""
    if _ZSTD not in metadata:
        return tensors
    pieces = [number for number, tensor in enumerate(tensors) if not tensor.pad]
    marks = metadata[_ZSTD].split(" ")
    possible = {str(index): number for index, number in enumerate(pieces) if tensors[number].dtype == "U8"}
    if len(set(marks)) != len(marks) or not all(mark in possible for mark in marks):
        raise FormatError(f"{_WHAT}: its list of compressed pieces, {metadata[_ZSTD][:120]!r}, names something else")
    marked = {possible[mark] for mark in marks}
    return tuple(replace(tensor, codec="zstd") if number in marked else tensor for number, tensor in enumerate(tensors))


def _add(header: dict[str, _Entry | dict[str, str]], name: str, entry: _Entry) -> None:
    if name in header:
        raise FormatError(f"two tensors of a pack have the name {name!r}")
    header[name] = entry


def _pad_header(text: bytes) -> bytes:
    length = -(-(LENGTH_BYTES + len(text)) // PAGE_BYTES) * PAGE_BYTES - LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"{_WHAT}: {length} bytes, more than the {MAX_HEADER_BYTES} allowed: put fewer pieces into a pack")
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length, b" ")


def _check_entries(entries: Mapping[str, _Entry], data_start: int, total_bytes: int) -> tuple[PackTensor, ...]:
    tensors = []
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        size = _BYTES_OF.get(entry.dtype)
        if size is None:
            raise FormatError(f"{_WHAT}: {name[:120]!r} has the unknown dtype {entry.dtype[:40]!r}")
        if begin != position or end - begin != size * prod(entry.shape) or end == begin:
            raise FormatError(f"{_WHAT}: {name[:120]!r} at {begin} to {end} leaves a hole, overlaps or does not fit its shape")
        position = end
        pad = _PAD.fullmatch(name) is not None
        tensor = PackTensor(name, entry.dtype, entry.shape, data_start + begin, end - begin, pad)
        _check_place(tensor)
        tensors.append(tensor)
    if not tensors or tensors[-1].pad:
        raise FormatError(f"{_WHAT}: a pack ends with a piece")
    if data_start + position != total_bytes:
        raise FormatError(f"{_WHAT}: its tensors end at byte {data_start + position} of {total_bytes}")
    return tuple(tensors)


def _check_place(tensor: PackTensor) -> None:
    if tensor.pad:
        if tensor.dtype != "U8" or tensor.nbytes >= PAGE_BYTES or (tensor.start + tensor.nbytes) % PAGE_BYTES:
            raise FormatError(f"{_WHAT}: {tensor.name} is no filler up to a multiple of {PAGE_BYTES}")
    elif tensor.start % PAGE_BYTES:
        raise FormatError(f"{_WHAT}: {tensor.name[:120]!r} does not start at a multiple of {PAGE_BYTES}")

"""Stored bytes against their manifest: one piece, for a restore; a whole pack, before it is sent, after it was fetched, and for `verify`.

A restore checks the pieces that it reads (`check_piece`). `check_pack` checks what there is: header, every piece's crc and digest,
zero fillers, and the pack's own digest, so that a flipped byte anywhere is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tieredckpt.errors import CorruptionError, FormatError
from tieredckpt.format.codec import Codec, check_frame, raw_blocks
from tieredckpt.format.manifest import Manifest, PackEntry, Piece
from tieredckpt.format.packs import PackTensor, pack_digest, parse_header
from tieredckpt.model.digest import algorithm_of, crc64, digest_like, digest_of_blocks
from tieredckpt.model.leaf import Leaf

Verify = Literal["digest", "crc"]
"""How much of a piece's checksums a restore computes: both, or the fast one alone."""


def pieces_by_pack(manifest: Manifest) -> dict[int, list[Piece]]:
    """Pack index → the manifest's pieces in it, in order of their bytes. A shared pack may hold others as well."""
    found: dict[int, list[Piece]] = {number: [] for number in range(len(manifest.packs))}
    for piece in manifest.pieces:
        found[piece.pack].append(piece)
    for pieces in found.values():
        pieces.sort(key=lambda piece: piece.start)
    return found


def check_piece(piece: Piece, stored: memoryview, verify: Verify) -> None:
    """The checksums of one stored piece; CorruptionError when it is not what the manifest says (I1)."""
    check_stored(piece, stored)
    if verify == "digest" and _digest_of(piece.codec, piece.digest, stored) != piece.digest:
        raise CorruptionError(f"the digest of the piece at byte {piece.start} differs")


def check_stored(piece: Piece, stored: memoryview) -> None:
    """The checksum of the stored bytes."""
    if crc64(stored) != piece.crc64nvme:
        raise CorruptionError(f"the crc64nvme of the piece at byte {piece.start} differs")


def check_raw(piece: Piece, raw: memoryview) -> None:
    """The digest of the raw bytes."""
    if digest_like(piece.digest, raw) != piece.digest:
        raise CorruptionError(f"the digest of the piece at byte {piece.start} differs")


def _digest_of(codec: Codec, like: str, stored: memoryview) -> str:
    """The digest of the raw bytes of a stored piece, by the algorithm of `like`."""
    return digest_like(like, stored) if codec == "raw" else digest_of_blocks(like, raw_blocks(stored))


def check_frames(entry: PackEntry, pieces: Sequence[Piece], leaves: Sequence[Leaf], data: memoryview) -> None:
    """CorruptionError, naming the pack, where a compressed piece says another size than its box has: a restore would refuse it."""
    try:
        for piece in pieces:
            if piece.codec == "zstd":
                check_frame(data[piece.start : piece.start + piece.nbytes], piece.raw_bytes(leaves[piece.leaf]))
    except CorruptionError as error:
        raise CorruptionError(f"{entry.key}: {error}", key=entry.key) from error


def check_pack(entry: PackEntry, pieces: Sequence[Piece], data: memoryview) -> None:
    """CorruptionError, naming the pack, unless `data` is the pack that `entry` and `pieces` describe, to the last byte."""
    try:
        _check(entry, {piece.start: piece for piece in pieces}, data)
    except FormatError as error:
        raise CorruptionError(f"{entry.key}: {error}", key=entry.key) from error


def _check(entry: PackEntry, pieces: dict[int, Piece], data: memoryview) -> None:
    if len(data) != entry.nbytes:
        raise CorruptionError(f"it has {len(data)} bytes and should have {entry.nbytes}")
    pack = parse_header(data, len(data))
    digests: list[str] = []
    for tensor in pack.tensors:
        stored = data[tensor.start : tensor.start + tensor.nbytes]
        if not tensor.pad:
            digests.append(_check_tensor(tensor, pieces.pop(tensor.start, None), stored, entry.digest))
        elif any(stored):
            raise CorruptionError(f"the filler {tensor.name} is not zero")
    if pieces:
        raise CorruptionError(f"it has no piece at byte {min(pieces)}")
    if pack_digest(data[: pack.header_bytes], digests, algorithm_of(entry.digest)) != entry.digest:
        raise CorruptionError("its digest differs")


def _check_tensor(tensor: PackTensor, piece: Piece | None, stored: memoryview, like: str) -> str:
    """The digest of one piece's raw bytes: compared with the manifest's, if this snapshot has the piece."""
    if piece is None:
        return _digest_of(tensor.codec, like, stored)
    if piece.codec != tensor.codec:
        raise CorruptionError(f"the piece at byte {piece.start} is {tensor.codec} and should be {piece.codec}")
    if piece.nbytes != tensor.nbytes:
        raise CorruptionError(f"the piece at byte {piece.start} has {tensor.nbytes} bytes and should have {piece.nbytes}")
    check_piece(piece, stored, "digest")
    return piece.digest

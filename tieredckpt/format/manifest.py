"""The manifest: the self-describing list of one snapshot, and its stored bytes (zstd of canonical JSON).

Everything that a restore reads is read by a manifest, and manifests come from outside. So `decode_manifest` returns only what
`check_manifest` has proven: types and bounds while decoding, then names, leaves, tree, packs, extents and, last, that the
pieces of every leaf tile it (I4). A writer runs the same checks before it stores one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Literal

import msgspec
import zstandard
from msgspec import UNSET, Meta, UnsetType

from tieredckpt.errors import CapacityError, CorruptionError, FormatError
from tieredckpt.format import canonical, keys
from tieredckpt.format.codec import Codec
from tieredckpt.format.tree_json import decode_tree
from tieredckpt.model.box import Box, Stack, check_tiling
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.digest_texts import are_crcs, are_digests
from tieredckpt.model.fields import (
    MAX_NAMES,
    Count,
    CrcSized,
    DigestSized,
    DigestText,
    Label,
    Position,
    PredecessorText,
    Rank,
    SafeInt,
    SnapshotText,
    Step,
    Text,
    Ulid,
    UtcText,
    check_utc,
)
from tieredckpt.model.ids import original_of, parse_snapshot_id
from tieredckpt.model.leaf import DTYPE_BYTES, Extents, Leaf, is_too_large
from tieredckpt.model.tree import LeafRef, format_path, walk_ranks
from tieredckpt.settings import PAGE_BYTES

FORMAT_NAME = "tieredckpt-manifest"
MAX_STORED_BYTES = 512 << 20
"""Of the stored, compressed bytes."""
MAX_MANIFEST_BYTES = 1 << 30
"""Of the decompressed JSON."""
COMPRESSION_LEVEL = 3
_MOST_PER_STORED_BYTE = 1 << 15
"""A block of a zstd frame takes at least 4 bytes, and holds at most 128 KiB."""


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The smallest stored unit: the bytes of one box of one leaf.

    leaf, pack   indices into the manifest's `leaves` and `packs`
    offset, shape  the box
    start        byte offset of the stored bytes from the beginning of the pack, a multiple of 4096
    nbytes       stored bytes; equal to the box's raw bytes for codec "raw", fewer for "zstd"
    crc64nvme    of the stored bytes, 16 hex digits
    digest       of the raw bytes, `blake3:<hex>` or `sha256:<hex>`
    codec        "raw", or "zstd": one frame that holds the raw bytes
    """

    leaf: Count
    offset: Extents
    shape: Extents
    pack: Count
    start: Count
    nbytes: Position
    crc64nvme: CrcSized
    digest: DigestSized
    codec: Codec = "raw"

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)

    def raw_bytes(self, leaf: Leaf) -> int:
        """Of its box."""
        return DTYPE_BYTES[leaf.dtype] * prod(self.shape)


class PackEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """One pack that the snapshot needs. `digest`: see `format.packs.pack_digest`; `snapshot`: the one that wrote it."""

    key: Text
    nbytes: Count
    digest: DigestText
    snapshot: SnapshotText


class World(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The topology that saved: number of ranks, node ids, process mesh (names and sizes)."""

    ranks: Position = 1
    nodes: Annotated[tuple[Ulid, ...], Meta(max_length=MAX_NAMES)] = ()
    mesh: Annotated[tuple[tuple[Label, Position], ...], Meta(max_length=64)] = ()


class Component(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named top-level part of the state. `level`: the weakest resume level that already needs it."""

    name: Label
    kind: Literal["model", "optimizer", "scheduler", "scaler", "rng", "data", "extra"]
    level: Literal["weights", "training", "strict"]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One snapshot. Every index is checked by `check_manifest` before anything is read by it.

    parent  the snapshot that this save was compared with; bases: it, and all others whose packs are named
    depth   of an incremental save: how many saves it is away from the last full one; left out for that one
    """

    format: Literal["tieredckpt-manifest"] = "tieredckpt-manifest"
    version: Literal[1] = 1
    run: Ulid
    snapshot: SnapshotText
    step: Step
    session: Ulid
    created_at: UtcText
    library: Label
    predecessor: PredecessorText
    continues: Annotated[tuple[Ulid, ...], Meta(max_length=MAX_NAMES)] = ()
    parent: SnapshotText | None = None
    bases: Annotated[tuple[SnapshotText, ...], Meta(max_length=MAX_NAMES)] = ()
    depth: Position | UnsetType = UNSET
    rebase_of: SnapshotText | None = None
    world: World = World()
    consistency: Annotated[dict[Label, SafeInt | float | Text], Meta(max_length=1000)] = {}
    components: Annotated[tuple[Component, ...], Meta(max_length=1000)] = ()
    versions: Annotated[dict[Label, Text], Meta(max_length=1000)] = {}
    environment: Annotated[dict[Label, Text], Meta(max_length=1000)] = {}
    tree: msgspec.Raw
    leaves: tuple[Leaf, ...] = ()
    pieces: tuple[Piece, ...] = ()
    packs: tuple[PackEntry, ...] = ()
    writers: tuple[Rank, ...] = (0,)

    @property
    def chain_depth(self) -> int:
        """`depth`, 0 for a full save."""
        return 0 if self.depth is UNSET else self.depth


class _NamedPack(msgspec.Struct, frozen=True, gc=False):
    """As much of a `PackEntry` as `decode_pack_keys` looks at."""

    key: Text


class _Names(msgspec.Struct, frozen=True):
    """As much of a `Manifest`."""

    snapshot: SnapshotText
    packs: tuple[_NamedPack, ...]


def encode_manifest(manifest: Manifest) -> bytes:
    """The stored bytes. FormatError if `decode_manifest` would refuse them."""
    data = canonical.encode(manifest, what=_what(manifest))
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(f"{_what(manifest)}: {len(data)} bytes, more than the {MAX_MANIFEST_BYTES} allowed")
    check_manifest(manifest)
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_content_size=True).compress(data)


def decode_manifest(data: bytes, digest: str | None = None) -> Manifest:
    """The manifest of stored bytes; `digest` is the one in the commit record.

    CorruptionError if the digest is another; UnsupportedVersionError, which names the version, if a newer library wrote it;
    FormatError for anything else that `check_manifest` or decoding refuses.
    """
    text = _text_of(data, digest)
    manifest = canonical.decode(text, Manifest, max_bytes=MAX_MANIFEST_BYTES, what="manifest")
    check_manifest(manifest)
    return manifest


def decode_pack_keys(data: bytes, digest: str) -> tuple[str, frozenset[str]]:
    """(snapshot, keys of the packs that it names) of stored bytes, and nothing else: in a tenth of the time of `decode_manifest`.

    Errors are the same. What it does not look at was checked by whoever committed these very bytes: `digest` says that they are.
    """
    found = canonical.load(_text_of(data, digest), _Names, what="manifest")
    return found.snapshot, frozenset(pack.key for pack in found.packs)


def _text_of(data: bytes, digest: str | None) -> bytes:
    """The JSON of stored bytes that have the digest, of a version that is known here."""
    if digest is not None and sha256_digest(data) != digest:
        raise CorruptionError(f"manifest: its {len(data)} bytes do not have the digest {digest} of its commit record")
    text = _decompress(data)
    canonical.check_version(text, FORMAT_NAME, max_bytes=MAX_MANIFEST_BYTES, what="manifest")
    return text


def check_manifest(manifest: Manifest) -> None:
    """Everything that types cannot say. FormatError, which names the snapshot and the leaf or pack."""
    check_names(manifest)
    check_leaves(manifest)
    check_tree(manifest)
    check_packs(manifest)
    check_extents(manifest)
    check_digests(manifest)
    check_covered(manifest)


def check_names(manifest: Manifest) -> None:
    """Step, session and rebase are those of the snapshot id; the parent is a base; writers are in order."""
    what = _what(manifest)
    check_utc(manifest.created_at, what)
    name = parse_snapshot_id(manifest.snapshot)
    if manifest.step != name.step or manifest.session != name.session:
        raise FormatError(f"{what}: step {manifest.step} or session {manifest.session} is another than the id says")
    if (manifest.rebase_of is None) != (name.rebase is None):
        raise FormatError(f"{what}: rebase_of is {manifest.rebase_of}")
    if manifest.rebase_of is not None and original_of(manifest.rebase_of) != name.original:
        raise FormatError(f"{what}: cannot be a rebase of {manifest.rebase_of}")
    if manifest.parent is not None and manifest.parent not in manifest.bases:
        raise FormatError(f"{what}: its parent {manifest.parent} is none of its bases")
    if (manifest.parent is None) != (manifest.depth is UNSET):
        raise FormatError(f"{what}: its depth is {manifest.chain_depth} and its parent {manifest.parent}")
    if manifest.snapshot in manifest.bases or len(set(manifest.bases)) != len(manifest.bases):
        raise FormatError(f"{what}: a base is there twice, or is the snapshot itself")
    if not manifest.writers or list(manifest.writers) != sorted(set(manifest.writers)):
        raise FormatError(f"{what}: writers {manifest.writers} are not in order")


def check_leaves(manifest: Manifest) -> None:
    """Paths are unique (per rank), dtypes known, sizes within 2^53, and aliases point at an earlier leaf just like them, of their rank."""
    what = _what(manifest)
    seen: dict[str, set[int]] = {}
    for index, leaf in enumerate(manifest.leaves):
        if leaf.dtype not in DTYPE_BYTES:
            raise FormatError(f"{what}: leaf {leaf.path!r} has the unknown dtype {leaf.dtype[:40]!r}")
        if is_too_large(DTYPE_BYTES[leaf.dtype], leaf.shape):
            raise FormatError(f"{what}: leaf {leaf.path!r} with shape {leaf.shape} is too large")
        ranks = seen.setdefault(leaf.path, set())
        if leaf.rank in ranks or -1 in ranks or (ranks and leaf.rank == -1):
            raise FormatError(f"{what}: two leaves have the path {leaf.path!r}")
        ranks.add(leaf.rank)
        if leaf.alias_of >= 0:
            if leaf.alias_of >= index:
                raise FormatError(f"{what}: leaf {leaf.path!r} is the alias of a leaf that does not come before it")
            original = manifest.leaves[leaf.alias_of]
            alike = (original.dtype, original.shape, original.rank) == (leaf.dtype, leaf.shape, leaf.rank)
            if original.alias_of >= 0 or not alike:
                raise FormatError(f"{what}: leaf {leaf.path!r} cannot be an alias of {original.path!r}")


def check_tree(manifest: Manifest) -> None:
    """The tree decodes, and every leaf stands in it once, at its own path, and in the value of its own rank if it has one."""
    what = _what(manifest)
    placed = [False] * len(manifest.leaves)
    for path, rank, node in walk_ranks(decode_tree(manifest.tree)):
        if not isinstance(node, LeafRef):
            continue
        index = node.index
        if index >= len(placed) or placed[index]:
            raise FormatError(f"{what}: the tree names leaf {index}, which is not there or was named before")
        placed[index] = True
        leaf = manifest.leaves[index]
        if leaf.path != format_path(path):
            raise FormatError(f"{what}: leaf {leaf.path!r} stands at {format_path(path)!r} in the tree")
        if leaf.rank != rank:
            raise FormatError(
                f"{what}: leaf {leaf.path!r} of rank {leaf.rank} stands in the tree where rank {rank} has it (-1: all)"
            )
    if not all(placed):
        raise FormatError(f"{what}: leaf {manifest.leaves[placed.index(False)].path!r} is not in the tree")


def check_packs(manifest: Manifest) -> None:
    """Each pack is there once, under the key of the snapshot that owns it: this one (and one of its writers) or a base."""
    what = _what(manifest)
    owners, writers = {manifest.snapshot, *manifest.bases}, frozenset(manifest.writers)
    seen = set()
    for pack in manifest.packs:
        name = keys.parse_pack_key(pack.key)
        if name is None or name.snapshot != pack.snapshot or pack.snapshot not in owners:
            raise FormatError(f"{what}: {pack.key[:160]!r} is not the key of a pack of its own or of a base")
        if pack.snapshot == manifest.snapshot and name.writer not in writers:
            raise FormatError(f"{what}: pack {pack.key} is of none of its writers")
        if pack.key in seen:
            raise FormatError(f"{what}: pack {pack.key} is there twice")
        seen.add(pack.key)


def check_extents(manifest: Manifest) -> None:
    """Pieces name leaves and packs that are there, have the bytes of their boxes, and lie aligned and apart in their packs."""
    what = _what(manifest)
    leaves, packs = manifest.leaves, manifest.packs
    spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for piece in manifest.pieces:
        if piece.leaf >= len(leaves) or piece.pack >= len(packs):
            raise FormatError(f"{what}: a piece names leaf {piece.leaf} of {len(leaves)} in pack {piece.pack} of {len(packs)}")
        leaf, pack = leaves[piece.leaf], packs[piece.pack]
        end = piece.start + piece.nbytes
        raw = piece.raw_bytes(leaf)
        if piece.nbytes != raw if piece.codec == "raw" else piece.nbytes >= raw:
            raise FormatError(f"{what}: a piece of {leaf.path!r} has {piece.nbytes} bytes for {leaf.dtype} {piece.shape}")
        if piece.start < PAGE_BYTES or piece.start % PAGE_BYTES or end > pack.nbytes:
            raise FormatError(f"{what}: a piece of {leaf.path!r} at {piece.start} to {end} is misplaced in {pack.key}")
        spans[piece.pack].append((piece.start, end))
    for index, extents in spans.items():
        extents.sort()
        if any(start < end for (_, end), (start, _) in pairwise(extents)):
            raise FormatError(f"{what}: two pieces overlap in {packs[index].key}")


def check_digests(manifest: Manifest) -> None:
    """Digests and checksums of pieces are spelled as such: types know only how long they are."""
    spelled = (("crc64nvme", are_crcs), ("digest", are_digests))
    for field, are_right in spelled:
        texts = [getattr(piece, field) for piece in manifest.pieces]
        if not are_right(texts):
            wrong, text = next((piece, text) for piece, text in zip(manifest.pieces, texts, strict=True) if not are_right([text]))
            raise FormatError(f"{_what(manifest)}: a piece of {manifest.leaves[wrong.leaf].path!r} has the {field} {text!r}")


def check_covered(manifest: Manifest) -> None:
    """I4: the pieces of every leaf tile its global shape. Aliases and leaves without elements have none."""
    stacks = [Stack(leaf.shape) for leaf in manifest.leaves]
    for piece in manifest.pieces:
        stacks[piece.leaf].add(piece.offset, piece.shape)
    is_open = [leaf.alias_of >= 0 or not stack.is_whole for leaf, stack in zip(manifest.leaves, stacks, strict=True)]
    pieces: dict[int, list[Piece]] = {index: [] for index, still in enumerate(is_open) if still}
    for piece in manifest.pieces if pieces else ():
        if is_open[piece.leaf]:
            pieces[piece.leaf].append(piece)
    for index, own in pieces.items():
        leaf = manifest.leaves[index]
        if leaf.alias_of >= 0:
            if own:
                raise FormatError(f"{_what(manifest)}: leaf {leaf.path!r} is an alias and has pieces")
        elif not _is_whole(own, leaf):
            try:
                check_tiling(leaf.shape, own)
            except FormatError as error:
                raise FormatError(f"{_what(manifest)}: leaf {leaf.path!r}: {error}") from error


def _is_whole(pieces: Sequence[Piece], leaf: Leaf) -> bool:
    return (
        len(pieces) == 1
        and pieces[0].shape == leaf.shape
        and not any(pieces[0].offset)
        and len(pieces[0].offset) == len(leaf.shape)
    )


def _decompress(data: bytes) -> bytes:
    """The JSON of stored bytes. Its size is in the frame, and is checked before anything is allocated."""
    if len(data) > MAX_STORED_BYTES:
        raise FormatError(f"manifest: {len(data)} stored bytes, more than the {MAX_STORED_BYTES} allowed")
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if not 1 <= size <= MAX_MANIFEST_BYTES:  # an unknown one is -1 or 2^64 - 1
            raise FormatError(f"manifest: its frame does not say a size from 1 to {MAX_MANIFEST_BYTES}")
        if size > len(data) * _MOST_PER_STORED_BYTE:
            raise FormatError(f"manifest: its frame says {size} bytes, more than {len(data)} stored ones can hold")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"manifest: not one zstd frame: {error}") from error
    except MemoryError as error:
        raise CapacityError(f"no memory for a manifest of {size} bytes", needed_bytes=size) from error


def _what(manifest: Manifest) -> str:
    return f"manifest of {manifest.snapshot}"

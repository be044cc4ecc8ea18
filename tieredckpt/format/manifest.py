"""The manifest: the self-describing list of one snapshot, and its stored bytes (zstd of canonical JSON)."""

from __future__ import annotations

import msgspec

from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf

MAX_MANIFEST_BYTES = 1 << 30
"""Of the decompressed JSON; the stored bytes are smaller."""


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The smallest stored unit: the bytes of one box of one leaf.

    leaf, pack   indices into the manifest's `leaves` and `packs`
    offset, shape  the box
    start        byte offset of the stored bytes from the beginning of the pack, a multiple of 4096
    nbytes       stored bytes; equal to the box's raw bytes for codec "raw"
    crc64nvme    of the stored bytes, 16 hex digits
    digest       of the raw bytes, `blake3:<hex>` or `sha256:<hex>`
    codec        "raw"
    """

    leaf: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    pack: int
    start: int
    nbytes: int
    crc64nvme: str
    digest: str
    codec: str = "raw"

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)


class PackEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pack that the snapshot needs. `digest`: see `format.packs.pack_digest`; `snapshot`: the one that wrote it."""

    key: str
    nbytes: int
    digest: str
    snapshot: str


class World(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The topology that saved: number of ranks, node ids, process mesh (names and sizes)."""

    ranks: int = 1
    nodes: tuple[str, ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()


class Component(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named top-level part of the state. `kind`: "model", "optimizer", "scheduler", "scaler", "rng", "data" or "extra".

    `level`: the weakest resume level that already needs it: "weights", "training" or "strict".
    """

    name: str
    kind: str
    level: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One snapshot. Every index is checked by `check_manifest` before anything is read by it."""

    format: str = "tieredckpt-manifest"
    version: int = 1
    run: str
    snapshot: str
    step: int
    session: str
    created_at: str
    library: str
    predecessor: str
    continues: tuple[str, ...] = ()
    parent: str | None = None
    bases: tuple[str, ...] = ()
    rebase_of: str | None = None
    world: World = World()
    consistency: dict[str, int | float | str] = {}
    components: tuple[Component, ...] = ()
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}
    tree: msgspec.Raw
    leaves: tuple[Leaf, ...] = ()
    pieces: tuple[Piece, ...] = ()
    packs: tuple[PackEntry, ...] = ()
    writers: tuple[int, ...] = (0,)

"""Writing a snapshot again where packs that it names can never be again.

What a `sweep` has condemned, or a restore has found damaged, may not be referred to any more on that tier (I8, I1). The same state is
committed there all the same, under an id of its own: pieces in such packs go into new packs, or refer to what a snapshot there has
already; all others stay where they are. Which bytes are read for it, and where they go, is decided here; nothing is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, PackEntry, Piece
from tieredckpt.format.packs import PackItem, PackLayout, build_layout, pack_digest, piece_name
from tieredckpt.model.digest import algorithm_of
from tieredckpt.model.ids import SnapshotId
from tieredckpt.plan.layout import page_aligned
from tieredckpt.plan.reuse import Reuse, Reused, owners


@dataclass(frozen=True, slots=True)
class NewPack:
    """A pack to write: where its parts lie in it, and which stored pieces (of the original's manifest) they are, in order."""

    entry: PackEntry
    layout: PackLayout
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Rebased:
    """`manifest`: of the snapshot written again. `new`: pack key → what to write."""

    manifest: Manifest
    new: Mapping[str, NewPack]


def plan_rebase(
    manifest: Manifest, snapshot: SnapshotId, doomed: Collection[str], reuse: Reuse | None, pack_bytes: int
) -> Rebased:
    """`manifest` again under the id `snapshot`, without the packs whose keys are `doomed`.

    `reuse`: a snapshot of the tier, to refer to. New packs have at most `pack_bytes` of data, and belong to the first writer.
    """
    moved: dict[int, Reused] = {}
    new: list[NewPack] = []
    places: dict[int, tuple[str, int]] = {}
    for group in _groups(manifest, doomed, reuse, moved, pack_bytes):
        pack = _new_pack(manifest, snapshot, len(new), [manifest.pieces[index] for index in group])
        new.append(pack)
        places |= {index: (pack.entry.key, start) for index, start in zip(group, pack.layout.starts, strict=True)}
    packs: dict[str, PackEntry] = {pack.entry.key: pack.entry for pack in new}
    numbers = {key: number for number, key in enumerate(packs)}

    def number_of(entry: PackEntry) -> int:
        packs.setdefault(entry.key, entry)
        return numbers.setdefault(entry.key, len(numbers))

    pieces = []
    for index, piece in enumerate(manifest.pieces):
        if index in places:
            key, start = places[index]
            pieces.append(msgspec.structs.replace(piece, pack=numbers[key], start=start))
        elif index in moved:
            there = moved[index]
            pieces.append(
                msgspec.structs.replace(there.piece, leaf=piece.leaf, pack=number_of(there.pack)),
            )
        else:
            pieces.append(msgspec.structs.replace(piece, pack=number_of(manifest.packs[piece.pack])))
    rebased = msgspec.structs.replace(
        manifest,
        snapshot=snapshot,
        rebase_of=manifest.snapshot,
        pieces=tuple(pieces),
        packs=tuple(packs.values()),
        bases=owners(packs.values(), manifest.parent, snapshot),
    )
    return Rebased(rebased, {pack.entry.key: pack for pack in new})


def _groups(
    manifest: Manifest, doomed: Collection[str], reuse: Reuse | None, moved: dict[int, Reused], pack_bytes: int
) -> Iterator[list[int]]:
    """Indices of the pieces to write, a pack's worth at a time; those that `reuse` has are noted in `moved` instead."""
    lost = [pack.key in doomed for pack in manifest.packs]
    group: list[int] = []
    names: set[str] = set()
    size = 0
    for index, piece in enumerate(manifest.pieces):
        if not lost[piece.pack]:
            continue
        found = None if reuse is None else reuse.find(manifest.leaves[piece.leaf], piece.box, piece.digest)
        if found is not None:
            moved[index] = found
            continue
        nbytes, name = page_aligned(piece.nbytes), _name(manifest, piece)
        other_digest = bool(group) and algorithm_of(manifest.pieces[group[0]].digest) != algorithm_of(piece.digest)
        if group and (size + nbytes > pack_bytes or other_digest or name in names):  # ranks may have leaves of the same name
            yield group
            group, names, size = [], set(), 0
        group.append(index)
        names.add(name)
        size += nbytes
    if group:
        yield group


def _name(manifest: Manifest, piece: Piece) -> str:
    leaf = manifest.leaves[piece.leaf]
    return piece_name(leaf.path, piece.box, leaf.shape)


def _new_pack(manifest: Manifest, snapshot: SnapshotId, number: int, pieces: list[Piece]) -> NewPack:
    items = [
        PackItem(
            name=_name(manifest, piece),
            dtype=manifest.leaves[piece.leaf].dtype,
            shape=piece.shape,
            nbytes=piece.nbytes,
            codec=piece.codec,
        )
        for piece in pieces
    ]
    layout = build_layout(items, {"tieredckpt": "1", "snapshot": snapshot})
    tag = pack_digest(layout.header, [piece.digest for piece in pieces], algorithm_of(pieces[0].digest))
    key = keys.pack_key(snapshot, manifest.writers[0], number)
    return NewPack(PackEntry(key=key, nbytes=layout.nbytes, digest=tag, snapshot=snapshot), layout, tuple(pieces))

"""Manifests: stored bytes and back; nothing is returned that `check_manifest` has not proven."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.format.samples import EARLIER, OLDER, REBASED, ROOT, SNAPSHOT, manifest
from tieredckpt.errors import CorruptionError, FormatError, UnsupportedVersionError
from tieredckpt.format import canonical, keys
from tieredckpt.format import manifest as module
from tieredckpt.format.manifest import Manifest, PackEntry, Piece, check_manifest, decode_manifest, encode_manifest
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box, cut
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef, PerRankNodes

replace = msgspec.structs.replace
GOOD = manifest()
STORED = encode_manifest(GOOD)


def compress(text: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(text)


def unpack(stored: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(stored)


def piece(leaf: int, box: Box, start: int, nbytes: int | None = None, pack: int = 0) -> Piece:
    template = GOOD.pieces[0]
    size = 4 * box.elements if nbytes is None else nbytes
    return Piece(leaf, box.offset, box.shape, pack, start, size, template.crc64nvme, template.digest)


def small(leaves: list[Leaf], pieces: list[Piece], pack_bytes: int = 1 << 20) -> Manifest:
    """A manifest of these leaves, at the paths "0", "1", … of a list."""
    named = tuple(replace(leaf, path=str(index)) for index, leaf in enumerate(leaves))
    return replace(
        GOOD,
        tree=encode_tree([LeafRef(index) for index in range(len(leaves))]),
        leaves=named,
        pieces=tuple(pieces),
        packs=(replace(GOOD.packs[0], nbytes=pack_bytes),),
    )


def floats(*shape: int, **fields: object) -> Leaf:
    return Leaf(path="", dtype="float32", shape=shape, **fields)


def test_stored_bytes_round_trip():
    back = decode_manifest(STORED, sha256_digest(STORED))
    assert canonical.dump(back) == canonical.dump(GOOD) == unpack(STORED)
    assert back.pieces == GOOD.pieces
    assert back.leaves == GOOD.leaves
    assert (back.pieces[0].box, back.leaves[0].nbytes) == (Box((0,), (2,)), 8)
    assert encode_manifest(back) == STORED


def test_i1_a_manifest_with_another_digest_than_its_record_is_corrupt():
    for at in range(0, len(STORED), 7):
        damaged = bytearray(STORED)
        damaged[at] ^= 1
        with pytest.raises(CorruptionError, match="digest"):
            decode_manifest(bytes(damaged), sha256_digest(STORED))


@given(at=st.integers(0, len(STORED) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_without_a_digest_is_a_typed_error_or_another_valid_manifest(at, bit):
    damaged = bytearray(STORED)
    damaged[at] ^= 1 << bit
    try:
        check_manifest(decode_manifest(bytes(damaged)))
    except FormatError:
        return


@given(st.binary(max_size=100))
def test_no_bytes_make_another_error(data):
    with pytest.raises(FormatError):
        decode_manifest(data)
    with pytest.raises(FormatError):
        decode_manifest(compress(data))


def test_i17_a_newer_manifest_is_refused_with_the_version_named():
    newer = canonical.dump(json.loads(unpack(STORED)) | {"version": 2, "new": True})
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        decode_manifest(compress(newer))


@pytest.mark.parametrize("case", ["no size", "two frames", "data after", "bomb", "cut", "plain", "empty", "skippable"])
def test_frames_are_checked_before_anything_is_allocated(case):
    text = unpack(STORED)
    data = {
        "no size": compress(text, write_content_size=False),
        "two frames": STORED + compress(b" "),
        "data after": STORED + b"x",
        "bomb": b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little") + STORED[9:],
        "cut": STORED[:-10],
        "plain": text,
        "empty": b"",
        "skippable": b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + STORED,
    }[case]
    with pytest.raises(FormatError, match="manifest: "):
        decode_manifest(data)


def test_a_manifest_over_its_caps_is_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(FormatError, match="size from 1 to 1000"):
        decode_manifest(STORED)
    with pytest.raises(FormatError, match="more than the 1000"):
        encode_manifest(GOOD)
    monkeypatch.setattr(module, "MAX_STORED_BYTES", 100)
    with pytest.raises(FormatError, match="more than the 100"):
        decode_manifest(STORED)


PACKS = GOOD.packs
LEAVES = GOOD.leaves
FIRST, SECOND = GOOD.pieces

BAD: dict[str, tuple[Callable[[], Manifest], str]] = {
    "step": (lambda: replace(GOOD, step=501), "than the id says"),
    "session": (lambda: replace(GOOD, session=EARLIER), "than the id says"),
    "rebase": (lambda: replace(GOOD, rebase_of=OLDER), "rebase_of"),
    "rebase of another": (lambda: replace(GOOD, snapshot=REBASED, rebase_of=OLDER), "rebase of"),
    "parent no base": (lambda: replace(GOOD, parent=OLDER), "none of its bases"),
    "own base": (lambda: replace(GOOD, bases=(SNAPSHOT,)), "itself"),
    "base twice": (lambda: replace(GOOD, bases=(OLDER, OLDER)), "twice"),
    "no writer": (lambda: replace(GOOD, writers=()), "writers"),
    "writers out of order": (lambda: replace(GOOD, writers=(1, 0)), "writers"),
    "writer twice": (lambda: replace(GOOD, writers=(0, 0)), "writers"),
    "unknown dtype": (lambda: replace(GOOD, leaves=(replace(LEAVES[0], dtype="float31"), LEAVES[1])), "unknown dtype"),
    "same path": (lambda: replace(GOOD, leaves=(LEAVES[0], replace(LEAVES[1], path=LEAVES[0].path))), "two leaves"),
    "same path, one per rank": (
        lambda: replace(GOOD, leaves=(LEAVES[0], replace(LEAVES[1], path=LEAVES[0].path, rank=0))),
        "two leaves",
    ),
    "leaf of a rank where all have it": (
        lambda: replace(small([floats(0, rank=0)], []), tree=encode_tree([LeafRef(0)])),
        "leaf '0' of rank 0 stands in the tree where rank -1 has it",
    ),
    "leaf of all in the value of a rank": (
        lambda: replace(small([floats(0)], []), tree=encode_tree([PerRankNodes({0: LeafRef(0)})])),
        "of rank -1 stands in the tree where rank 0",
    ),
    "leaf of another rank": (
        lambda: replace(small([floats(0, rank=1)], []), tree=encode_tree([PerRankNodes({0: LeafRef(0), 1: 5})])),
        "of rank 1 stands in the tree where rank 0",
    ),
    "alias of another rank": (lambda: small([floats(0, rank=0), floats(0, alias_of=0, rank=1)], []), "cannot be an alias"),
    "overflow": (lambda: small([floats(2**40, 2**40)], []), "too large"),
    "alias of itself": (lambda: small([floats(0, alias_of=0)], []), "does not come before"),
    "alias of a later one": (lambda: small([floats(0, alias_of=1), floats(0)], []), "does not come before"),
    "alias of an alias": (lambda: small([floats(0), floats(0, alias_of=0), floats(0, alias_of=1)], []), "cannot be an alias"),
    "alias of another shape": (lambda: small([floats(0), floats(0, 1, alias_of=0)], []), "cannot be an alias"),
    "alias with pieces": (
        lambda: small([floats(1), floats(1, alias_of=0)], [piece(0, Box((0,), (1,)), 4096), piece(1, Box((0,), (1,)), 8192)]),
        "is an alias and has pieces",
    ),
    "leaf not in the tree": (lambda: replace(GOOD, tree=encode_tree({"model": {"weight": LeafRef(0)}})), "not in the tree"),
    "leaf twice in the tree": (
        lambda: replace(small([floats(0)], []), tree=encode_tree([LeafRef(0), LeafRef(0)])),
        "named before",
    ),
    "leaf that is not there": (lambda: replace(small([floats(0)], []), tree=encode_tree([LeafRef(1)])), "not there"),
    "leaf at another path": (lambda: replace(small([floats(0)], []), tree=encode_tree({"a": LeafRef(0)})), "stands at 'a'"),
    "tree not canonical": (lambda: replace(GOOD, tree=msgspec.Raw(b"[1, 2]")), "canonical"),
    "pack of another snapshot": (
        lambda: replace(GOOD, packs=(replace(PACKS[0], key=keys.pack_key(OLDER, 0, 0)),)),
        "of its own or of a base",
    ),
    "pack of no base": (
        lambda: replace(GOOD, packs=(replace(PACKS[0], key=keys.pack_key(OLDER, 0, 0), snapshot=OLDER),)),
        "of its own or of a base",
    ),
    "pack key that escapes": (lambda: replace(GOOD, packs=(replace(PACKS[0], key="../x"),)), "of its own or of a base"),
    "pack of no writer": (
        lambda: replace(GOOD, packs=(replace(PACKS[0], key=keys.pack_key(SNAPSHOT, 1, 0)),)),
        "none of its writers",
    ),
    "pack twice": (lambda: replace(GOOD, packs=PACKS * 2), "twice"),
    "leaf index": (lambda: replace(GOOD, pieces=(FIRST, replace(SECOND, leaf=2))), "names leaf 2 of 2"),
    "pack index": (lambda: replace(GOOD, pieces=(FIRST, replace(SECOND, pack=1))), "in pack 1 of 1"),
    "piece bytes": (lambda: replace(GOOD, pieces=(replace(FIRST, nbytes=4), SECOND)), "has 4 bytes"),
    "piece not aligned": (lambda: replace(GOOD, pieces=(FIRST, replace(SECOND, start=4104))), "misplaced"),
    "piece in the header": (lambda: replace(GOOD, pieces=(replace(FIRST, start=0), SECOND)), "misplaced"),
    "piece past the end": (lambda: replace(GOOD, pieces=(FIRST, replace(SECOND, start=12288))), "misplaced"),
    "pieces overlap": (lambda: replace(GOOD, pieces=(FIRST, replace(SECOND, start=4096))), "overlap"),
    "long pieces overlap": (
        lambda: small([floats(2048), floats(1)], [piece(0, Box((0,), (2048,)), 4096), piece(1, Box((0,), (1,)), 8192)]),
        "overlap",
    ),
    "I4 gap": (lambda: replace(GOOD, pieces=(FIRST,)), "'counters/samples'"),
    "I4 piece missing": (lambda: small([floats(8)], [piece(0, Box((0,), (4,)), 4096)]), "leaf '0'"),
    "I4 piece twice": (
        lambda: small([floats(8)], [piece(0, Box((0,), (4,)), 4096), piece(0, Box((0,), (4,)), 8192)]),
        "leaf '0'",
    ),
    "I4 offset": (lambda: small([floats(8)], [piece(0, Box((1,), (8,)), 4096)]), "outside"),
    "I4 rank": (lambda: small([floats(8)], [piece(0, Box((0, 0), (8, 1)), 4096)]), "2 dimensions"),
    "I4 piece of an empty leaf": (lambda: small([floats(0)], [piece(0, Box((0,), (1,)), 4096)]), "outside"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_manifest_that_lies_is_refused_on_reading_and_on_writing(case):
    make, message = BAD[case]
    bad = make()
    with pytest.raises(FormatError, match=message):
        check_manifest(bad)
    with pytest.raises(FormatError, match=message):
        decode_manifest(compress(canonical.dump(bad)))
    with pytest.raises(FormatError, match=message):
        encode_manifest(bad)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "x"),
        ("snapshot", "../x"),
        ("created_at", "now"),
        ("predecessor", ""),
        ("format", "other"),
        ("writers", [-1]),
        ("consistency", {"step": None}),
        ("consistency", {"step": 2**53}),
        ("components", [{"name": "a", "kind": "script", "level": "strict"}]),
        ("world", {"mesh": [["dp", 0]], "nodes": [], "ranks": 1}),
        ("versions", {"a": "x" * 4097}),
        ("leaves", [json.loads(canonical.dump(LEAVES[0])) | {"shape": [-1]}]),
        ("leaves", [json.loads(canonical.dump(LEAVES[0])) | {"shape": [1] * 65}]),
        ("leaves", [json.loads(canonical.dump(LEAVES[0])) | {"path": "x" * 4097}]),
        ("leaves", [json.loads(canonical.dump(LEAVES[0])) | {"kind": "pickle"}]),
        ("pieces", [[0, [0], [2], 0, 4096, 8, "x", FIRST.digest, "raw"]]),
        ("pieces", [[0, [0], [2], 0, 4096, 8, FIRST.crc64nvme, "md5:00", "raw"]]),
        ("pieces", [[0, [0], [2], 0, 4096, 8, FIRST.crc64nvme, FIRST.digest, "exec"]]),
        ("pieces", [[0, [0], [2], 0, 4096, 8, FIRST.crc64nvme, FIRST.digest]]),
        ("pieces", [[0, [0], [2], 0, 4096, 8, FIRST.crc64nvme, FIRST.digest, "raw", 1]]),
        ("pieces", [[0, [0], [2], 0, 2**63, 8, FIRST.crc64nvme, FIRST.digest, "raw"]]),
        ("pieces", [[0, [0], [2], 0, 4096, 0, FIRST.crc64nvme, FIRST.digest, "raw"]]),
        ("pieces", [[-1, [0], [2], 0, 4096, 8, FIRST.crc64nvme, FIRST.digest, "raw"]]),
        ("packs", [json.loads(canonical.dump(PACKS[0])) | {"nbytes": 2**64}]),
        ("tree", {"pickle": "gASVBAAAAAAAAABLAS4="}),
        ("extra", 1),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_fields_out_of_bounds_are_refused(field, value):
    with pytest.raises(FormatError):
        decode_manifest(compress(canonical.dump(json.loads(unpack(STORED)) | {field: value})))


def test_c100_c101_empty_and_scalar_leaves_aliases_and_snapshots_without_packs_are_fine():
    made = small([floats(), floats(0), floats(3, 0), floats(alias_of=0)], [piece(0, Box((), ()), 4096)])
    assert len(decode_manifest(encode_manifest(made)).leaves) == 4
    bare = replace(GOOD, tree=encode_tree({"step": 3}), leaves=(), pieces=(), packs=())
    assert decode_manifest(encode_manifest(bare)).packs == ()


def test_leaves_of_several_ranks_may_share_a_path():
    one, two = (replace(LEAVES[0], path="x", rank=rank) for rank in (0, 1))
    module.check_leaves(replace(GOOD, leaves=(one, two)))
    with pytest.raises(FormatError, match="two leaves"):
        module.check_leaves(replace(GOOD, leaves=(one, two, one)))


def test_a_rebased_incremental_manifest_names_packs_of_its_bases():
    base = PackEntry(key=keys.pack_key(OLDER, 4, 2), nbytes=PACKS[0].nbytes, digest=PACKS[0].digest, snapshot=OLDER)
    made = replace(
        GOOD,
        snapshot=REBASED,
        rebase_of=SNAPSHOT,
        parent=OLDER,
        depth=1,
        bases=(OLDER,),
        predecessor=ROOT,
        packs=(base, replace(PACKS[0], key=keys.pack_key(REBASED, 0, 0), snapshot=REBASED)),
        pieces=(FIRST, replace(SECOND, pack=1)),
    )
    assert decode_manifest(encode_manifest(made)).packs[0] == base


def test_many_pieces_of_a_mesh_are_proven_to_tile_and_one_moved_piece_is_found():
    shards = [Box((row, column), (50, 64)) for row in range(0, 100, 50) for column in range(0, 128, 64)]
    boxes = [box for shard in shards for box in cut(shard, 4, 16)]
    pieces = [piece(0, box, 4096 * (index + 1)) for index, box in enumerate(boxes)]
    made = small([floats(100, 128)], pieces, 4096 * (len(boxes) + 2))
    assert len(decode_manifest(encode_manifest(made)).pieces) == 3200
    pieces[1000] = piece(0, Box((0, 0), boxes[1000].shape), 4096 * 1001)
    with pytest.raises(FormatError, match="leaf '0'"):
        encode_manifest(small([floats(100, 128)], pieces, 4096 * (len(boxes) + 2)))

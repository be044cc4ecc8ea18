"""A snapshot written again without the packs that can never be again: every piece once, nothing from a doomed pack (I8, I4)."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.format.samples import SNAPSHOT, ULID
from tests.format.samples import manifest as sample
from tieredckpt.engine.rebase import read_new_pack
from tieredckpt.errors import CorruptionError
from tieredckpt.format import keys
from tieredckpt.format.codec import compress
from tieredckpt.format.manifest import Manifest, PackEntry, Piece, check_manifest
from tieredckpt.format.packs import PackItem, build_layout, pack_digest, piece_name
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box
from tieredckpt.model.digest import crc64, digest
from tieredckpt.model.ids import rebased_id
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.rebase import plan_rebase
from tieredckpt.plan.reuse import Reuse
from tieredckpt.store.memory import MemoryStore

NEW_ID = rebased_id(SNAPSHOT, ULID)
BASE = "000000000100-01JBBBBBBBBBBBBBBBBBBBBBB0-000001"


def stored(store: MemoryStore, packs: list[list[tuple[str, bytes, str]]], *, owners: list[str]) -> Manifest:
    """A manifest whose leaves lie in these packs: (path, bytes, digest algorithm), in `store`. Every second piece is compressed."""
    leaves: list[Leaf] = []
    pieces: list[Piece] = []
    entries: list[PackEntry] = []
    for number, (content, owner) in enumerate(zip(packs, owners, strict=True)):
        key = keys.pack_key(owner, 0, number)
        items, data, tags = [], [], []
        for path, raw, algorithm in content:
            frame = compress(memoryview(raw)) if len(pieces) % 2 else None
            leaf = Leaf(path=path, dtype="uint8", shape=(len(raw),))
            leaves.append(leaf)
            kept, codec = (raw, "raw") if frame is None else (frame, "zstd")
            tags.append(digest(algorithm, raw))
            data.append(kept)
            items.append(PackItem(piece_name(path, Box.whole(leaf.shape), leaf.shape), "uint8", leaf.shape, len(kept), codec))
            pieces.append(Piece(len(leaves) - 1, (0,), leaf.shape, number, 0, len(kept), crc64(kept), tags[-1], codec))
        layout = build_layout(items, {"tieredckpt": "1", "snapshot": owner})
        for index, start in enumerate(layout.starts):
            at = len(pieces) - len(items) + index
            pieces[at] = msgspec.structs.replace(pieces[at], start=start)
        store.put(key, [layout.header, *(part.ljust(size, b"\0") for part, size in zip(data, layout.padded, strict=True))])
        tag = pack_digest(layout.header, tags, content[0][2])
        entries.append(PackEntry(key=key, nbytes=layout.nbytes, digest=tag, snapshot=owner))
    bases = tuple(sorted(set(owners) - {SNAPSHOT}))
    manifest = msgspec.structs.replace(
        sample(), leaves=tuple(leaves), pieces=tuple(pieces), packs=tuple(entries), bases=bases, components=(),
        tree=encode_tree({leaf.path: LeafRef(index) for index, leaf in enumerate(leaves)}),
    )  # fmt: skip
    check_manifest(manifest)
    return manifest


def content(seed: int, packs: int, algorithm: str = "blake3") -> list[list[tuple[str, bytes, str]]]:
    chance = random.Random(seed)
    return [
        [(f"p{pack}.{n}", bytes([chance.randrange(256)]) * chance.randrange(1, 9000), algorithm) for n in range(3)]
        for pack in range(packs)
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), doomed=st.sets(st.integers(0, 3)), owned=st.sets(st.integers(0, 3)), pack_pages=st.integers(3, 9)
)
def test_every_piece_is_there_once_and_good_and_nothing_in_a_doomed_pack(
    seed: int, doomed: set[int], owned: set[int], pack_pages: int
):
    store = MemoryStore("disk")
    before = stored(store, content(seed, 4), owners=[SNAPSHOT if number in owned else BASE for number in range(4)])
    gone = {before.packs[number].key for number in doomed}
    rebased = plan_rebase(before, NEW_ID, gone, None, pack_pages * 4096)
    after = rebased.manifest
    check_manifest(after)
    assert after.rebase_of == SNAPSHOT
    assert gone.isdisjoint(pack.key for pack in after.packs)
    assert {pack.key for pack in after.packs if pack.snapshot == NEW_ID} == rebased.new.keys()
    for new in rebased.new.values():
        assert new.layout.nbytes - len(new.layout.header) <= pack_pages * 4096
        store.put(new.entry.key, [read_new_pack(store, before, new)])
    for old, new in zip(before.pieces, after.pieces, strict=True):
        assert (old.leaf, old.offset, old.shape, old.digest) == (new.leaf, new.offset, new.shape, new.digest)
        there = store.get(after.packs[new.pack].key, max_bytes=1 << 20)[new.start : new.start + new.nbytes]
        assert crc64(there) == new.crc64nvme


def test_what_a_snapshot_of_the_tier_has_is_referred_to_and_not_written():
    store = MemoryStore("disk")
    here = stored(store, content(1, 2), owners=[SNAPSHOT, SNAPSHOT])
    there = stored(MemoryStore("bucket"), content(1, 2), owners=[BASE, BASE])
    usable = [there.packs[0].key]
    rebased = plan_rebase(here, NEW_ID, {pack.key for pack in here.packs}, Reuse(there, usable), 1 << 20)
    assert [pack.snapshot for pack in rebased.manifest.packs] == [NEW_ID, BASE]
    assert len(rebased.new) == 1
    assert rebased.manifest.bases == (BASE,)
    check_manifest(rebased.manifest)


def test_digests_of_two_algorithms_do_not_share_a_pack():
    store = MemoryStore("disk")
    (some,), (others,) = content(1, 1), content(2, 1, "sha256")
    renamed = [(f"other.{path}", raw, algorithm) for path, raw, algorithm in others]
    here = stored(store, [some, renamed], owners=[SNAPSHOT, SNAPSHOT])
    rebased = plan_rebase(here, NEW_ID, {pack.key for pack in here.packs}, None, 1 << 20)
    assert [new.entry.digest.partition(":")[0] for new in rebased.new.values()] == ["blake3", "sha256"]
    check_manifest(rebased.manifest)


def test_leaves_of_two_ranks_with_one_name_do_not_share_a_pack():
    """A pack's tensors have names of their own; those of two writers need not differ."""
    store = MemoryStore("disk")
    both = stored(store, [[("rng", b"a" * 100, "blake3")], [("other", b"b" * 100, "blake3")]], owners=[SNAPSHOT, SNAPSHOT])
    leaves = tuple(msgspec.structs.replace(leaf, path="rng", rank=rank) for rank, leaf in enumerate(both.leaves))
    rebased = plan_rebase(msgspec.structs.replace(both, leaves=leaves), NEW_ID, {pack.key for pack in both.packs}, None, 1 << 20)
    assert len(rebased.new) == 2


def test_i1_damage_in_what_a_new_pack_is_made_of_is_named_where_it_is():
    store = MemoryStore("disk")
    here = stored(store, content(3, 1), owners=[SNAPSHOT])
    (new,) = plan_rebase(here, NEW_ID, {here.packs[0].key}, None, 1 << 20).new.values()
    data = bytearray(store.get(here.packs[0].key, max_bytes=1 << 20))
    data[here.pieces[0].start] ^= 1
    store.delete([here.packs[0].key])
    store.put(here.packs[0].key, [bytes(data)])
    with pytest.raises(CorruptionError) as caught:
        read_new_pack(store, here, new)
    assert caught.value.key == here.packs[0].key
    store.delete([here.packs[0].key])
    with pytest.raises(CorruptionError) as caught:
        read_new_pack(store, here, new)
    assert caught.value.key == here.packs[0].key

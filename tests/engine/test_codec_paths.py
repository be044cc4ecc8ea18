"""Compressed pieces on every path: landing, replacing, verifying, sending, and what other tools see of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import zstandard
from safetensors import safe_open

from tests.engine.piecekit import CHAIN, CUT, LENGTH, manifest_of, opened, read, rewrite, value
from tests.engine.runkit import KEEP_ALL, SMALL, Place, begun, ids, names
from tieredckpt.engine import packing
from tieredckpt.engine.landing import Damage, Lander
from tieredckpt.engine.pack_check import check_pack, pieces_by_pack
from tieredckpt.engine.packing import PackWriter
from tieredckpt.engine.verify import Verifier
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import CorruptionError
from tieredckpt.format import keys
from tieredckpt.model.digest import crc64
from tieredckpt.model.ids import SnapshotId
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.reading import plan_reading
from tieredckpt.settings import MIB, Settings
from tieredckpt.store.base import Buffer
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.store_checks.tools import noise

ZSTD = replace(CUT, codec="zstd", pack_bytes=65536)
"""All pieces in one pack."""


@pytest.mark.parametrize("verify", ["digest", "crc"])
def test_i1_c12_a_damaged_frame_is_found_and_taken_from_the_bucket_and_the_pack_is_replaced(verify: str):
    place = Place()
    job = begun(place, incremental=CHAIN, settings=ZSTD)
    job.save(1, value())
    job.save(2, value(0))
    job.work()
    job.die()
    good = {key: read(place, "local", key) for key in names(place.store("local"), keys.DATA_PREFIX)}
    first = manifest_of(place, 2).pieces[3]
    assert first.codec == "zstd"
    key = manifest_of(place, 2).packs[first.pack].key
    flipped = bytearray(good[key])
    flipped[first.start + first.nbytes // 2] ^= 1
    rewrite(place, "local", key, bytes(flipped))
    again = place.job(verify=verify)
    assert again.restore() == ids(place)[2]
    assert again.landed is not None
    assert again.landed.bad_here == {key}
    again.work()
    assert read(place, "local", key) == good[key], "it is whole again, what this snapshot does not name of it too"
    place.check()


@pytest.mark.parametrize(
    "frame",
    [b"junk" * 4, zstandard.compress(b"x" * 999), zstandard.compress(b"x" * (1 << 20))],
    ids=["junk", "smaller", "larger"],
)
def test_i13_a_frame_of_another_size_is_damage_even_where_its_crc_is_right(frame: bytes):
    """A manifest from outside may say anything: what lands is checked by size, and never larger than the box."""
    place = Place()
    job = begun(place, settings=ZSTD)
    job.save(1, value())
    manifest = manifest_of(place, 1)
    piece = manifest.pieces[2]
    pack = manifest.packs[piece.pack]
    data = bytearray(read(place, "local", pack.key))
    data[piece.start : piece.start + len(frame)] = frame
    rewrite(place, "local", pack.key, bytes(data))
    lying = msgspec.structs.replace(piece, nbytes=len(frame), crc64nvme=crc64(frame))
    pieces = tuple(lying if one is piece else one for one in manifest.pieces)
    told = msgspec.structs.replace(manifest, pieces=pieces)
    plan = plan_reading(told, [0])
    lander = Lander(
        manifest=told, local=opened(place, "local"), remote=None, verify="crc", remote_out_of_reach=False,
        pool=InlineEnv().executor("read", 1),
    )  # fmt: skip
    with pytest.raises(Damage, match="compressed piece"):
        lander.land(plan, memoryview(bytearray(plan.arena_bytes)))


def test_i1_with_crc_alone_a_frame_that_gives_other_bytes_is_damage():
    """The decompressor sees nothing wrong with it, and the digest is not computed."""
    place = Place()
    job = begun(place, settings=ZSTD)
    job.save(1, value())
    manifest = manifest_of(place, 1)
    piece = manifest.pieces[0]
    key = manifest.packs[piece.pack].key
    data = bytearray(read(place, "local", key))
    frame = bytes(data[piece.start : piece.start + piece.nbytes])
    other = zstandard.compress(b"b" + b"a" * (piece.raw_bytes(manifest.leaves[0]) - 1))[: piece.nbytes]
    candidates = (frame[:at] + bytes([frame[at] ^ bit]) + frame[at + 1 :] for at in range(len(frame)) for bit in (1, 2, 4, 8))
    lying = next(
        one for one in (other, *candidates) if one != frame and len(one) == len(frame) and _gives_other_bytes(one, frame)
    )
    data[piece.start : piece.start + piece.nbytes] = lying
    rewrite(place, "local", key, bytes(data))
    plan = plan_reading(manifest, [0])
    pool = InlineEnv().executor("read", 1)
    here = opened(place, "local")
    lander = Lander(manifest=manifest, local=here, remote=None, verify="crc", remote_out_of_reach=False, pool=pool)
    with pytest.raises(Damage, match="crc64nvme"):
        lander.land(plan, memoryview(bytearray(plan.arena_bytes)))


def _gives_other_bytes(one: bytes, frame: bytes) -> bool:
    try:
        raw = zstandard.decompress(one)
    except zstandard.ZstdError:
        return False
    good = zstandard.decompress(frame)
    return raw != good and len(raw) == len(good)


def test_any_safetensors_reader_opens_a_pack_with_frames(tmp_path):
    place = Place()
    job = begun(place, settings=ZSTD)
    job.save(1, value())
    (pack,) = manifest_of(place, 1).packs
    (tmp_path / "pack.safetensors").write_bytes(read(place, "local", pack.key))
    with safe_open(tmp_path / "pack.safetensors", "np") as file:
        marks = [int(mark) for mark in file.metadata()["zstd"].split()]
        named = sorted((name for name in file.keys() if not name.startswith("__")), key=lambda name: int(name[2:].split(":")[0]))  # noqa: SIM118
        raw = [file.get_tensor(name).tobytes() for name in named]
    assert marks == list(range(len(raw)))
    assert b"".join(zstandard.decompress(frame) for frame in raw) == value()


def test_verify_reads_every_byte_of_a_pack_of_which_a_snapshot_names_a_part():
    """Also the frames that it does not name: the pack's digest covers their raw bytes."""
    place = Place()
    job = begun(place, incremental=CHAIN, settings=ZSTD, retention=KEEP_ALL)
    job.save(1, value())
    job.save(2, value(0, 1, 2))
    manifest = manifest_of(place, 2)
    shared = next(number for number, pack in enumerate(manifest.packs) if pack.snapshot == ids(place, "local")[1])
    key = manifest.packs[shared].key
    named = {piece.start for piece in pieces_by_pack(manifest)[shared]}
    unnamed = [piece for piece in manifest_of(place, 1).pieces if piece.start not in named]
    assert named
    assert unnamed
    second = ids(place, "local")[2]
    assert Verifier(opened(place, "local"), Env(), SMALL).verify([second]).ok
    data = bytearray(read(place, "local", key))
    data[unnamed[0].start + unnamed[0].nbytes - 3] ^= 0x40
    rewrite(place, "local", key, bytes(data))
    report = Verifier(opened(place, "local"), Env(), SMALL).verify([second])
    assert [finding.key for finding in report.findings] == [key]
    with pytest.raises(CorruptionError, match=key):
        check_pack(manifest.packs[shared], pieces_by_pack(manifest)[shared], memoryview(data))


def test_sources_count_raw_bytes_also_of_compressed_pieces():
    place = Place()
    job = begun(place, settings=ZSTD)
    job.save(1, value())
    job.die()
    again = place.job()
    again.restore()
    assert again.landed is not None
    assert again.landed.landing.sources == {"local": LENGTH, "remote": 0}


class _Null(MemoryStore):
    """Takes packs and keeps nothing."""

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """The bytes are gone when this returns, as from a disk's point of view."""


def test_i11_frames_are_given_back_when_their_pack_is_written(monkeypatch: pytest.MonkeyPatch):
    """C128: a compressed copy of the whole state must not pile up beside the staged one."""
    leaf = Leaf(path="w", dtype="uint8", shape=(24 * MIB,))
    sizes = Settings(pack_bytes=MIB, piece_bytes=MIB // 2, codec="zstd", copy_threads=1)
    layout = lay_out((leaf,), sizes)
    arena = memoryview(bytearray(layout.arena_bytes))
    for slot in range(0, layout.arena_bytes, MIB // 2):  # half of each piece is noise, so that frames are large
        arena[slot : slot + MIB // 4] = noise(MIB // 4, slot)
    inline = InlineEnv().executor("any", 1)
    monkeypatch.setattr(packing, "_BATCH_BYTES", MIB)
    tracemalloc.start()
    try:
        packed = PackWriter(_Null(), sizes, inline, inline).write(
            SnapshotId(f"{1:012d}-{'0' * 26}-000001"), 0, (leaf,), layout, arena
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    stored = sum(piece.nbytes for piece in packed.pieces)
    assert stored > 10 * MIB
    assert {piece.codec for piece in packed.pieces} == {"zstd"}
    assert peak < stored / 2


def test_chains_of_both_codecs():
    place = Place()
    for step, codec in enumerate(("raw", "zstd", "raw", "zstd"), start=1):
        job = place.job(incremental=CHAIN, settings=replace(CUT, codec=codec))
        job.restore()
        job.save(step, value(*range(step)))
        job.work()
        job.die()
    assert {piece.codec for piece in manifest_of(place, 4).pieces} == {"raw", "zstd"}
    place.check()
    assert place.another_node().job().restore() == ids(place)[4]

"""Compressed pieces, damage and rebases on every path of a chain: landing, refilling, verifying, sending, and going on from there."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import zstandard
from safetensors import safe_open

from tests.engine.chainkit import load
from tests.engine.runkit import KEEP_ALL, SMALL, Job, Place, Request, begun, damage_snapshot, ids, names, tool
from tests.engine.test_incremental import CHAIN, CUT, LENGTH, condemn, manifest_of, packs_by_owner, value
from tieredckpt.engine import packing
from tieredckpt.engine.landing import Damage, Lander
from tieredckpt.engine.pack_check import check_pack, pieces_by_pack
from tieredckpt.engine.packing import PackWriter
from tieredckpt.engine.tier import OpenTier, open_existing
from tieredckpt.engine.verify import Verifier
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import CorruptionError, SaveError, StoreError
from tieredckpt.format import keys
from tieredckpt.model.digest import crc64
from tieredckpt.model.ids import SnapshotId, original_of
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.policies import Every
from tieredckpt.plan.reading import plan_reading
from tieredckpt.settings import MIB, Settings
from tieredckpt.store.base import Buffer
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.store_checks.tools import noise

ZSTD = replace(CUT, codec="zstd", pack_bytes=65536)
"""All pieces in one pack."""


def opened(place: Place, tier: str) -> OpenTier:
    return open_existing("local" if tier == "local" else "remote", place.store(tier), place.env, SMALL)


def rewrite(place: Place, tier: str, key: str, data: bytes) -> None:
    place.store(tier).delete([key])
    place.store(tier).put(key, [data])


def read(place: Place, tier: str, key: str) -> bytes:
    return place.store(tier).get(key, max_bytes=1 << 20)


# ------------------------------------------------------------------------------------------ compressed pieces


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


# ------------------------------------------------------------------------------------------ damage is not inherited


def test_i1_what_cannot_be_sent_because_its_base_is_damaged_is_written_again_by_the_next_save():
    """C50: one flipped byte on the disk, and no later save of the chain would ever have reached the bucket."""
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.outage()
    job.save(1, value())
    damage_snapshot(place.store("local"), ids(place, "local")[1])
    second = job.save(2, value(0))
    job.outage(False)
    job.work()
    with pytest.raises(SaveError, match="damaged"):
        second.remote.result(0)
    third = job.save(3, value(0, 1))
    job.work()
    info = third.remote.result(0)
    assert info is not None
    assert packs_by_owner(manifest_of(place, 3, "remote")).keys() <= {2, 3, 1}
    place.check_tier("remote")
    load(opened(place, "local"), manifest_of(place, 3))


def test_i1_a_save_right_after_a_restore_does_not_refer_to_the_pack_that_was_found_damaged():
    """The bucket is cut off before the refill can replace it."""
    place = Place()
    job = begun(place, 0, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.die()
    key = manifest_of(place, 1).packs[0].key
    data = bytearray(read(place, "local", key))
    data[-1] ^= 1
    rewrite(place, "local", key, bytes(data))
    again = place.job(incremental=CHAIN, settings=CUT)
    assert again.remote is not None

    def cut(request: Request) -> StoreError | None:
        """Everything but the one read that the restore needs."""
        reads.append(request)
        first = len([one for one in reads if one.method == "read_into"]) == 1
        return None if request.method != "read_into" or first else StoreError("cut", retryable=True)

    reads: list[Request] = []
    again.remote.fault = cut
    again.restore()
    again.save(2, value(0))
    assert key not in {pack.key for pack in manifest_of(place, 2).packs}
    load(opened(place, "local"), manifest_of(place, 2))


def test_i1_a_base_whose_manifest_the_disk_cannot_read_makes_the_save_full():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.run._bases._known = None
    assert job.local is not None

    def bad_sector(request: Request) -> StoreError | None:
        manifest = request.method == "get" and "manifest" in request.keys[0]
        return StoreError("input/output error", retryable=False) if manifest else None

    job.local.fault = bad_sector
    handle = job.save(2, value(0))
    job.local.fault = None
    assert handle.local.result(0).parent is None
    assert packs_by_owner(manifest_of(place, 2)).keys() == {2}


# ------------------------------------------------------------------------------------------ rebased on the local tier


def rebased_here(place: Place, job: Job, step: int = 2) -> object:
    """A save whose ancestor's pack is lost between plan and commit: committed under a rebased id."""
    assert job.local is not None
    lost: list[str] = []

    def lose(request: Request) -> None:
        if request.method == "create" and "manifest" in request.keys[0] and not lost:
            lost.append(manifest_of(place, 1).packs[-1].key)
            place.store("local").delete(lost)

    job.local.fault = lose  # type: ignore[assignment]
    handle = job.save(step, value(0))
    job.local.fault = None
    assert lost
    return handle


def test_i12_the_handle_of_a_save_that_was_rebased_here_ends_with_the_rebased_id():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    handle = rebased_here(place, job)
    info = handle.local.result(0)
    assert original_of(info.snapshot_id) == handle.snapshot_id != info.snapshot_id
    job.run.background.resolve()
    assert not handle.remote.done(), "it still waits to be sent"
    job.work()
    assert handle.remote.result(0).snapshot_id == info.snapshot_id
    assert handle.status == "remote"
    assert job.save(3, value(0, 1)).local.result(0).parent == info.snapshot_id


def test_i12_the_handle_of_a_rebased_save_that_the_policy_does_not_send_is_not_left_open():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT, upload=Every(steps=100))
    job.save(1, value())
    job.work()
    handle = rebased_here(place, job)
    job.work()
    assert handle.remote.done()
    assert handle.remote.result(0) is None


def test_i12_the_handle_of_a_rebased_save_that_cannot_be_sent_fails():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    handle = rebased_here(place, job)
    damage_snapshot(place.store("local"), handle.local.result(0).snapshot_id)
    job.work()
    with pytest.raises(SaveError, match="damaged"):
        handle.remote.result(0)


def test_c134_the_staged_copy_is_kept_for_a_second_attempt_also_where_nothing_was_reused(tmp_path):
    """Its own pack is condemned before the record. Memory that was given back could hold the next save by then."""
    place = Place(LocalStore(tmp_path, env=Env(), create=True), None)
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    assert job.local is not None
    done: list[Request] = []

    def condemn_own(request: Request) -> None:
        if request.method == "create" and "manifest" in request.keys[0] and not done:
            done.append(request)
            snapshot = keys.parse_snapshot_of(request.keys[0])
            own = [key for key in names(place.store("local"), keys.DATA_PREFIX) if snapshot is not None and snapshot in key]
            tool(place, "local")._sweep(own, [])
            assert job.run.arenas.in_use == 1, "somebody else may write there now"

    job.local.fault = condemn_own  # type: ignore[assignment]
    handle = job.save(2, bytes(reversed(value(0, 1, 2, 3, 4, 5))).replace(b"a", b"z"))
    job.local.fault = None
    assert done
    assert handle.local.result(0).snapshot_id != handle.snapshot_id
    assert job.run.arenas.in_use == 0
    place.check_tier("local")


# ------------------------------------------------------------------------------------------ rebased in the bucket


def sent_rebased(place: Place) -> Job:
    """Step 2 is remote under an id of its own, because its pack was condemned there."""
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    job.save(2, value(0))
    condemn(place, 2, whole=True)
    job.outage(False)
    job.work()
    assert ids(place)[2] != ids(place, "local")[2]
    return job


def test_i1_a_pack_that_is_damaged_here_and_condemned_there_is_no_damage_where_the_bucket_has_the_rebase():
    """The newest state is whole in the bucket, in other packs: a restore must not go back to an older one."""
    place = Place()
    job = sent_rebased(place)
    job.die()
    damage_snapshot(place.store("local"), ids(place, "local")[2])
    again = place.job(incremental=CHAIN, settings=CUT)
    assert again.restore() == ids(place)[2]
    assert not place.log("remote").failed
    again.work()
    again.save(3, value(0, 1))
    again.work()
    load(opened(place, "local"), manifest_of(place, 3))
    place.check_tier("remote")


def test_i5_of_two_uploaders_that_rebase_the_same_snapshot_one_commits():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    handle = job.save(2, value(0))
    condemn(place, 2)
    job.outage(False)
    assert job.remote is not None
    other = job.run.background.uploader.__class__(
        job.run.local, job.run._link, policy="all", sending=job.env.executor("send", 1), env=InlineEnv(99), settings=CUT,
        report=lambda *_: None,
    )  # fmt: skip
    entered: list[Request] = []

    def race(request: Request) -> None:
        """The second one does all of it just before the first one's record."""
        if request.method == "create" and request.keys[0].startswith("log/") and not entered:
            entered.append(request)
            wire.fault = None
            race_lock = job.run._link.tier.log._appending
            race_lock.release()
            try:
                assert other.step()
            finally:
                race_lock.acquire()

    wire = job.remote
    wire.fault = race  # type: ignore[assignment]
    job.work()
    assert entered
    live = [name for name in place.log("remote").live if original_of(name) == handle.snapshot_id]
    assert len(live) == 1
    assert handle.remote.result(0).snapshot_id == live[0]
    place.check()
    tool(place, "remote").collect()
    assert {original_of(name) for name in place.log("remote").live} >= {handle.snapshot_id}
    place.check_tier("remote")


def test_an_uploader_that_is_restarted_in_the_middle_of_a_rebase_begins_its_own_and_the_first_ones_goes():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    job.save(2, value(0))
    condemn(place, 2)
    job.outage(False)
    assert job.remote is not None
    before = names(place.store("remote"), keys.DATA_PREFIX)
    job.remote.fault = lambda r: StoreError("cut", retryable=True) if r.method == "create" and "log/" in r.keys[0] else None
    job.work()
    first = names(place.store("remote"), keys.DATA_PREFIX) - before
    assert first
    job.die()
    again = place.job(incremental=CHAIN, settings=CUT)
    again.restore()
    again.work()
    assert place.steps("remote") == [1, 2]
    place.check()
    left = names(place.store("remote"), keys.DATA_PREFIX)
    assert not first & left, "what the first attempt has sent is a leftover"


def test_only_the_rebase_that_is_under_way_is_remembered():
    """In a chain with a condemned pack each save is rebased: memory of all of them would grow by a manifest a save."""
    place = Place()
    job = sent_rebased(place)
    for step in range(3, 8):
        job.save(step, value(0, *range(1, step % 6)))
        job.work()
    assert all(name != original_of(name) for step, name in ids(place).items() if step > 1)
    rebaser = job.run.background.uploader._rebaser
    held = [one for one in vars(rebaser).values() if isinstance(one, dict) and one]
    assert held == []
    assert rebaser._begun.manifest.step == 7


# ------------------------------------------------------------------------------------------ what changes between sessions


@pytest.mark.parametrize(
    ("before", "after", "reused"),
    [
        ({"piece_bytes": 1000}, {"piece_bytes": 3000}, 5),
        ({"piece_bytes": 3000}, {"piece_bytes": 1000}, 1),
        ({"pack_bytes": 65536}, {"pack_bytes": 4096}, 5),
        ({"codec": "zstd"}, {"codec": "raw"}, 5),
        ({"codec": "raw"}, {"codec": "zstd"}, 5),
        ({"digest": "blake3"}, {"digest": "sha256"}, 0),
    ],
)
def test_settings_may_change_between_sessions(before: dict[str, object], after: dict[str, object], reused: int):
    """Boxes are the base's, so that pieces stay comparable; another digest proves nothing about the bytes of the base."""
    place = Place()
    job = begun(place, incremental=CHAIN, settings=replace(CUT, **before))
    job.save(1, value())
    job.work()
    job.die()
    again = place.job(incremental=CHAIN, settings=replace(CUT, **after))
    again.restore()
    again.save(2, value(0))
    again.work()
    assert packs_by_owner(manifest_of(place, 2)).get(1, 0) == reused
    place.check()


def test_a_piece_of_the_base_that_is_larger_than_a_pack_may_be_now_is_cut_anew():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=replace(SMALL, piece_bytes=6000, pack_bytes=8192))
    job.save(1, value())
    job.die()
    again = place.job(incremental=CHAIN, settings=replace(SMALL, piece_bytes=4096, pack_bytes=4096))
    again.restore()
    again.save(2, value())
    assert max(piece.nbytes for piece in manifest_of(place, 2).pieces) <= 4096
    place.check()


def test_a_state_of_more_packs_than_fragments_are_allowed_is_saved_incrementally_all_the_same():
    """A full save of a terabyte lies in 16000 packs: these are no fragments."""
    place = Place()
    policy = replace(CHAIN, max_fragments=2)
    job = begun(place, incremental=policy, settings=CUT)
    job.save(1, value())
    assert len(manifest_of(place, 1).packs) > 2
    assert job.save(2, value(0)).local.result(0).parent == ids(place, "local")[1]
    place.check()


def test_c128_arenas_come_back_once_after_each_outcome():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    rebased_here(place, job)
    assert job.local is not None
    job.local.fault = lambda r: StoreError("full", retryable=False) if r.method == "put" else None
    failed = job.save(3, value(1, 2))
    job.local.fault = None
    assert isinstance(failed.local.exception(0), SaveError)
    assert job.run.arenas.in_use == 0

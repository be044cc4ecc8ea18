"""`verify` finds a flipped byte wherever it is, says which object and what is wrong, and calls nothing damage that is none."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import tieredckpt as tc
from tests.cli.kit import SMALL, Places, copy_of, files_of, flip, make_run, run, training_state
from tieredckpt.engine.log import TierLog
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.format import keys
from tieredckpt.format.records import PinRecord, RetireRecord, SweepRecord, decode_record, encode_record, seal
from tieredckpt.plan.log_index import encode_index
from tieredckpt.settings import Settings
from tieredckpt.store.local import LocalStore

WHEN = "2026-01-01T00:00:00.000000Z"


@pytest.fixture(scope="module")
def run_places(tmp_path_factory) -> Places:
    """Two snapshots of several packs, on both tiers; the local log has an index."""
    places = make_run(tmp_path_factory.mktemp("run"), range(1, 3))
    with tc.Tier.open(places.local) as tier:
        state = tier.state()
    index = places.local / keys.index_key(state.seq)
    index.parent.mkdir()
    index.write_bytes(encode_index(state))
    return places


@pytest.fixture
def places(run_places, tmp_path) -> Places:
    return copy_of(run_places, tmp_path)


def is_found(root: Path, key: str) -> bool:
    """Does `verify` name the object, or refuse the tier because of it?"""
    try:
        with tc.Tier.open(root) as tier:
            return key in {finding.key for finding in tier.verify().findings} if key != keys.FORMAT_KEY else not tier.verify().ok
    except tc.FormatError as error:
        return key == keys.FORMAT_KEY and key in str(error)


def not_found(root: Path, key: str, offsets: list[int], mask: int) -> list[int]:
    """The offsets at which a flipped byte of the object goes unnoticed."""
    missed = []
    for at in offsets:
        flip(root / key, at, mask)
        if not is_found(root, key):
            missed.append(at)
        flip(root / key, at, mask)
    return missed


def some_offsets(nbytes: int, count: int) -> list[int]:
    """First, last, middle, and evenly between."""
    return sorted({0, nbytes // 2, nbytes - 1, *range(0, nbytes, max(1, nbytes // count))})


KINDS: dict[str, Callable[[str], object]] = {
    "record": keys.parse_record_key,
    "index": keys.parse_index_key,
    "manifest": keys.parse_manifest_key,
    "receipt": keys.parse_receipt_key,
    "upload manifest": keys.parse_upload_key,
    "pack": keys.parse_pack_key,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_a_flipped_byte_in_any_object_is_found(places, kind, mask):
    """Masks: to a neighbouring digit or letter, which still parses; and to what is no text."""
    root = places.remote if kind == "upload manifest" else places.local
    found = [key for key in files_of(root) if KINDS[kind](key) is not None]
    assert found
    for key in found:
        assert not_found(root, key, some_offsets((root / key).stat().st_size, 12), mask) == [], key


def test_a_flipped_byte_in_any_region_of_a_pack_is_found(places):
    """Length, JSON, header padding, pieces, and the fillers between them, to the last byte."""
    key = next(key for key in files_of(places.local) if keys.parse_pack_key(key))
    data = (places.local / key).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    filler = data.index(b"__pad.0")
    regions = {
        "length": range(8),
        "json": range(8, header, 97),
        "name of a filler": range(filler, filler + 7),
        "header padding": [data.rindex(b"}", 0, header) + 1, header - 1],
        "data": range(header, len(data), 509),
        "end": [len(data) - 1],
    }
    for name, offsets in regions.items():
        assert not_found(places.local, key, list(offsets), 0x01) == [], name


def test_every_flipped_byte_of_the_small_files_is_found(places):
    """Nothing else repeats what they say: they digest themselves."""
    for key in (keys.FORMAT_KEY, keys.NODE_KEY):
        data = (places.local / key).read_bytes()
        assert not_found(places.local, key, list(range(len(data))), 0x01) == []


@pytest.mark.parametrize("field", [b'"node":"', b'"snapshot":"', b'"digest":"blake3:'])
def test_a_receipt_that_parses_and_says_something_else_is_found(places, field):
    """The last letter of an id or digest becomes another one."""
    key = next(key for key in files_of(places.local) if keys.parse_receipt_key(key))
    data = (places.local / key).read_bytes()
    end = data.index(b'"', data.index(field) + len(field)) - 1
    assert not_found(places.local, key, [end], 0x01) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_object_is_found(places, kind):
    """But for what nothing needs: an index, and an upload manifest (a tier may have been copied from a local one)."""
    needed = kind not in ("index", "upload manifest")
    root = places.remote if kind == "upload manifest" else places.local
    key = next(key for key in files_of(root) if KINDS[kind](key) is not None)
    (root / key).unlink()
    assert is_found(root, key) == needed


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""], ids=["cut", "longer", "empty"]
)
@pytest.mark.parametrize("kind", ["record", "manifest", "receipt", "pack"])
def test_another_length_is_found(places, kind, change):
    """C144: an empty file that parses, a file that was cut by a power failure, one with something behind its end."""
    key = next(key for key in files_of(places.local) if KINDS[kind](key) is not None)
    path = places.local / key
    path.write_bytes(change(path.read_bytes()))
    assert is_found(places.local, key)


def test_i2_a_good_pack_in_the_place_of_another_is_found(places):
    first, second = [key for key in files_of(places.local) if keys.parse_pack_key(key) and key.endswith("-0.safetensors")]
    shutil.copy(places.local / first, places.local / second)
    with tc.Tier.open(places.local) as tier:
        report = tier.verify()
    # Both steps saved the same state: the pieces are equal, and only the header says whose pack this is.
    assert {finding.key for finding in report.findings} == {second}


def test_all_damage_is_reported_and_the_good_is_told_from_the_damaged(places):
    packs = [
        key for key in files_of(places.local) if (name := keys.parse_pack_key(key)) and name.snapshot.startswith("000000000002")
    ]
    assert len(packs) > 2
    for key in packs[:2]:
        flip(places.local / key, 5000)
    outcome = run("verify", places.local, "--json")
    assert outcome.code == 3
    document = outcome.json
    assert document["ok"] is False
    assert [(one["step"], one["ok"]) for one in document["snapshots"]] == [(1, True), (2, False)]
    findings = document["snapshots"][1]["findings"]
    assert not any(findings[0]["key"] in finding["what"] for finding in findings)  # said once
    assert [(finding["key"], finding["invariant"]) for finding in findings] == [(key, "I1") for key in packs[:2]]
    text = run("verify", places.local)
    assert text.code == 3
    assert "DAMAGED" in text.out
    assert packs[0] in text.out
    assert "2 findings" in text.out


def test_one_snapshot(places):
    key = next(
        key for key in files_of(places.local) if (name := keys.parse_pack_key(key)) and name.snapshot.startswith("000000000001")
    )
    flip(places.local / key, 5000)
    assert run("verify", places.local, "--snapshot", "2").code == 0
    assert run("verify", places.local, "--snapshot", "latest").code == 0
    assert run("verify", places.local, "--snapshot", "1").code == 3
    assert run("verify", places.local, "--snapshot", "9").code == 4
    with tc.Tier.open(places.local) as tier:
        with pytest.raises(tc.NotFoundError, match="no live snapshot"):
            tier.verify([tier.latest().snapshot_id.replace("-000002", "-000009")])
        with pytest.raises(tc.UsageError, match="not a snapshot id"):
            tier.verify(["2"])


def test_quick_looks_at_presence_and_size_and_says_so(places):
    pack = next(key for key in files_of(places.local) if keys.parse_pack_key(key))
    flip(places.local / pack, 5000)
    quick = run("verify", places.local, "--quick")
    assert quick.code == 0
    assert "by size only" in quick.out
    (places.local / pack).write_bytes((places.local / pack).read_bytes()[:-1])
    assert run("verify", places.local, "--quick").code == 3
    (places.local / pack).unlink()
    assert "it is missing" in run("verify", places.local, "--quick").out


# ------------------------------------------------------------------------------------------ the log


def test_a_gap_does_not_hide_what_is_behind_it(places):
    """Damage in a snapshot that was committed behind the gap, and in a record behind it, is found too."""
    for index in (places.local / "log-index").iterdir():
        index.unlink()
    (places.local / keys.record_key(2)).unlink()
    flip(places.local / keys.record_key(3), 100)
    pack = [key for key in files_of(places.local) if keys.parse_pack_key(key)][-1]
    flip(places.local / pack, 5000)
    with tc.Tier.open(places.local) as tier:
        report = tier.verify()
    assert {finding.key for finding in report.log} >= {keys.record_key(2), keys.record_key(3)}
    assert "a later one exists" in report.log[0].what
    assert [(snapshot.step, snapshot.ok) for snapshot in report.snapshots] == [(2, False)]


def test_a_lost_last_record_is_known_from_its_index(places):
    with tc.Tier.open(places.local) as tier:
        last = tier.state().seq
    (places.local / keys.record_key(last)).unlink()
    outcome = run("verify", places.local)
    assert outcome.code == 3
    assert f"{keys.record_key(last)}: log: the log has lost this record" in outcome.out


def test_an_index_of_another_log_is_found(places):
    """It is whole and digests itself, and says something else than the records."""
    (index,) = (places.local / "log-index").iterdir()
    with tc.Tier.open(places.local) as tier:
        state = tier.state()
    index.write_bytes(encode_index(replace(state, hold=True)))
    with tc.Tier.open(places.local) as tier:
        assert [finding.key for finding in tier.verify().findings] == [f"log-index/{index.name}"]


def append_unchecked(root: Path, record) -> str:
    """Put a record at the log's end without asking the rules; returns its key."""
    with tc.Tier.open(root) as tier:
        seq = tier.state().seq + 1
    (root / keys.record_key(seq)).write_bytes(encode_record(seal(record, seq, "forged", WHEN)))
    return keys.record_key(seq)


def test_records_that_the_rules_forbid_are_found(places):
    """I7, I9: a record of a session that never opened; the head retired."""
    with tc.Tier.open(places.local) as tier:
        head = tier.latest().snapshot_id
    stranger = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
    fenced = append_unchecked(places.local, PinRecord(snapshot=head, session=stranger))
    retired = append_unchecked(places.local, RetireRecord(snapshots=(head,)))
    with tc.Tier.open(places.local) as tier:
        found = {finding.key: finding for finding in tier.verify().log}
    assert found[fenced].invariant == "I7"
    assert stranger in found[fenced].what
    assert found[retired].invariant == "I9"


def test_a_chain_with_a_hole_is_found(places):
    """A commit record whose predecessors nobody knows."""
    with tc.Tier.open(places.local) as tier:
        last = list(tier.records())[-1]
    session = last.session
    foreign = f"000000000009-{session}-000099"
    record = msgspec.structs.replace(last, snapshot=f"000000000007-{session}-000007", step=7, predecessors=(foreign,))
    key = append_unchecked(places.local, record)
    with tc.Tier.open(places.local) as tier:
        (finding,) = tier.verify().log
    assert (finding.key, finding.invariant) == (key, "log")
    assert foreign in finding.what


@pytest.mark.parametrize(
    "changes",
    [
        {"manifest_bytes": 1},
        {"saved_at": WHEN},
        {"continues": ("01ARZ3NDEKTSV4RRFFQ69G5FAV",)},
        {"parent": "000000000001-01ARZ3NDEKTSV4RRFFQ69G5FAV-000001"},
        {"packs": 1},
        {"bytes_total": 1},
        {"bytes_new": 1},
        {"predecessors": ("fresh-01ARZ3NDEKTSV4RRFFQ69G5FAV",)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_commit_record_that_contradicts_the_manifest_is_found(places, changes):
    """Well-formed, digested and in its place, and written by something that got it wrong."""
    shutil.rmtree(places.local / "log-index")
    with tc.Tier.open(places.local) as tier:
        last = list(tier.records())[-1]
    forged = seal(msgspec.structs.replace(last, **changes), last.seq, last.write_id, last.created_at)
    (places.local / keys.record_key(last.seq)).write_bytes(encode_record(forged))
    with tc.Tier.open(places.local) as tier:
        report = tier.verify()
    found = [finding for finding in report.findings if finding.key == keys.manifest_key(last.snapshot)]
    assert [finding.what for finding in found] == [f"the commit record says something else about it: {next(iter(changes))}"]


def test_i8_a_live_snapshot_that_names_a_condemned_pack_is_found(places):
    pack = [key for key in files_of(places.local) if keys.parse_pack_key(key)][-1]
    append_unchecked(places.local, SweepRecord(packs=(pack,)))
    with tc.Tier.open(places.local) as tier:
        (finding,) = tier.verify().findings
    assert (finding.key, finding.invariant) == (pack, "I8")


def test_a_manifest_of_another_run_is_found(places, tmp_path):
    """A copied log does not make another run's data ours."""
    other = make_run(tmp_path / "other", range(1, 2))
    shutil.copy(other.local / keys.FORMAT_KEY, places.local / keys.FORMAT_KEY)
    with tc.Tier.open(places.local) as tier:
        report = tier.verify()
    assert {finding.invariant for finding in report.findings} == {"I2"}
    assert len(report.findings) == 2


def test_i2_a_format_file_that_changes_while_a_tier_is_open_is_found(places, tmp_path):
    """Somebody has put another run in the place of this one."""
    other = make_run(tmp_path / "other", range(1, 2))
    with tc.Tier.open(places.local) as tier:
        shutil.copy(other.local / keys.FORMAT_KEY, places.local / keys.FORMAT_KEY)
        (finding,) = tier.verify().findings
    assert (finding.key, finding.invariant) == (keys.FORMAT_KEY, "I2")


# ------------------------------------------------------------------------------------------ what is no damage


def test_orphans_and_foreign_files_are_told_and_are_no_damage(places):
    """Packs of an attempt that was never committed, a probe's leavings, and what other programs put there."""
    with tc.Tier.open(places.local) as tier:
        session = next(iter(tier.state().opens))
    left = keys.pack_key(f"000000000009-{session}-000009", 0, 0)
    receipt = keys.receipt_key(f"000000000009-{session}-000009", 0)
    for key in (left, receipt, "notes.txt", "data/e7/notes.safetensors", "latest.json", "probe/01ARZ3NDEKTSV4RRFFQ69G5FAV/a"):
        (places.local / key).parent.mkdir(parents=True, exist_ok=True)
        (places.local / key).write_bytes(b"12345")
    outcome = run("verify", places.local, "--json")
    assert outcome.code == 0
    assert outcome.json["orphans"] == [{"key": left, "nbytes": 5}, {"key": receipt, "nbytes": 5}]
    assert outcome.json["other_files"] == ["data/e7/notes.safetensors", "notes.txt"]
    text = run("verify", places.local).out
    assert "2 stored objects (10 B) belong to no live snapshot" in text
    assert "2 other files" in text


def test_packs_of_a_snapshot_whose_manifest_is_lost_are_no_orphans(places):
    manifest = next(key for key in files_of(places.local) if keys.parse_manifest_key(key))
    (places.local / manifest).unlink()
    with tc.Tier.open(places.local) as tier:
        report = tier.verify()
    assert [finding.key for finding in report.findings] == [manifest]
    assert report.orphans == ()


class Wrapped:
    """A store under which something happens when a pack is read."""

    def __init__(self, root: Path, on_read: Callable[[str], None]) -> None:
        self._inner = LocalStore(root, env=Env())
        self._on_read = on_read

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self._on_read(key)
        self._inner.read_into(key, offset, out)


def wrapped_tier(root: Path, on_read: Callable[[str], None]) -> tc.Tier:
    with tc.Tier.open(root) as plain:
        run_id = plain.run
    store = Wrapped(root, on_read)
    log = TierLog(store, name="remote", env=Env(), settings=Settings())
    return tc.Tier(OpenTier("remote", store, log, run_id), Env(), Settings())


def test_a_snapshot_that_is_collected_meanwhile_is_not_damaged(places):
    """A trainer goes on while its bucket is verified."""
    collected = []

    def collect(_key: str) -> None:
        if not collected:
            collected.append(True)
            with tc.Tier.open(places.remote) as other:
                other.gc(other.plan_gc(tc.KeepLast(1)))

    with wrapped_tier(places.remote, collect) as tier:
        report = tier.verify()
    assert report.ok
    assert [snapshot.step for snapshot in report.snapshots] == [2]


def test_a_long_life_is_no_damage(tmp_path):
    """Evictions, a lost node, adoption, a roll-back, a fresh start and a failed restore leave logs that the rules admit."""
    places = make_run(tmp_path, range(1, 5), retention=tc.Retention())
    shutil.rmtree(places.local)

    def live_on(*saves: int, start: str = "restore", **restore: object) -> tc.RestoreReport:
        with tc.Checkpointer(places.local, f"file://{places.remote}", state=training_state(), settings=SMALL, start=start) as ck:
            report = ck.restore(**restore)
            for step in saves:
                ck.save(step)
        return report

    assert live_on(5, 6).step == 4
    assert live_on(7, step=5).step == 5
    assert live_on().step == 7
    for root in (places.local, places.remote):
        for path in (root / "data").rglob("000000000007-*"):
            flip(path, 5000)
    damaged = {finding.key for root in (places.local, places.remote) for finding in tc.Tier.open(root).verify().findings}
    assert all("/000000000007-" in key for key in damaged)
    assert live_on(8).step == 5
    assert live_on(1, 2, start="fresh").fresh
    for root in (places.local, places.remote):
        with tc.Tier.open(root) as tier:
            report = tier.verify()
        assert report.log == ()
        assert {finding.key for finding in report.findings} <= damaged
        assert len(report.snapshots) >= 2


def test_c99_an_outage_is_an_error_and_never_damage(places):
    def fail(key: str) -> None:
        raise tc.StoreError("no answer", retryable=True, key=key)

    with wrapped_tier(places.remote, fail) as tier, pytest.raises(tc.StoreError, match="no answer"):
        tier.verify()


def test_c147_what_the_disk_cannot_read_any_more_is_damage(places):
    bad = next(key for key in files_of(places.remote) if keys.parse_pack_key(key))

    def fail(key: str) -> None:
        if key == bad:
            raise tc.StoreError("EIO while reading", retryable=False, key=key) from OSError(errno.EIO, "Input/output error")

    with wrapped_tier(places.remote, fail) as tier:
        (finding,) = tier.verify().findings
    assert (finding.key, finding.invariant, finding.what) == (bad, "I1", "EIO while reading")


def test_progress_adds_up(places):
    told: list[int] = []
    with tc.Tier.open(places.local) as tier:
        report = tier.verify(progress=told.append)
    packs = [path.stat().st_size for path in (places.local / "data").rglob("*.safetensors")]
    assert sorted(told) == sorted(packs)
    assert report.nbytes > sum(packs)


def test_damage_in_an_older_snapshot_does_not_hide_behind_newer_good_ones(places):
    """A restore would never read it again."""
    pack = next(key for key in files_of(places.local) if keys.parse_pack_key(key))
    flip(places.local / pack, 5000)
    keep = tc.Retention(local=tc.KeepAll())
    with tc.Checkpointer(places.local, f"file://{places.remote}", state=training_state(), settings=SMALL, retention=keep) as ck:
        ck.restore()
        ck.save(3)
    with tc.Tier.open(places.local) as tier:
        report = tier.verify()
    assert [snapshot.step for snapshot in report.snapshots] == [1, 2, 3]
    assert [finding.key for finding in report.findings] == [pack]


def test_the_forged_records_of_these_tests_are_well_formed(places):
    """Else they would be found for another reason than the one that is tested."""
    with tc.Tier.open(places.local) as tier:
        head = tier.latest().snapshot_id
    key = append_unchecked(places.local, PinRecord(snapshot=head))
    seq = keys.parse_record_key(key)
    assert decode_record((places.local / key).read_bytes(), seq).snapshot == head
    with tc.Tier.open(places.local) as tier:
        assert tier.verify().ok

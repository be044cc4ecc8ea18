"""Records: sealed, read back, and refused when anything is off."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.samples import COMMIT, EARLIER, OLDER, PACK, REBASED, ROOT, SESSION, SNAPSHOT, ULID, UNSEALED, WHEN, sealed
from tieredckpt.errors import CorruptionError, FormatError, UsageError
from tieredckpt.format import canonical, keys, records
from tieredckpt.format.records import (
    FailedRestoreRecord,
    OpenRecord,
    PinRecord,
    Record,
    ResumeRecord,
    RetireRecord,
    SweepRecord,
    decode_record,
    encode_record,
    metrics_from_json,
    metrics_to_json,
    seal,
)
from tieredckpt.model.digest import sha256_digest

replace = msgspec.structs.replace


def forge(record: Record, **changes: object) -> bytes:
    """The bytes of a record with other fields and a right digest, as a hostile writer would make them."""
    fields = json.loads(encode_record(record)) | changes | {"digest": ""}
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return body.replace('"digest":""', f'"digest":"{sha256_digest(body.encode())}"', 1).encode()


@pytest.mark.parametrize("record", UNSEALED, ids=lambda record: type(record).__name__)
def test_every_kind_round_trips(record):
    made = sealed(record)
    data = encode_record(made)
    assert decode_record(data, 7) == made
    assert encode_record(decode_record(data, 7)) == data
    assert (made.seq, made.write_id, made.created_at) == (7, ULID, WHEN)


def test_there_are_eight_kinds_and_a_sample_of_each():
    assert {type(record) for record in UNSEALED} == set(Record.__args__)
    assert len(UNSEALED) == 8


def test_an_open_says_that_it_is_unfenced_or_nothing():
    """One form for each: the bytes of a record that is fenced are those of a library that knew nothing of it."""
    fenced, unfenced = sealed(OpenRecord(session=SESSION)), sealed(OpenRecord(session=SESSION, unfenced=True))
    assert b"unfenced" not in encode_record(fenced)
    assert json.loads(encode_record(unfenced))["unfenced"] is True
    assert decode_record(encode_record(unfenced), 7) == unfenced
    for other in (False, None, 1):
        with pytest.raises(FormatError):
            decode_record(forge(fenced, unfenced=other), 7)


def test_the_digest_is_of_the_bytes_with_an_empty_digest():
    made = sealed(COMMIT)
    data = encode_record(made)
    assert made.digest == sha256_digest(data.replace(made.digest.encode(), b""))
    assert forge(made) == data


def test_another_write_id_makes_other_bytes():
    assert encode_record(seal(COMMIT, 7, EARLIER, WHEN)) != encode_record(sealed(COMMIT))


@pytest.mark.parametrize("record", UNSEALED, ids=lambda record: type(record).__name__)
def test_every_flipped_bit_of_a_record_is_noticed(record):
    data = encode_record(sealed(record))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(FormatError):
            decode_record(bytes(damaged), 7)


def test_a_changed_value_is_corruption_and_names_the_key():
    data = encode_record(sealed(COMMIT)).replace(b'"step":500', b'"step":501')
    with pytest.raises(CorruptionError, match="digest") as caught:
        decode_record(data, 7)
    assert caught.value.key == keys.record_key(7)


def test_a_record_at_another_position_is_corruption():
    with pytest.raises(CorruptionError, match="holds record 7"):
        decode_record(encode_record(sealed(COMMIT)), 8)


def test_an_unknown_kind_is_a_format_error_that_names_it():
    with pytest.raises(FormatError, match="promote"):
        decode_record(forge(sealed(UNSEALED[5]), kind="promote"), 7)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": 0},
        {"seq": "7"},
        {"write_id": ""},
        {"write_id": "a/b"},
        {"write_id": "x" * 65},
        {"created_at": "yesterday"},
        {"created_at": WHEN + "\n"},
        {"session": None},
        {"session": SESSION.lower()},
        {"session": SESSION + "\n"},
        {"snapshot": "../x"},
        {"snapshot": OLDER},
        {"step": 501},
        {"step": -1},
        {"step": 10**12},
        {"origin": EARLIER},
        {"predecessors": []},
        {"predecessors": ["fresh"]},
        {"predecessors": OLDER},
        {"manifest_digest": "md5:00"},
        {"manifest_digest": f"blake3:{'0' * 64}"},
        {"manifest_bytes": 2**53},
        {"manifest_bytes": -1},
        {"rebase_of": OLDER},
        {"rebase_of": SNAPSHOT},
        {"snapshot": REBASED},
        {"snapshot": REBASED, "rebase_of": OLDER},
        {"parent": "x"},
        {"nodes": ["x"]},
        {"tags": ["x" * 256]},
        {"tags": ["x"] * 1001},
        {"metrics": {"loss": None}},
        {"metrics": {"loss": "NaN"}},
        {"metrics": {"loss": 1}},
        {"metrics": {"loss": [1.0]}},
        {"continues": [SESSION] * 10_001},
        {"extra": 1},
    ],
    ids=lambda changes: repr(changes)[:60],
)
def test_fields_out_of_bounds_are_refused_although_the_digest_is_right(changes):
    with pytest.raises(FormatError) as caught:
        decode_record(forge(sealed(COMMIT), **changes), 7)
    assert not isinstance(caught.value, CorruptionError)


def test_a_rebased_snapshot_names_what_it_rebases():
    record = replace(COMMIT, snapshot=REBASED, rebase_of=SNAPSHOT)
    assert decode_record(encode_record(sealed(record)), 7).rebase_of == SNAPSHOT


@pytest.mark.parametrize(
    "record",
    [
        replace(COMMIT, predecessors=()),
        replace(COMMIT, step=1),
        replace(COMMIT, metrics={"loss": float("nan")}),
        replace(COMMIT, tags=("\ud800",)),
        RetireRecord(snapshots=()),
        RetireRecord(snapshots=("x",)),
        SweepRecord(),
        SweepRecord(packs=("data/../x",)),
        SweepRecord(packs=(PACK.replace("e7", "e8"),)),
        FailedRestoreRecord(session=SESSION, snapshot=SNAPSHOT, packs=("x",)),
        PinRecord(snapshot=SNAPSHOT, reason="x" * 4097),
        OpenRecord(session="me"),
        ResumeRecord(session=SESSION, target=ROOT, how="guess"),
    ],
    ids=lambda record: repr(record)[:70],
)
def test_a_record_that_would_be_refused_cannot_be_sealed(record):
    with pytest.raises(FormatError):
        sealed(record)


def test_an_unsealed_record_cannot_be_written():
    with pytest.raises(FormatError):
        encode_record(COMMIT)
    with pytest.raises(FormatError):
        seal(COMMIT, 0, ULID, WHEN)


def test_the_largest_sweep_fits_in_a_record_and_a_larger_one_is_refused():
    packs = tuple(keys.pack_key(REBASED, 0, keys.MAX_PACK_NUMBER - n) for n in range(records.MAX_SWEEP_NAMES))
    made = sealed(SweepRecord(packs=packs, reason="x" * 4096))
    assert decode_record(encode_record(made), 7) == made
    with pytest.raises(FormatError, match="names 8001 objects"):
        sealed(SweepRecord(packs=packs, snapshots=(OLDER,)))


def test_a_record_over_its_cap_is_refused_before_it_is_parsed():
    with pytest.raises(FormatError, match="more than"):
        decode_record(b" " * (records.MAX_RECORD_BYTES + 1), 7)
    big = replace(COMMIT, predecessors=(SNAPSHOT,) * 10_000, continues=(SESSION,) * 10_000, nodes=(SESSION,) * 10_000)
    with pytest.raises(FormatError, match="more than"):
        sealed(big)


@given(data=st.binary(max_size=300))
def test_no_bytes_make_another_error(data):
    with pytest.raises(FormatError):
        decode_record(data, 1)


@given(st.dictionaries(st.text(max_size=8), st.floats(), max_size=5))
def test_c123_metrics_keep_nan_and_infinities(metrics):
    stored = metrics_to_json(metrics)
    made = sealed(replace(COMMIT, metrics=stored))
    back = metrics_from_json(decode_record(encode_record(made), 7).metrics)
    assert back.keys() == metrics.keys()
    for name, value in metrics.items():
        assert back[name] == value or (math.isnan(back[name]) and math.isnan(value))
        assert math.copysign(1, back[name]) == math.copysign(1, value) or math.isnan(value)


def test_c116_numbers_of_numpy_are_metrics_and_other_things_are_not():
    assert metrics_to_json({"a": 1, "b": np.float32(0.5), "c": np.int64(3)}) == {"a": 1.0, "b": 0.5, "c": 3.0}
    for value in ("1", None, True, 1j, 10**400, [1.0]):
        with pytest.raises(UsageError, match="'x'"):
            metrics_to_json({"x": value})


def test_records_are_canonical_json():
    data = encode_record(sealed(COMMIT))
    assert canonical.dump(json.loads(data)) == data

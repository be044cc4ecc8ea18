"""Keys: every key from checked parts only, and back."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tieredckpt
from tests.format.samples import OLDER, PACK, REBASED, SNAPSHOT
from tieredckpt.errors import FormatError
from tieredckpt.format import keys
from tieredckpt.store.base import check_key
from tieredckpt.store.probe import PROBE_PREFIX

ids = st.sampled_from([SNAPSHOT, OLDER, REBASED])


@given(snapshot=ids, writer=st.integers(0, 99_999), n=st.integers(0, keys.MAX_PACK_NUMBER))
def test_a_pack_key_says_what_it_was_made_from(snapshot, writer, n):
    key = keys.pack_key(snapshot, writer, n)
    assert keys.parse_pack_key(key) == keys.PackName(snapshot, writer, n)
    directory = hashlib.sha256(f"{writer:05d}".encode()).digest()[0]
    assert key == f"data/{directory:02x}/{snapshot}.{writer:05d}-{n}.safetensors"
    assert key.startswith(keys.writer_prefix(writer))
    check_key(key)


@given(seq=st.integers(1, 2**53 - 1))
def test_record_and_index_keys_sort_as_their_numbers(seq):
    assert keys.parse_record_key(keys.record_key(seq)) == seq
    assert keys.parse_index_key(keys.index_key(seq)) == seq
    assert (keys.record_key(seq) < keys.record_key(1000)) == (seq < 1000)
    check_key(keys.index_key(seq))


@pytest.mark.parametrize("snapshot", [SNAPSHOT, REBASED])
def test_what_belongs_to_a_snapshot_is_recognised(snapshot):
    assert keys.parse_manifest_key(keys.manifest_key(snapshot)) == snapshot
    assert keys.parse_upload_key(keys.upload_key(snapshot)) == snapshot
    assert keys.parse_receipt_key(keys.receipt_key(snapshot, 12)) == (snapshot, 12)
    for key in (keys.manifest_key(snapshot), keys.upload_key(snapshot), keys.receipt_key(snapshot, 12)):
        assert keys.parse_snapshot_of(key) == snapshot
        assert key.startswith(keys.snapshot_prefix(snapshot))
        check_key(key)


def test_c43_every_prefix_ends_with_a_slash():
    prefixes = [value for name, value in vars(keys).items() if name.endswith("_PREFIX")]
    prefixes += [keys.snapshot_prefix(SNAPSHOT), keys.receipts_prefix(SNAPSHOT), keys.writer_prefix(3), PROBE_PREFIX]
    assert len(prefixes) == 8
    assert all(prefix.endswith("/") for prefix in prefixes)


def test_the_place_of_probes_is_spelled_in_one_module():
    """Two spellings would drift apart, and then nobody sweeps what the other has left."""
    package = Path(tieredckpt.__file__).parent
    spelled = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value == PROBE_PREFIX
    }
    assert spelled == {"store/probe.py"}


@pytest.mark.parametrize(
    "key",
    [
        PACK + "x",
        PACK + "\n",
        "/" + PACK,
        "x/" + PACK,
        PACK.replace("-0.safe", "-00.safe"),
        PACK.replace("-0.safe", "-1000000.safe"),
        PACK.replace(".00000-", ".0-"),
        PACK.replace("data/e7", "data/e8"),
        PACK.replace("data/e7", "data/E7"),
        PACK.replace("data/e7/", "data/e7/../e7/"),
        PACK.replace(SNAPSHOT, "000000000500"),
        PACK.replace("0", "\u0660", 1),
        "data/e7/handpicked",
        "",
    ],
)
def test_c142_c55_only_exact_pack_keys_are_ours(key):
    assert keys.parse_pack_key(key) is None


@pytest.mark.parametrize(
    "key",
    [
        "log/1.json",
        "log/00000000000000000000.json",
        f"log/{'9' * 20}.json",
        "log/00000000000000000001.json.tmp",
        "log/0000000000000000000\u0661.json",
        "log-index/00000000000000000001.json",
        "LOG/00000000000000000001.json",
    ],
)
def test_c55_other_names_are_no_records(key):
    assert keys.parse_record_key(key) is None


def test_c142_other_names_below_snapshots_are_ignored():
    assert keys.parse_manifest_key(f"snapshots/{SNAPSHOT}/manifest.json") is None
    assert keys.parse_receipt_key(f"snapshots/{SNAPSHOT}/receipts/0.json") is None
    assert keys.parse_snapshot_of("snapshots/handpicked/manifest.json.zst") is None
    assert keys.parse_snapshot_of(f"snapshots/{SNAPSHOT}/") is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: keys.record_key(0),
        lambda: keys.record_key(2**53),
        lambda: keys.record_key(True),
        lambda: [keys.writer_prefix(writer) for writer in (1, True)],
        lambda: keys.manifest_key("../x"),
        lambda: keys.manifest_key(SNAPSHOT + "\n"),
        lambda: keys.pack_key("x", 0, 0),
        lambda: keys.pack_key(SNAPSHOT, -1, 0),
        lambda: keys.pack_key(SNAPSHOT, 100_000, 0),
        lambda: keys.pack_key(SNAPSHOT, 0, -1),
        lambda: keys.pack_key(SNAPSHOT, 0, 10**6),
        lambda: keys.receipt_key(SNAPSHOT, 10**5),
    ],
)
def test_c142_no_key_is_made_from_unchecked_parts(make):
    with pytest.raises(FormatError):
        make()

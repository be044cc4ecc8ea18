"""`docs/format-v1.md`: its examples are real, complete, and mean what it says."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.format import samples
from tieredckpt.format import canonical, objects
from tieredckpt.format.manifest import MAX_MANIFEST_BYTES, Manifest, check_manifest, decode_manifest
from tieredckpt.format.packs import SAFETENSORS_DTYPES, pack_digest, parse_header
from tieredckpt.format.records import MAX_SWEEP_NAMES, CommitRecord, Record, decode_record, encode_record
from tieredckpt.format.tree_json import decode_tree, encode_tree
from tieredckpt.model.digest import crc64, digest_like
from tieredckpt.model.leaf import DTYPE_BYTES
from tieredckpt.model.tree import LeafRef, walk_ranks

TEXT = (Path(__file__).parents[2] / "docs" / "format-v1.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- example: (\S+) -->\n```json\n(.*)\n```", TEXT))
STORED = dict(re.findall(r"<!-- stored: (\S+) -->\n```text\n(.*?)\n```", TEXT, re.DOTALL))
KINDS = ["open", "resume", "commit", "pin", "unpin", "retire", "sweep", "failed-restore"]


def reencode_manifest(data: bytes) -> bytes:
    value = canonical.decode(data, Manifest, max_bytes=MAX_MANIFEST_BYTES, what="example")
    check_manifest(value)
    return canonical.encode(value)


FILES = {
    "format.json": lambda data: objects.encode_repository(objects.decode_repository(data)),
    "node.json": lambda data: objects.encode_node(objects.decode_node(data)),
    "receipt": lambda data: objects.encode_receipt(objects.decode_receipt(data)),
    "upload.json": lambda data: objects.encode_upload(objects.decode_upload(data)),
    "manifest": reencode_manifest,
}


def dump_to_bytes(dump: str) -> bytes:
    """The bytes of a `hexdump -C`."""
    data = b""
    repeat = False
    for line in dump.splitlines():
        if line == "*":
            repeat = True
            continue
        at = int(line[:8], 16)
        if repeat:
            data += data[-16:] * ((at - len(data)) // 16)
            repeat = False
        assert len(data) == at
        data += bytes.fromhex(line[10:57])
    return data


def test_there_is_an_example_of_every_kind_and_file():
    assert EXAMPLES.keys() == {*KINDS, *FILES, "per-rank"}
    assert len(KINDS) == len(Record.__args__)


@pytest.mark.parametrize("name", FILES)
def test_files_decode_and_encode_to_the_same_bytes(name):
    assert FILES[name](EXAMPLES[name].encode()) == EXAMPLES[name].encode()


@pytest.mark.parametrize("kind", KINDS)
def test_records_decode_and_encode_to_the_same_bytes(kind):
    data = EXAMPLES[kind].encode()
    record = decode_record(data, KINDS.index(kind) + 1)
    assert record.__struct_config__.tag == kind
    assert encode_record(record) == data


def test_the_snapshot_decoded_by_hand_is_the_one_of_the_examples():
    stored = base64.b64decode(STORED["manifest"])
    commit = decode_record(EXAMPLES["commit"].encode(), 3)
    assert isinstance(commit, CommitRecord)
    manifest = decode_manifest(stored, commit.manifest_digest)
    assert canonical.dump(manifest) == EXAMPLES["manifest"].encode()
    assert (commit.manifest_bytes, commit.snapshot) == (len(stored), manifest.snapshot)
    assert objects.decode_upload(EXAMPLES["upload.json"].encode()).manifest_digest == commit.manifest_digest
    assert f"\n    {commit.manifest_digest}\n" in TEXT

    pack = dump_to_bytes(STORED["pack"])
    parsed = parse_header(pack, len(pack))
    pieces = [tensor for tensor in parsed.tensors if not tensor.pad]
    assert [(tensor.start, tensor.nbytes) for tensor in pieces] == [(piece.start, piece.nbytes) for piece in manifest.pieces]
    assert [tensor.name for tensor in pieces] == [leaf.path for leaf in manifest.leaves]
    for piece in manifest.pieces:
        content = pack[piece.start : piece.start + piece.nbytes]
        assert crc64(content) == piece.crc64nvme
        assert digest_like(piece.digest, content) == piece.digest
    for tensor in parsed.tensors:
        assert not tensor.pad or not any(pack[tensor.start : tensor.start + tensor.nbytes])
    header = pack[: parsed.header_bytes]
    (entry,) = manifest.packs
    assert pack_digest(header, [piece.digest for piece in manifest.pieces], "blake3") == entry.digest
    assert len(pack) == entry.nbytes
    loaded = safetensors.numpy.load(pack)
    assert loaded["model/weight"].tolist() == np.frombuffer(pack[4096:4104], "<f4").tolist() == [1.0, -2.0]
    assert loaded["counters/samples"] == 500


def test_the_values_per_rank_are_those_that_the_text_tells():
    data = EXAMPLES["per-rank"].encode()
    tree = decode_tree(data)
    assert bytes(encode_tree(tree)) == data
    cache = ("cursor", "cache")
    assert [(path, rank) for path, rank, node in walk_ranks(tree) if node == LeafRef(2)] == [(cache, 1)]
    assert {(path[-1], rank): node for path, rank, node in walk_ranks(tree) if type(node) is int} == {
        ("epoch", -1): 4,
        ("shard", 0): 0,
        ("row", 0): 17,
        ("shard", 1): 3,
        ("row", 1): 5,
    }


def test_the_numbers_in_the_walk_through_are_those_of_the_bytes():
    pack = dump_to_bytes(STORED["pack"])
    length = int.from_bytes(pack[:8], "little")
    json_bytes = len(pack[8 : 8 + length].rstrip(b" "))
    manifest = samples.manifest()
    for said in (
        f"({len(base64.b64decode(STORED['manifest']))} bytes)",
        f"{len(pack)} bytes:",
        f"= {length}. So",
        f"{json_bytes} bytes of JSON",
        f"then {length - json_bytes} spaces",
        f"`{manifest.pieces[0].digest[7:23]}…`",
        f"`{manifest.pieces[0].crc64nvme}`",
        f"`{manifest.packs[0].digest[7:23]}…`",
        f"`{samples.PACK}`",
    ):
        assert said in TEXT
    assert pack == samples.pack_bytes()


def test_the_forms_of_the_tree_are_those_of_the_codec():
    forms = [
        form for form in re.findall(r"`(\{\"[a-z]+\":[^`]*\})`", TEXT.split("## 7.")[1].split("## 8.")[0]) if "…" not in form
    ]
    assert len(forms) == 10
    for form in forms:
        assert bytes(encode_tree(decode_tree(form.encode()))) == form.encode()


def test_the_tables_of_dtypes_and_the_limits_are_those_of_the_code():
    sizes = {}
    for names, size in re.findall(r"^\| (`.*`) \| (\d+) \|$", TEXT.split("## 7.")[0], re.MULTILINE):
        sizes |= {name: int(size) for name in re.findall(r"`(\w+)`", names)}
    assert sizes == DTYPE_BYTES
    rows = re.findall(r"^\| `bool`.*|^\| `u?int.*|^\| `float64`.*", TEXT.split("## 8.")[1], re.MULTILINE)
    assert dict(re.findall(r"`([a-z]\w*)` \| `([A-Z]\w*)`", "\n".join(rows))) == SAFETENSORS_DTYPES
    assert f"1 to {MAX_SWEEP_NAMES} together" in TEXT

"""Every decoder on every bad input: a typed error, whatever is wrong, and never a value. C142, C144, I16."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.format import samples
from tests.hostile import blobs, texts
from tests.hostile.forge import Forgery, Json, changed, compress, dump, seal
from tests.hostile.manifests import CONTRADICTIONS, TREES, with_tree
from tests.hostile.mutations import mutations
from tieredckpt.errors import CorruptionError, FormatError, TieredCheckpointError, UsageError
from tieredckpt.format import keys, objects
from tieredckpt.format.codec import decompress_into, raw_blocks
from tieredckpt.format.manifest import decode_manifest, decode_pack_keys
from tieredckpt.format.packs import parse_header
from tieredckpt.format.records import decode_record, encode_record
from tieredckpt.format.tree_json import decode_tree
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.ids import is_root_id, is_snapshot_id, original_of, parse_snapshot_id
from tieredckpt.plan.log_index import decode_index, encode_index
from tieredckpt.plan.log_state import EMPTY, fold
from tieredckpt.store.base import is_key
from tieredckpt.store.url import parse_url

FORGERY = Forgery()
Case = tuple[str, bytes]


def refuses(decode: Callable[[bytes], object], cases: Iterable[Case], error: type[TieredCheckpointError] = FormatError) -> int:
    """How many there are; all of them at once where some are not refused as they should be."""
    wrong = []
    number = 0
    for name, data in cases:
        number += 1
        try:
            decode(data)
            wrong.append(f"{name}: accepted")
        except error:
            continue
        except Exception as other:  # what is looked for
            wrong.append(f"{name}: {type(other).__name__}: {str(other)[:200]}")
    assert wrong == []
    return number


def resealed(cases: Iterator[Case]) -> Iterator[Case]:
    """With the digest that the changed document has, so that it is not this that tells."""
    for name, data in cases:
        yield name, data
        if name.startswith("digest "):
            continue
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict) and dump(document) == data and "digest" in document:
            yield f"{name}, sealed", dump(seal(document))


def test_the_good_ones_are_accepted() -> None:
    """Or every refusal below would prove nothing."""
    manifest = FORGERY.manifest(30)
    assert decode_manifest(compress(dump(manifest))).step == 30
    assert decode_manifest(compress(with_tree(manifest, b"5"))).step == 30
    for record in records():
        assert decode_record(dump(seal(record)), record["seq"]).seq == record["seq"]
    pack = FORGERY.objects[manifest["packs"][0]["key"]]
    header, data = blobs.split(pack)
    assert parse_header(blobs.joined(dump(header), data), len(pack)).tensors
    good = blobs.frame(bytes(1000))
    decompress_into(memoryview(good), memoryview(bytearray(1000)))


def test_manifests_with_one_field_changed() -> None:
    for step in (20, 30):
        cases = mutations(FORGERY.manifest(step))
        assert refuses(lambda text: decode_manifest(compress(text)), cases) > 700


def test_manifests_that_contradict_themselves() -> None:
    manifest = FORGERY.manifest(30)
    cases = ((name, dump(changed(manifest, change))) for name, change in CONTRADICTIONS.items() if name != "another run")
    assert refuses(lambda text: decode_manifest(compress(text)), cases) > 80


def test_trees() -> None:
    """Alone, and in a manifest beside the real tree."""
    manifest = FORGERY.manifest(30)
    assert refuses(lambda text: decode_manifest(compress(text)), ((n, with_tree(manifest, t)) for n, t in TREES.items())) > 80
    refuses(decode_tree, ((name, tree) for name, tree in TREES.items() if name != "a leaf that is not there"))


def test_stored_manifests() -> None:
    """The frame around it. Also by the quick reader, whose digest is of these very bytes: an attacker has computed it."""
    text = dump(FORGERY.manifest(30))
    good = compress(text)
    cases = [
        *blobs.bad_frames(len(text)),
        ("bad text", compress(b"\xff")),
        ("raw", text),
        ("a bit", bytes([good[0] ^ 1]) + good[1:]),
    ]
    refuses(decode_manifest, cases)
    refuses(lambda data: decode_pack_keys(data, sha256_digest(data)), cases)


def records() -> list[Json]:
    """Every kind: those of the golden log, and the samples of the format, which have one of each."""
    return FORGERY.records() + [json.loads(encode_record(samples.sealed(record))) for record in samples.UNSEALED]


@pytest.mark.parametrize("kind", ["open", "resume", "commit", "retire", "sweep", "pin", "unpin", "failed-restore"])
def test_records_with_one_field_changed(kind: str) -> None:
    for record in (record for record in records() if record["kind"] == kind):
        assert refuses(lambda data, seq=record["seq"]: decode_record(data, seq), resealed(mutations(record))) > 150


def test_records_that_contradict_themselves() -> None:
    commit, retire, sweep = (next(r for r in records() if r["kind"] == kind) for kind in ("commit", "retire", "sweep"))
    cases: dict[str, Json] = {
        "another step": {**commit, "step": commit["step"] + 1},
        "another origin": {**commit, "origin": samples.EARLIER},
        "no predecessor": {**commit, "predecessors": []},
        "a rebase of another": {**commit, "rebase_of": samples.OLDER},
        "its own rebase": {**commit, "rebase_of": commit["snapshot"]},
        "10,001 predecessors": {**commit, "predecessors": [samples.OLDER] * 10_001},
        "1001 tags": {**commit, "tags": ["x"] * 1001},
        "1001 metrics": {**commit, "metrics": {str(n): 1.0 for n in range(1001)}},
        "a metric that is a word": {**commit, "metrics": {"loss": "infinity"}},
        "a metric in upper case": {**commit, "metrics": {"loss": "NaN"}},
        "the 31st of June": {**commit, "saved_at": "2026-06-31T00:00:00.000000Z"},
        "a second too many": {**commit, "created_at": "2026-06-30T23:59:60.000000Z"},
        "nothing retired": {**retire, "snapshots": []},
        "nothing swept": {**sweep, "snapshots": [], "packs": []},
        "too much swept": {**sweep, "snapshots": [samples.OLDER] * 8001},
        "an escape swept": {**sweep, "packs": ["../../etc/passwd"]},
        "a record swept": {**sweep, "packs": [keys.record_key(1)]},
        "a prefix swept": {**sweep, "packs": ["data/e7/"]},
        "format.json swept": {**sweep, "packs": ["format.json"]},
        "an unknown kind": {**sweep, "kind": "purge"},
        "a kind of another's fields": {**sweep, "kind": "commit"},
        "a MiB of reason": {**sweep, "reason": "x" * (1 << 20)},
    }
    refuses(
        lambda data: decode_record(data, json.loads(data)["seq"]), ((name, dump(seal(record))) for name, record in cases.items())
    )
    for record in records():
        refuses(
            lambda data, seq=record["seq"] + 1: decode_record(data, seq), [("at another place", dump(record))], CorruptionError
        )


def test_small_files() -> None:
    node = json.loads(objects.encode_node(samples.NODE_FILE))
    receipt = next(data for key, data in FORGERY.objects.items() if keys.parse_receipt_key(key))
    upload = next(data for key, data in FORGERY.objects.items() if keys.parse_upload_key(key))
    assert refuses(objects.decode_repository, resealed(mutations(json.loads(FORGERY.objects[keys.FORMAT_KEY])))) > 100
    assert refuses(objects.decode_node, resealed(mutations(node))) > 100
    assert refuses(objects.decode_receipt, mutations(json.loads(receipt))) > 100
    assert refuses(objects.decode_upload, mutations(json.loads(upload))) > 100
    twice = json.loads(upload)
    twice["packs"] *= 2
    foreign = json.loads(receipt)
    foreign["writer"] = 1
    refuses(objects.decode_upload, [("a pack twice", dump(twice))])
    refuses(objects.decode_receipt, [("of another writer", dump(foreign))])


def test_log_indexes() -> None:
    """One that is wrong is ignored by readers, so it has to be known as wrong: a state that no log adds up to breaks them later."""
    state = fold(EMPTY, (decode_record(dump(record), record["seq"]) for record in FORGERY.records()))
    index = json.loads(encode_index(state))
    decode_index(dump(seal(index)), state.seq)
    assert refuses(lambda data: decode_index(data, state.seq), mutations(index)) > 300
    cases: dict[str, Json] = {
        "live and never committed": {**index, "commits": index["commits"][:1]},
        "a live commit without predecessors": {**index, "live": [{**index["live"][0], "predecessors": []}]},
        "a live commit of no day": {**index, "live": [{**index["live"][0], "saved_at": "2026-02-30T00:00:00.000000Z"}]},
        "a last resume that is not there": {**index, "last_resume": samples.EARLIER},
        "no session has opened": {**index, "opens": []},
        "none has, and none is the newest": {**index, "opens": [], "newest": None, "resumes": [], "last_resume": None},
        "no session is the newest": {**index, "newest": None},
        "the newest session has never opened": {**index, "newest": samples.EARLIER},
        "a session that never opened has resumed": {
            **index,
            "resumes": [*index["resumes"][:-1], {**index["resumes"][-1], "session": samples.EARLIER}],
            "last_resume": samples.EARLIER,
        },
        "another number": {**index, "seq": state.seq + 1},
    }
    refuses(lambda data: decode_index(data, state.seq), ((name, dump(seal(one))) for name, one in cases.items()))


def test_packs() -> None:
    """C144: lengths and places decide, before anything is read by them."""
    for number in (0, 1):
        pack = FORGERY.objects[FORGERY.manifest(30)["packs"][number]["key"]]
        assert refuses(lambda data: parse_header(data, len(data)), blobs.bad_packs(pack)) > 100
    refuses(lambda data: parse_header(data, len(data) + 4096), [("the file is longer", pack)])
    refuses(lambda data: parse_header(data, 4096), [("the file is shorter", pack)])


def test_frames() -> None:
    for size in (1, 1000, 65536):
        raw = memoryview(bytearray(size))
        cases = list(blobs.bad_frames(size))
        refuses(lambda data, raw=raw: decompress_into(memoryview(data), raw), cases, CorruptionError)
        whole = [case for case in cases if case[0] not in ("fewer bytes", "more bytes")]
        refuses(lambda data, size=size: list(raw_blocks(memoryview(data), size)), whole, CorruptionError)


def test_ids_and_keys() -> None:
    assert [text[:80] for text in texts.IDS if is_snapshot_id(text)] == []
    assert [text[:80] for text in texts.IDS if is_root_id(text)] == []
    refuses(lambda data: parse_snapshot_id(data.decode(errors="surrogatepass")), _encoded(texts.IDS))
    refuses(lambda data: original_of(data.decode(errors="surrogatepass")), _encoded(texts.IDS))
    refuses(lambda data: keys.manifest_key(data.decode(errors="surrogatepass")), _encoded(texts.IDS))
    assert [text[:80] for text in texts.KEYS if is_key(text)] == []
    assert keys.parse_pack_key(texts.PACK) is not None
    assert [text[:80] for text in texts.PACK_KEYS if keys.parse_pack_key(text) is not None] == []


def test_urls() -> None:
    assert refuses(lambda data: parse_url(data.decode(errors="surrogatepass")), _encoded(texts.URLS), UsageError) > 80


def test_a_url_that_is_refused_keeps_its_secrets() -> None:
    """C145: whatever else is wrong with it."""
    for url in ("s3://key:canary@[bucket/x", "s3://key:canary@buc\nket/x", "gs://key:canary@[b", "s3://b\u2100:canary@x/y"):
        with pytest.raises(UsageError) as caught:
            parse_url(url)
        assert "canary" not in str(caught.value)


def _encoded(cases: Iterable[str]) -> Iterator[Case]:
    return ((repr(text[:80]), text.encode(errors="surrogatepass")) for text in cases)

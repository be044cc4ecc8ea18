"""What the fuzzer feeds: one function for each decoder, with seeds from the golden files, and mutators that know the structure.

A target raises `Wrong` if what it was given is neither refused by a typed error nor a value whose canonical bytes are these very
ones; any other exception of a decoder just passes through. Both are what a fuzzer looks for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import zstandard

from tests.format import samples
from tests.hostile import blobs, texts
from tests.hostile.document_mutator import mutate_json
from tests.hostile.forge import Forgery, dump, seal
from tieredckpt.engine.snapshots import list_snapshots
from tieredckpt.errors import TieredCheckpointError, UsageError
from tieredckpt.format import canonical, keys, objects
from tieredckpt.format.codec import decompress_into
from tieredckpt.format.manifest import MAX_MANIFEST_BYTES, Manifest, check_manifest, decode_manifest
from tieredckpt.format.packs import parse_header
from tieredckpt.format.records import Record, decode_record, encode_record
from tieredckpt.format.tree_json import decode_tree, encode_tree
from tieredckpt.model.ids import is_root_id, is_snapshot_id, original_of, parse_snapshot_id
from tieredckpt.model.tree import format_path, walk
from tieredckpt.plan.choose import NEWEST, choose
from tieredckpt.plan.log import NO_FACTS, admit
from tieredckpt.plan.log_index import decode_index, encode_index
from tieredckpt.plan.log_state import EMPTY, fold
from tieredckpt.store.base import is_key
from tieredckpt.store.url import parse_url

Mutate = Callable[[bytes, random.Random], bytes]


ALL = "all"


class Wrong(Exception):
    """Accepted, and it should not have been."""


@dataclass(frozen=True, slots=True)
class Target:
    """`feed` is given one input; `seeds` are good ones; `mutate` changes one on its own level, above bytes."""

    name: str
    feed: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    mutate: Mutate | None = None


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


# ------------------------------------------------------------------------------------------ documents


def _manifest(data: bytes) -> None:
    """The text, without its frame."""
    manifest = canonical.decode(data, Manifest, max_bytes=MAX_MANIFEST_BYTES, what="manifest")
    check_manifest(manifest)
    expect(canonical.dump(manifest) == data, "the manifest has other canonical bytes")
    for piece in manifest.pieces:
        leaf, pack = manifest.leaves[piece.leaf], manifest.packs[piece.pack]
        expect(0 < piece.start < piece.start + piece.nbytes <= pack.nbytes, "a piece outside of its pack")
        expect(piece.raw_bytes(leaf) >= piece.nbytes, "a piece that is larger than its box")
        expect(all(0 <= a < b <= n for a, b, n in zip(piece.offset, piece.box.end, leaf.shape, strict=True)), "a box outside")


def _stored_manifest(data: bytes) -> None:
    manifest = decode_manifest(data)
    expect(canonical.dump(manifest) == zstandard.ZstdDecompressor().decompress(data), "the frame holds another manifest")


def _tree(data: bytes) -> None:
    node = decode_tree(data)
    expect(bytes(encode_tree(node)) == data, "the tree has other canonical bytes")
    paths = [format_path(path) for path, _ in walk(node)]
    expect(len(set(paths)) == len(paths), "two places with one path")


def _seq_of(data: bytes) -> int:
    """The number that the record says, if it is one: at any other place it would be refused for that alone."""
    before, _, rest = data.rpartition(b'"seq":')
    digits = rest[:20].split(b",")[0]
    return int(digits) if before and digits.isdigit() and 0 < int(digits) < 2**53 else 1


def _record(data: bytes) -> None:
    record = decode_record(data, _seq_of(data))
    expect(encode_record(record) == data, "the record has other canonical bytes")


def _small(decode: Callable[[bytes], object], encode: Callable[..., bytes]) -> Callable[[bytes], None]:
    def feed(data: bytes) -> None:
        expect(encode(decode(data)) == data, "the file has other canonical bytes")

    return feed


def _index(data: bytes) -> None:
    state = decode_index(data, _seq_of(data))
    list_snapshots(state, None, everything=True)
    _ = state.newest_live


def _log(data: bytes) -> None:
    """A log of one JSON list: whatever its records say, a reader comes to a state, and everybody can ask it."""
    documents = json.loads(data)
    if not isinstance(documents, list):
        return
    found: list[Record] = []
    for document in documents[:30]:
        if not isinstance(document, dict):
            continue
        seq = len(found) + 1
        try:
            found.append(decode_record(dump(seal({**document, "seq": seq})), seq))
        except TieredCheckpointError:
            continue
    state = EMPTY
    for record in found:
        admit(state, record, NO_FACTS)
        state = fold(state, (record,))
    expect(fold(EMPTY, found) == state, "all at once is another state")
    if state.newest is not None and state.opens.keys() >= state.resumes.keys():  # or an index of it is refused
        expect(decode_index(encode_index(state), state.seq) == state, "the index holds another state")
    list_snapshots(state, state, everything=True)
    list_snapshots(None, state, everything=False)
    for snapshot in state.live:
        expect(state.known(snapshot), "live and not known")
    expect(state.head is None or state.head in state.live, "the head is not live")
    choose(state, None, NEWEST, offline=False)
    choose(state, state, NEWEST, offline=False)


# ------------------------------------------------------------------------------------------ packs, frames, texts


def _header(data: bytes) -> None:
    """The text of a header: its length, its spaces and the size of the file are made right."""
    head = blobs.joined(data, b"")
    try:
        entries = json.loads(data)
        total = len(head) + max(entry["data_offsets"][1] for entry in entries.values() if "data_offsets" in entry)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        total = len(head)
    if type(total) is int and 0 <= total < 2**62:
        _check_pack(head, total)


def _pack(data: bytes) -> None:
    _check_pack(data, len(data))


def _check_pack(data: bytes, total: int) -> None:
    pack = parse_header(data, total)
    places = [(tensor.start, tensor.start + tensor.nbytes) for tensor in pack.tensors]
    expect(places[0][0] == pack.header_bytes and places[-1][1] == total, "the tensors do not fill the file")
    expect(all(one[1] == other[0] for one, other in pairwise(places)), "a hole, or an overlap")


_RAW = memoryview(bytearray(4096))


def _frame(data: bytes) -> None:
    """The first two bytes say how large the box is."""
    raw = _RAW[: int.from_bytes(data[:2], "little") % (len(_RAW) + 1)]
    decompress_into(memoryview(data[2:]), raw)
    expect(zstandard.ZstdDecompressor().decompress(data[2:]) == raw, "other bytes than the frame has")


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "surrogateescape")


def _url(data: bytes) -> None:
    url = parse_url(_text(data))
    expect("\0" not in f"{url.path}{url.container}", "a NUL")
    if url.scheme != "file":
        expect(not url.path or is_key(url.path), "a prefix that is no key")
        expect(url.container.isascii() and url.container.isprintable(), "a container of other characters")
    if url.scheme == "s3":
        expect("@" not in url.container, "credentials")
        expect((url.endpoint_url or "x").isascii() and (url.region or "x").isascii(), "an option of other characters")
        expect(parse_url(str(url)) == parse_url(f"s3://{url.container}/{url.path}"), "another place by its own text")


def _id(data: bytes) -> None:
    text = _text(data)
    if is_snapshot_id(text):
        name = parse_snapshot_id(text)
        expect(text == name.original + (f"-{name.rebase}" if name.rebase else ""), "the parts are not the whole")
        expect(is_key(keys.manifest_key(text)), "no key")
        expect(keys.parse_manifest_key(keys.manifest_key(text)) == text, "another key")
    expect(not (is_root_id(text) and is_snapshot_id(text)), "both a root and a snapshot")
    original_of(text)


_PARSERS = (
    keys.parse_record_key, keys.parse_index_key, keys.parse_manifest_key, keys.parse_upload_key, keys.parse_receipt_key,
    keys.parse_snapshot_of, keys.parse_pack_key,
)  # fmt: skip


def _key(data: bytes) -> None:
    text = _text(data)
    record, receipt, pack = keys.parse_record_key(text), keys.parse_receipt_key(text), keys.parse_pack_key(text)
    if record is not None:
        expect(keys.record_key(record) == text, "another record")
    if receipt is not None:
        expect(keys.receipt_key(*receipt) == text, "another receipt")
    if pack is not None:
        expect(keys.pack_key(pack.snapshot, pack.writer, pack.n) == text, "another pack")
    known = [parser(text) is not None for parser in _PARSERS]
    expect(keys.parse_snapshot_of(text) is not None or not any(known) or is_key(text), "ours, and no key")
    if is_key(text):
        segments = text.split("/")
        expect(all(segments) and not any(segment.startswith(".") for segment in segments), "a key that may lead out")


# ------------------------------------------------------------------------------------------ all of them


def _objects(forgery: Forgery, is_one: Callable[[str], object]) -> tuple[bytes, ...]:
    return tuple(data for key, data in forgery.objects.items() if is_one(key))


_LARGEST_SEED = 30_000


def _encoded(*words: str) -> tuple[bytes, ...]:
    return tuple(word.encode("utf-8", "surrogatepass") for word in words if len(word) < _LARGEST_SEED)


def targets() -> dict[str, Target]:
    """By name."""
    golden = Forgery()
    manifests = [dump(golden.manifest(step)) for step in (20, 30)] + [canonical.dump(samples.manifest())]
    records = [*_objects(golden, keys.parse_record_key), *(encode_record(samples.sealed(record)) for record in samples.UNSEALED)]
    packs = [golden.objects[pack["key"]] for pack in golden.manifest(30)["packs"]] + [samples.pack_bytes()]
    state = fold(EMPTY, (decode_record(dump(record), record["seq"]) for record in golden.records()))
    frames = [
        len(raw).to_bytes(2, "little") + blobs.frame(raw) for raw in (b"a", b"ab" * 99, bytes(4096), bytes(range(256)) * 16)
    ]
    frames += [frame[:-1] for frame in frames]
    small = {
        "repository": (_small(objects.decode_repository, objects.encode_repository), (golden.objects[keys.FORMAT_KEY],)),
        "node": (_small(objects.decode_node, objects.encode_node), (objects.encode_node(samples.NODE_FILE),)),
        "receipt": (_small(objects.decode_receipt, objects.encode_receipt), _objects(golden, keys.parse_receipt_key)),
        "upload": (_small(objects.decode_upload, objects.encode_upload), _objects(golden, keys.parse_upload_key)),
    }
    found = (
        Target("manifest", _manifest, tuple(manifests), mutate_json),
        Target("stored-manifest", _stored_manifest, tuple(blobs.frame(text) for text in manifests)),
        Target("tree", _tree, tuple(dump(json.loads(text)["tree"]) for text in manifests), mutate_json),
        Target("record", _record, tuple(records), mutate_json),
        Target("log", _log, (dump(golden.records()), dump([json.loads(record) for record in records])), mutate_json),
        Target("index", _index, (encode_index(state),), mutate_json),
        *(Target(name, feed, seeds, mutate_json) for name, (feed, seeds) in small.items()),
        Target("header", _header, tuple(dump(blobs.split(pack)[0]) for pack in packs), mutate_json),
        Target("pack", _pack, tuple(pack for pack in packs if len(pack) < _LARGEST_SEED)),
        Target("frame", _frame, tuple(frames)),
        Target("url", _url, _encoded(*texts.URLS, *texts.GOOD_URLS)),
        Target("id", _id, _encoded(*texts.IDS, *texts.GOOD_IDS)),
        Target("key", _key, _encoded(*texts.KEYS, *texts.PACK_KEYS, *golden.objects)),
    )
    return {target.name: target for target in (*found, _all_of(found))}


def _all_of(found: tuple[Target, ...]) -> Target:
    """One target for all: the first byte of an input says which one it is for."""

    def feed(data: bytes) -> None:
        if data:
            run_one(found[data[0] % len(found)], data[1:])

    def mutate(data: bytes, chance: random.Random) -> bytes:
        target = found[data[0] % len(found)] if data else found[0]
        return data if target.mutate is None or not data else data[:1] + target.mutate(data[1:], chance)

    seeds = tuple(bytes([number]) + seed for number, target in enumerate(found) for seed in target.seeds)
    return Target(ALL, feed, seeds, mutate)


def run_one(target: Target, data: bytes) -> None:
    """Returns for a refusal and for a value that is right; raises what is wrong."""
    try:
        target.feed(data)
    except (TieredCheckpointError, UsageError):
        return
    except (ValueError, RecursionError):
        if target.name == "log" and not _is_json(data):
            return  # the list around the records is the harness's own
        raise


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True

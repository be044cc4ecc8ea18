"""`format.json`, `node.json`, receipts and upload manifests."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.format.samples import NODE, NODE_FILE, OLDER, PACK, REPOSITORY, SNAPSHOT, ZERO, manifest, receipt, stored_pack, upload
from tieredckpt.errors import FormatError, UnsupportedVersionError
from tieredckpt.format import keys, objects
from tieredckpt.format.canonical import dump

replace = msgspec.structs.replace

CODECS = [
    (REPOSITORY, objects.encode_repository, objects.decode_repository),
    (NODE_FILE, objects.encode_node, objects.decode_node),
    (receipt(), objects.encode_receipt, objects.decode_receipt),
    (upload(), objects.encode_upload, objects.decode_upload),
]


@pytest.mark.parametrize(("value", "encode", "decode"), CODECS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_file_round_trips_and_every_flipped_byte_of_structure_is_noticed(value, encode, decode):
    data = encode(value)
    assert decode(data) == value
    for at in range(len(data)):
        for damaged in (data[:at] + data[at + 1 :], data[:at] + b"\xff" + data[at + 1 :]):
            try:
                changed = decode(damaged)
            except FormatError:
                continue
            assert encode(changed) == damaged != data


@pytest.mark.parametrize(("value", "encode", "decode"), CODECS, ids=lambda value: getattr(value, "__name__", ""))
def test_unknown_and_missing_fields_are_refused(value, encode, decode):
    fields = json.loads(encode(value))
    with pytest.raises(FormatError):
        decode(dump(fields | {"zzz": 1}))
    for name in fields:
        with pytest.raises(FormatError):
            decode(dump({key: field for key, field in fields.items() if key != name}))


def test_i17_a_root_of_a_newer_library_is_refused_with_the_version_named():
    data = dump(json.loads(objects.encode_repository(REPOSITORY)) | {"version": 2, "compression": "new"})
    with pytest.raises(UnsupportedVersionError, match=r"format\.json: format version 2"):
        objects.decode_repository(data)


@pytest.mark.parametrize("changes", [{"format": "other"}, {"version": 0}, {"version": "1"}, {"run": "x"}, {"run": None}])
def test_another_format_is_refused(changes):
    with pytest.raises(FormatError, match=r"format\.json") as caught:
        objects.decode_repository(dump(json.loads(objects.encode_repository(REPOSITORY)) | changes))
    assert not isinstance(caught.value, UnsupportedVersionError)


def test_an_upload_manifest_has_the_same_bytes_whoever_found_the_packs_first():
    first = stored_pack()
    second = replace(first, key=keys.pack_key(SNAPSHOT, 3, 10))
    one = objects.encode_upload(replace(upload(), packs=(first, second)))
    other = objects.encode_upload(replace(upload(), packs=(second, first)))
    assert one == other
    listed = [pack.key for pack in objects.decode_upload(one).packs]
    assert listed == sorted([first.key, second.key])


def test_an_upload_manifest_in_another_order_or_with_repeats_is_refused():
    packs = [stored_pack(), replace(stored_pack(), key=keys.pack_key(SNAPSHOT, 3, 10))]
    packs.sort(key=lambda pack: pack.key, reverse=True)
    for order in (packs, [packs[0], packs[0]]):
        with pytest.raises(FormatError, match="order"):
            objects.decode_upload(dump(replace(upload(), packs=tuple(order))))
    with pytest.raises(FormatError, match="twice"):
        objects.encode_upload(replace(upload(), packs=(packs[0], packs[0])))


@pytest.mark.parametrize("key", ["../x", PACK + "/..", keys.pack_key(OLDER, 0, 0), ""])
def test_c142_packs_of_others_and_paths_are_refused(key):
    pack = replace(stored_pack(), key=key)
    with pytest.raises(FormatError, match="pack of its own"):
        objects.decode_receipt(dump(replace(receipt(), packs=(pack,))))
    with pytest.raises(FormatError, match="pack of its own"):
        objects.decode_upload(dump(replace(upload(), packs=(pack,))))
    with pytest.raises(FormatError):
        objects.encode_receipt(replace(receipt(), packs=(pack,)))


def test_a_receipt_holds_packs_of_its_writer_only():
    with pytest.raises(FormatError, match="pack of its own"):
        objects.decode_receipt(dump(replace(receipt(), writer=1)))


def test_a_writer_without_packs_or_node_has_a_receipt():
    made = replace(receipt(), packs=(), node="")
    assert objects.decode_receipt(objects.encode_receipt(made)) == made


def test_small_files_are_capped_before_they_are_parsed():
    for decode in (objects.decode_repository, objects.decode_node):
        with pytest.raises(FormatError, match="more than"):
            decode(b" " * (objects.MAX_SMALL_BYTES + 1))


def test_receipts_and_the_upload_manifest_name_what_the_snapshot_owns():
    """Not the packs of its ancestors: these have been reported already, and are sent under their owners' names."""
    mine = manifest()
    (own,) = mine.packs
    second = replace(own, key=keys.pack_key(SNAPSHOT, 3, 0))
    ancestors = replace(own, key=keys.pack_key(OLDER, 0, 0), snapshot=OLDER)
    mixed = replace(mine, packs=(second, ancestors, own), writers=(0, 3))
    assert objects.receipt_of(mixed, 0, NODE) == receipt()
    assert [pack.key for pack in objects.receipt_of(mixed, 3, NODE).packs] == [second.key]
    sent = objects.upload_manifest_of(mixed, ZERO)
    assert [pack.key for pack in sent.packs] == sorted([own.key, second.key])
    assert objects.decode_upload(objects.encode_upload(sent)) == sent

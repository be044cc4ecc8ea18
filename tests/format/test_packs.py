"""Packs are valid safetensors files, aligned, without holes; every other header is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.format.samples import SNAPSHOT, layout, pack_bytes
from tieredckpt.errors import FormatError
from tieredckpt.format.packs import (
    MAX_HEADER_BYTES,
    SAFETENSORS_DTYPES,
    PackItem,
    build_layout,
    header_bytes,
    pack_digest,
    parse_header,
    piece_name,
)
from tieredckpt.model.box import Box
from tieredckpt.model.digest import digest
from tieredckpt.model.leaf import DTYPE_BYTES
from tieredckpt.settings import PAGE_BYTES


def filled(items: list[PackItem], data: list[bytes], metadata: dict[str, str]) -> bytes:
    """A whole pack, as an engine writes it: header, then each piece and zeros up to the next."""
    made = build_layout(items, metadata)
    return made.header + b"".join(piece.ljust(n, b"\0") for piece, n in zip(data, made.padded, strict=True))


def every_dtype() -> tuple[list[PackItem], list[bytes]]:
    rng = np.random.default_rng(0)
    items = [PackItem(f"leaf/{dtype}", dtype, (3, 5), 15 * size) for dtype, size in DTYPE_BYTES.items()]
    data = [rng.integers(0, 2 if item.dtype == "bool" else 256, item.nbytes, np.uint8).tobytes() for item in items]
    return items, data


def test_c120_torchs_loader_reads_every_dtype_bit_for_bit(tmp_path):
    items, data = every_dtype()
    path = tmp_path / "pack.safetensors"
    path.write_bytes(filled(items, data, {"tieredckpt": "1"}))
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"tieredckpt": "1"}
        for item, content in zip(items, data, strict=True):
            tensor = opened.get_tensor(item.name)
            known = item.dtype in SAFETENSORS_DTYPES
            assert tensor.dtype == getattr(torch, item.dtype if known else "uint8")
            assert tuple(tensor.shape) == ((3, 5) if known else (len(content),))
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == content
    loaded = safetensors.torch.load_file(path)
    assert {name for name in loaded if not name.startswith("__pad.")} == {item.name for item in items}
    assert all(not tensor.any() for name, tensor in loaded.items() if name.startswith("__pad."))


def test_numpys_loader_reads_the_dtypes_that_numpy_has(tmp_path):
    items, data = every_dtype()
    path = tmp_path / "pack.safetensors"
    path.write_bytes(filled(items, data, {}))
    with safe_open(path, "np") as opened:
        for item, content in zip(items, data, strict=True):
            if not hasattr(np, item.dtype.rstrip("_")) and item.dtype != "bool":
                continue
            assert opened.get_tensor(item.name).tobytes() == content
    whole = safetensors.numpy.load(pack_bytes())
    assert whole["model/weight"].tolist() == [1.0, -2.0]
    assert whole["counters/samples"] == 500


def test_what_safetensors_lacks_is_stored_as_bytes():
    assert DTYPE_BYTES.keys() - SAFETENSORS_DTYPES.keys() == {"complex32", "complex128", "float8_e8m0fnu"}


@settings(deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=12))
def test_pieces_are_aligned_and_the_header_says_where_everything_is(sizes):
    items = [PackItem(f"p{index}", "uint8", (n,), n) for index, n in enumerate(sizes)]
    made = build_layout(items, {"a": "b"})
    assert len(made.header) % PAGE_BYTES == 0
    assert all(start % PAGE_BYTES == 0 for start in made.starts)
    assert made.starts[0] == len(made.header)
    assert made.nbytes == made.starts[-1] + sizes[-1] == len(made.header) + sum(made.padded)
    parsed = parse_header(made.header + b"data", made.nbytes)
    assert parsed.header_bytes == header_bytes(made.header[:8]) == len(made.header)
    assert parsed.metadata == {"a": "b"}
    pieces = [tensor for tensor in parsed.tensors if not tensor.pad]
    assert [(t.name, t.dtype, t.shape, t.start, t.nbytes) for t in pieces] == [
        (item.name, "U8", item.shape, start, item.nbytes) for item, start in zip(items, made.starts, strict=True)
    ]
    position = parsed.header_bytes
    for tensor in parsed.tensors:
        assert tensor.start == position
        position += tensor.nbytes
    assert position == made.nbytes
    assert not parsed.tensors[-1].pad


def test_a_pack_of_many_pieces_has_a_header_of_several_pages():
    items = [PackItem(f"layers.{n}.weight", "float32", (), 4) for n in range(2000)]
    made = build_layout(items, {})
    assert len(made.header) > 10 * PAGE_BYTES
    assert parse_header(memoryview(made.header), made.nbytes).header_bytes == len(made.header)


@pytest.mark.parametrize(
    "items",
    [
        [],
        [PackItem("a", "float32", (2,), 7)],
        [PackItem("a", "float32", (0,), 0)],
        [PackItem("a", "float12", (2,), 8)],
        [PackItem("a", "uint8", (1,), 1), PackItem("a", "uint8", (1,), 1)],
        [PackItem("__pad.0", "uint8", (1,), 1)],
        [PackItem("__metadata__", "uint8", (1,), 1)],
    ],
    ids=repr,
)
def test_pieces_that_cannot_make_a_pack_are_refused(items):
    with pytest.raises(FormatError):
        build_layout(items, {})


def test_a_header_over_the_cap_of_safetensors_is_refused():
    with pytest.raises(FormatError, match="fewer pieces"):
        build_layout([PackItem("a", "uint8", (1,), 1)], {"x": "y" * MAX_HEADER_BYTES})


def make(header: object, total: int = 12296, *, text: bytes | None = None, length: int | None = None) -> tuple[bytes, int]:
    """A header from any JSON value, padded as ours are."""
    body = json.dumps(header, sort_keys=True, separators=(",", ":")).encode() if text is None else text
    padded = body.ljust(-(-(8 + len(body)) // 4096) * 4096 - 8)
    return (len(padded) if length is None else length).to_bytes(8, "little") + padded, total


def tensor(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, object]:
    return {"data_offsets": [begin, end], "dtype": dtype, "shape": [end - begin] if shape is None else shape}


GOOD = {"__metadata__": {}, "__pad.0": tensor(8, 4096), "a": tensor(0, 8), "b": tensor(4096, 8200)}


def without(name: str, **more: object) -> dict[str, object]:
    return {key: value for key, value in GOOD.items() if key != name} | more


def test_the_good_header_is_good():
    assert [tensor.name for tensor in parse_header(*make(GOOD)).tensors] == ["a", "__pad.0", "b"]


HUGE = 2**63
HOSTILE = {
    "too short": (b"1234567", 7),
    "no header": (bytes(8), 4096),
    "length of 2^63": make(GOOD, length=HUGE),
    "length of 2^64-1": make(GOOD, length=2**64 - 1),
    "length over the cap": make(GOOD, length=100_003_832),
    "length past the end": make(GOOD, length=8184),
    "length past the object": (make(GOOD)[0], 4000),
    "length not aligned": make(GOOD, length=4000),
    "no json": make(None, text=b"x"),
    "empty text": make(None, text=b""),
    "an array": make([]),
    "nested": make(None, text=b"[" * 4088),
    "bad utf-8": make(None, text=b'{"\xff":1}'),
    "no tensors": make({"__metadata__": {}}, 4096),
    "metadata not texts": make(without("__metadata__", __metadata__={"a": 1})),
    "metadata missing": make(without("__metadata__")),
    "repeated name": make(None, text=json.dumps(GOOD, separators=(",", ":"))[:-1].encode() + b',"b":{}}'),
    "not sorted": make(None, text=json.dumps(dict(reversed(GOOD.items())), separators=(",", ":")).encode()),
    "spaces": make(None, text=json.dumps(GOOD, sort_keys=True).encode()),
    "a hole": make(without("__pad.0")),
    "an overlap": make(without("a", a=tensor(0, 9))),
    "starts after 0": make({"__metadata__": {}, "a": tensor(4096, 8200)}),
    "past the end": make(GOOD, 12295),
    "data left over": make(GOOD, 12297),
    "end before begin": make(without("b", b=tensor(4096, 4095, shape=[1]))),
    "offsets of 2^63": make(without("b", b=tensor(4096, HUGE))),
    "offsets of 2^53-1": make(without("b", b=tensor(4096, 2**53 - 1))),
    "negative offset": make(without("a", a=tensor(-1, 8))),
    "float offset": make(without("a", a=tensor(0, 8) | {"data_offsets": [0, 8.0]})),
    "three offsets": make(without("a", a=tensor(0, 8) | {"data_offsets": [0, 8, 9]})),
    "shape of 2^63": make(without("b", b=tensor(4096, 8200, shape=[HUGE]))),
    "shape whose product overflows 64 bits": make(without("b", b=tensor(4096, 8200, shape=[2**32, 2**32, 4104]))),
    "negative shape": make(without("b", b=tensor(4096, 8200, shape=[-1, -4104]))),
    "shape of 65 dimensions": make(without("b", b=tensor(4096, 8200, shape=[4104] + [1] * 64))),
    "shape does not fit": make(without("b", b=tensor(4096, 8200, "F32", [1025]))),
    "unknown dtype": make(without("b", b=tensor(4096, 8200, "F4"))),
    "empty tensor": make(without("", e=tensor(4096, 4096))),
    "unknown field": make(without("a", a=tensor(0, 8) | {"x": 1})),
    "filler of floats": make(without("__pad.0", **{"__pad.0": tensor(8, 4096, "F32", [1022])})),
    "filler with another name": make(without("__pad.0", pad=tensor(8, 4096))),
    "filler numbered 00": make(without("__pad.0", **{"__pad.00": tensor(8, 4096)})),
    "filler of a page": make({"__metadata__": {}, "__pad.0": tensor(8, 8192), "a": tensor(0, 8), "b": tensor(8192, 8200)}),
    "filler short of the page": make(
        {"__metadata__": {}, "__pad.0": tensor(8, 4095), "a": tensor(0, 8), "b": tensor(4095, 8200)}
    ),
    "filler at the end": make({"__metadata__": {}, "__pad.0": tensor(8, 4096), "a": tensor(0, 8)}, 8192),
    "two fillers in a gap": make(without("__pad.0", **{"__pad.0": tensor(8, 100), "__pad.1": tensor(100, 4096)})),
    "filler only": make({"__metadata__": {}, "__pad.0": tensor(0, 4096)}, 8192),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_c144_hostile_headers_are_format_errors(case):
    with pytest.raises(FormatError, match="pack header"):
        parse_header(*HOSTILE[case])


def test_the_length_is_checked_before_the_header_is_read():
    for length, message in ((100_003_832, "more than the"), (4000, "multiple of 4096"), (0, "multiple of 4096")):
        with pytest.raises(FormatError, match=message):
            header_bytes(length.to_bytes(8, "little"))
    for data, total in (HOSTILE["length past the end"], HOSTILE["length past the object"]):
        with pytest.raises(FormatError, match="more than there are"):
            parse_header(data, total)


@given(data=st.binary(max_size=64), total=st.integers(0, 2**64))
def test_no_bytes_make_another_error(data, total):
    with pytest.raises(FormatError):
        parse_header(data, total)


@settings(max_examples=400, deadline=None)
@given(at=st.integers(0, 600), bit=st.integers(0, 7))
def test_a_flipped_bit_of_a_header_is_refused_or_gives_another_header(at, bit):
    made = layout()
    damaged = bytearray(made.header)
    damaged[at] ^= 1 << bit
    try:
        parsed = parse_header(damaged, made.nbytes)
    except FormatError:
        return
    assert parsed != parse_header(made.header, made.nbytes)


def test_a_pack_digest_covers_header_and_pieces_in_order():
    made = layout()
    one, two = digest("blake3", b"1"), digest("blake3", b"2")
    expected = digest("blake3", made.header + bytes.fromhex(one[7:]) + bytes.fromhex(two[7:]))
    assert pack_digest(made.header, [one, two], "blake3") == expected
    others = {
        pack_digest(made.header, [two, one], "blake3"),
        pack_digest(made.header, [one], "blake3"),
        pack_digest(made.header[:-1] + b"\n", [one, two], "blake3"),
        pack_digest(made.header, [digest("sha256", b"1")], "sha256"),
    }
    assert len(others) == 4
    assert expected not in others
    with pytest.raises(FormatError, match="holds a piece"):
        pack_digest(made.header, [one], "sha256")


def test_names_of_pieces_tell_boxes_apart():
    assert piece_name("a/w", Box.whole((4, 6)), (4, 6)) == "a/w"
    assert piece_name("a/w", Box((0, 2), (4, 3)), (4, 6)) == "a/w[0:4,2:5]"
    assert piece_name("a/x", Box((), ()), ()) == "a/x"
    names = {piece_name("w", Box((a,), (n,)), (9,)) for a in range(9) for n in range(1, 10 - a)}
    assert len(names) == math.comb(10, 2)


def test_the_sample_pack_is_described_by_its_metadata():
    assert parse_header(pack_bytes(), len(pack_bytes())).metadata == {"snapshot": SNAPSHOT, "tieredckpt": "1"}

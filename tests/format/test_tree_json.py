"""The state tree comes back exactly, or is refused by its path before anything is written."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.errors import FormatError, UsageError
from tieredckpt.format.tree_json import MAX_ALIKE_KEYS, MAX_INT_DIGITS, decode_tree, encode_tree
from tieredckpt.model.tree import MAX_DEPTH, NUMPY_SCALARS, LeafRef, TorchDevice, TorchDtype, TorchSize


def exact(node: object) -> object:
    """A comparable form that tells apart everything that must come back: types, order, bits of numbers, attributes."""
    if isinstance(node, dict):
        return type(node), [(exact(key), exact(value)) for key, value in node.items()], exact(getattr(node, "_metadata", None))
    if isinstance(node, list | tuple):
        return type(node), [exact(item) for item in node]
    if isinstance(node, np.generic):
        return node.dtype, node.tobytes()
    if isinstance(node, float):
        return float, struct.pack("<d", node)
    return type(node), node


def round_trip(node: object) -> object:
    raw = encode_tree(node)
    back = decode_tree(raw)
    assert exact(back) == exact(node)
    assert bytes(encode_tree(back)) == bytes(raw)
    json.loads(bytes(raw), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return back


numbers = st.integers() | st.integers(-(2**200), 2**200) | st.floats()
numpy_scalars = st.sampled_from(sorted(NUMPY_SCALARS)).flatmap(
    lambda name: st.binary(min_size=(size := np.dtype(name).itemsize), max_size=size).map(
        lambda data: np.frombuffer(data if name != "bool" else bytes([data[0] & 1]), name)[0]
    )
)
scalars = (
    st.none()
    | st.booleans()
    | numbers
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | numpy_scalars
    | st.integers(0, 9).map(LeafRef)
    | st.sampled_from(["float32", "bfloat16", "qint8"]).map(TorchDtype)
    | st.lists(st.integers(0, 2**53 - 1), max_size=3).map(lambda dims: TorchSize(tuple(dims)))
    | st.sampled_from(["cpu", "cuda:7", "meta"]).map(TorchDevice)
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=300)
@given(trees)
def test_every_tree_comes_back_exactly(tree):
    round_trip(tree)


@pytest.mark.parametrize(
    "node",
    [
        {"betas": (0.9, 0.95), "list": [0.9, 0.95]},
        {0: "a", "0": "b", None: "c", (0,): "d", b"0": "e", -1: "f", 1.5: "g"},
        [True, 1, 1.0, np.True_, np.int64(1), np.float64(1.0), np.float32(1.0)],
        {True: 1},
        {1: 1},
        {1.0: 1},
        [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324],
        struct.unpack("<d", bytes.fromhex("010000000000f07f"))[0],
        [2**53 - 1, 2**53, -(2**53), 2**200, -(2**200), 10**MAX_INT_DIGITS - 1],
        np.random.PCG64(1).state,
        {"z": 1, "a": 2},
        OrderedDict([("z", 1), ("a", 2)]),
        Counter({3: 1, 5: 2}),
        [[], (), {}, "", b"", OrderedDict(), Counter()],
        ["a\0b", "\U0001f600", "\u2028", "</script>", '"\\'],
        None,
        LeafRef(0),
    ],
    ids=lambda node: repr(node)[:40],
)
def test_c118_c123_c124_named_cases_come_back_exactly(node):
    if isinstance(node, dict) and "state" in node:  # numpy gives the 128-bit state as Python integers
        assert node["state"]["state"] > 2**64
    round_trip(node)


def test_an_ordered_dict_keeps_the_metadata_that_torch_hangs_on_it():
    state = OrderedDict(weight=LeafRef(0))
    state._metadata = OrderedDict({"": {"version": 2}})
    back = round_trip({"model": state})
    assert back["model"]._metadata == {"": {"version": 2}}


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Text(str):
    __slots__ = ()


class Rate(float):
    pass


class Mapping(dict):
    pass


@dataclasses.dataclass
class Config:
    lr: float = 0.1


Point = namedtuple("Point", "x y")


def marked() -> OrderedDict:
    marked = OrderedDict()
    marked.extra = 1
    return marked


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Colour.RED, "store its .value"),
        (Level.HIGH, "store its .value"),
        (Config(), "dataclasses.asdict"),
        (Point(1, 2), "_asdict"),
        (pathlib.Path("x"), "store str"),
        (datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "isoformat"),
        (datetime.timedelta(1), "total_seconds"),
        ({1, 2}, "sorted list"),
        (frozenset(), "sorted list"),
        (range(3), "sorted list"),
        (defaultdict(list), "store dict"),
        (bytearray(b"x"), "store bytes"),
        (1j, "complex128"),
        (Text("x"), "subclass of str"),
        (Mapping(), "subclass of dict"),
        (Rate(0.1), "subclass of float"),
        (np.str_("x"), "item"),
        (np.longdouble(1), "fixed width"),
        (np.datetime64("2026-01-01"), "item"),
        (np.zeros(2), "state_dict"),
        (len, "code is never stored"),
        (Config, "code is never stored"),
        (object(), "state_dict"),
        (marked(), "attributes of its own (extra)"),
        ("\ud800", "surrogate"),
        (10**MAX_INT_DIGITS * 10**10, "digits"),
        (TorchDtype("torch.float32 "), "no torch dtype"),
        (TorchDevice("../cuda"), "no torch device"),
        (TorchSize((-1,)), "no torch size"),
    ],
    ids=lambda value: repr(value)[:30].partition(" at 0x")[0],
)
def test_c116_c117_c120_what_could_not_come_back_is_refused_with_its_path_and_advice(value, advice):
    with pytest.raises(UsageError) as caught:
        encode_tree({"model": [1, {"x": value}]})
    assert "'model/1/x'" in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    "key", [math.nan, Colour.RED, Point(1, 2), np.int64(1), Text("x"), LeafRef(0), (1, Colour.RED), "\udfff"]
)
def test_c117_keys_that_could_not_come_back_are_refused_with_their_path(key):
    with pytest.raises(UsageError, match="'model'"):
        encode_tree({"model": {key: 1}})


def test_nesting_is_bounded_and_a_tree_that_contains_itself_is_refused():
    deep: object = 0
    for _ in range(MAX_DEPTH):
        deep = {"k": deep}
    round_trip(deep)
    with pytest.raises(UsageError, match="deeper than 100"):
        encode_tree([deep])
    loop: list[object] = []
    loop.append({"loop": loop})
    with pytest.raises(UsageError, match="contains itself"):
        encode_tree(loop)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1,]",
        b"[1, 2]",
        b"NaN",
        b"01",
        b"9007199254740992",
        b"1" * 5000,
        b"-0.0",
        b'"\xff"',
        b'"\\ud800"',
        b"{}",
        b'{"a":1}',
        b'{"tuple":[],"list":[]}',
        b'{"tuple":[],"tuple":[]}',
        b'{"list":[]}',
        b'{"tuple":{"tuple":[]}}',
        b'{"int":"5"}',
        b'{"int":"+9007199254740992"}',
        b'{"int":" 9007199254740992"}',
        b'{"int":"9_007_199_254_740_992"}',
        b'{"int":"' + b"9" * 4300 + b'"}',
        b'{"int":"' + b"9" * 100_000 + b'"}',
        b'{"int":9007199254740992}',
        b'{"float":"1.5"}',
        b'{"float":"NaN"}',
        b'{"float":"-nan"}',
        b'{"float":"infinity"}',
        b'{"float":"nan:7ff8000000000000"}',
        b'{"float":"nan:7FF8000000000001"}',
        b'{"float":"nan:3ff0000000000000"}',
        b'{"float":"nan:00"}',
        b'{"float":null}',
        b'{"bytes":"AA"}',
        b'{"bytes":"AB=="}',
        b'{"bytes":"A A="}',
        b'{"bytes":[0]}',
        b'{"dict":[["a"]]}',
        b'{"dict":[["a",1,2]]}',
        b'{"dict":["ab"]}',
        b'{"dict":{"a":1}}',
        b'{"dict":[["a",1],["a",2]]}',
        b'{"dict":[[1,1],[true,2]]}',
        b'{"dict":[[0.0,1],[{"float":"-0.0"},2]]}',
        b'{"dict":[[[],1]]}',
        b'{"dict":[[{"leaf":0},1]]}',
        b'{"dict":[[{"float":"nan"},1]]}',
        b'{"dict":[[{"numpy":["int64","0000000000000000"]},1]]}',
        b'{"dict":[[{"dict":[]},1]]}',
        b'{"metadata":1}',
        b'{"dict":[],"metadata":1}',
        b'{"counter":[],"metadata":1}',
        b'{"numpy":["float32","00"]}',
        b'{"numpy":["float32",""]}',
        b'{"numpy":["float32","0000c07f0000c07f"]}',
        b'{"numpy":["float32","0000C07F"]}',
        b'{"numpy":["object","0000000000000000"]}',
        b'{"numpy":["bool","02"]}',
        b'{"numpy":["float128","00"]}',
        b'{"numpy":["datetime64[s]","0000000000000000"]}',
        b'{"numpy":["float32"]}',
        b'{"leaf":-1}',
        b'{"leaf":true}',
        b'{"leaf":1.0}',
        b'{"leaf":"0"}',
        b'{"leaf":9007199254740992}',
        b'{"size":[-1]}',
        b'{"size":[1.0]}',
        b'{"size":3}',
        b'{"dtype":"__import__"}',
        b'{"dtype":"float32\\n"}',
        b'{"device":"cuda:"}',
        b'{"device":0}',
        b"[" * 101 + b"]" * 101,
        b"[" * 600 + b"]" * 600,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"tuple":[' * 90_000 + b"]}" * 90_000,
    ],
    ids=lambda data: repr(data[:50]),
)
def test_hostile_trees_are_format_errors(data):
    with pytest.raises(FormatError, match="state tree"):
        decode_tree(data)


def test_hostile_numbers_and_types_are_refused_before_they_are_converted():
    with pytest.raises(FormatError, match="bad int: more than 4000 digits"):
        decode_tree(b'{"int":"' + b"9" * 4200 + b'"}')
    with pytest.raises(FormatError, match="bad numpy: no numpy scalar type"):
        decode_tree(b'{"numpy":["datetime64[s]","0000000000000000"]}')


@given(st.binary(max_size=100) | st.text('[]{},:"0.e-intupledc', max_size=60).map(str.encode))
def test_no_bytes_make_another_error(data):
    try:
        node = decode_tree(data)
    except FormatError:
        return
    assert bytes(encode_tree(node)) == data


def test_the_size_of_a_tree_is_capped(monkeypatch):
    monkeypatch.setattr("tieredckpt.format.tree_json.MAX_TREE_BYTES", 50)
    encode_tree("x" * 48)
    with pytest.raises(UsageError, match="store large ones as tensors"):
        encode_tree("x" * 49)
    with pytest.raises(FormatError, match="more than the 50 allowed"):
        decode_tree(b'"' + b"x" * 49 + b'"')


def test_as_many_keys_with_one_hash_as_a_dict_can_have() -> None:
    """A dict of very many of them could not be filled in any time; of others, as the 64-bit ids of samples, there may be any number."""
    tree = {(2**61 - 1) * number: None for number in range(1, MAX_ALIKE_KEYS + 1)}
    assert decode_tree(encode_tree(tree)) == tree
    larger = {**tree, 0: None, (2**61 - 1) * (MAX_ALIKE_KEYS + 1): None}
    with pytest.raises(UsageError, match="the same hash"):
        encode_tree({"x": larger})
    pairs = ",".join(f'[{{"int":"{key}"}},null]' for key in sorted(larger) if key)
    with pytest.raises(FormatError, match="the same hash"):
        decode_tree(f'{{"dict":[{pairs}]}}'.encode())
    ids = {2**60 + 7919 * number: number for number in range(20 * MAX_ALIKE_KEYS)}
    assert decode_tree(encode_tree(ids)) == ids


def test_i16_pairs_of_small_integers_with_one_hash_are_keys_with_one_hash() -> None:
    """Tuples are hashed without a secret: who wants many alike can choose them, of any numbers."""
    pairs = _pairs_with_one_hash(MAX_ALIKE_KEYS + 1)
    assert len({hash(pair) for pair in pairs}) == 1
    assert all(0 <= number < 2**53 for pair in pairs for number in pair)
    tree = {pair: None for pair in pairs[1:]}
    assert decode_tree(encode_tree(tree)) == tree
    tree[pairs[0]] = None
    with pytest.raises(UsageError, match="'x' has more than 1000 keys with the same hash"):
        encode_tree({"x": tree})
    stored = ",".join(f'[{{"tuple":[{one},{other}]}},null]' for one, other in pairs)
    with pytest.raises(FormatError, match="the same hash"):
        decode_tree(f'{{"dict":[{stored}]}}'.encode())
    many = {(number, -number): number for number in range(20 * MAX_ALIKE_KEYS)}
    assert decode_tree(encode_tree(many)) == many


def _pairs_with_one_hash(count: int) -> list[tuple[int, int]]:
    """CPython's hash of a tuple is that of xxHash, and can be solved for the last member: one in 2048 solutions is small."""
    first, second, start = (np.uint64(n) for n in (11400714785074694791, 14029467366897019727, 2870177450012600261))
    inverse = np.uint64(pow(int(second), -1, 1 << 64))
    found: list[tuple[int, int]] = []
    step = 1 << 18
    begin = 0
    while len(found) < count:
        one = np.arange(begin, begin + step, dtype=np.uint64)
        lane = start + one * second
        lane = (lane << np.uint64(31) | lane >> np.uint64(33)) * first
        other = (np.uint64(0x123456789ABCDEF) - lane) * inverse
        small = other < np.uint64(1 << 53)
        found += zip(one[small].tolist(), other[small].tolist(), strict=True)
        begin += step
    return found[:count]

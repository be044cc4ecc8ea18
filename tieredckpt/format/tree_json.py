"""The state tree as canonical JSON, and back, exactly.

Between `model.tree` and the `tree` field of a manifest. JSON has one kind of number, one kind of sequence and unordered objects
with text keys; Python state has more. So JSON's own values stand for themselves (null, booleans, integers within ±(2^53 - 1),
finite floats, texts, arrays for lists), and everything else is an object whose member names its type:

    {"int": "<decimal>"}                    an integer beyond ±(2^53 - 1)
    {"float": "nan" | "inf" | "-inf" | "-0.0" | "nan:<bits, 16 hex digits>"}
    {"bytes": "<base64>"}
    {"tuple": [...]}
    {"dict": [[key, value], ...]}           in the order of the dict; also "ordered_dict" and "counter"
    {"metadata": ..., "ordered_dict": ...}  an OrderedDict with torch's `_metadata` attribute
    {"numpy": [dtype, "<bytes, hex>"]}      a scalar, little-endian
    {"leaf": index}                         a tensor or array
    {"per_rank": [[rank, value], ...]}      a value of each rank, ranks ascending; none inside another
    {"dtype": name}, {"size": [...]}, {"device": text}      torch.dtype, torch.Size, torch.device

The failure this exists for: a state that comes back as something else (a tuple as a list, "0" for 0, None for an enum), or that
fails to be written after hours of training. `encode_tree` checks a whole tree before anything is stored and names the path of
what it cannot give back. That one object stands at two places of a tree is not kept: it comes back as two equal ones.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, cast

import msgspec
import numpy as np

from tieredckpt.errors import FormatError, UsageError
from tieredckpt.format import canonical
from tieredckpt.model.advice import advice
from tieredckpt.model.fields import MAX_INT
from tieredckpt.model.ids import MAX_RANK
from tieredckpt.model.tree import (
    MAX_DEPTH,
    NUMPY_SCALARS,
    Key,
    LeafRef,
    Node,
    Path,
    PerRankNodes,
    TorchDevice,
    TorchDtype,
    TorchSize,
    format_path,
)

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_TREE_BYTES = 256 << 20
MAX_INT_DIGITS = 4000
"""Decimal digits of an integer; not far beyond, Python itself refuses to convert."""

MAX_ALIKE_KEYS = 1000
"""Keys of one dict with the same hash. Python hashes integers modulo 2^61 - 1, and tuples of them without a secret, so somebody can
choose large ones, or pairs of small ones, that are all alike, and a dict of a million of those would take hours to fill.
"""

_TOO_LARGE = 10**MAX_INT_DIGITS
_WHAT = "state tree"
_DTYPE = re.compile("[a-z][a-z0-9_]{0,39}")
_DEVICE = re.compile("[a-z]{1,20}(?::[0-9]{1,5})?")


def encode_tree(node: Node) -> msgspec.Raw:
    """The canonical JSON of a tree. UsageError, which names the path and what to do, for what could not be given back exactly."""
    try:
        data = canonical.dump(_encode(node, (), 0), what=_WHAT)
    except RecursionError as error:
        raise UsageError("the state nests too deep for the stack of this thread: save from a shallower call") from error
    if len(data) > MAX_TREE_BYTES:
        raise UsageError(f"the plain values of the state take {len(data)} bytes; store large ones as tensors or arrays")
    return msgspec.Raw(data)


def decode_tree(raw: msgspec.Raw | bytes) -> Node:
    """The tree of bytes that `encode_tree` made. FormatError for any other bytes."""
    data = bytes(raw)
    if len(data) > MAX_TREE_BYTES:
        raise FormatError(f"{_WHAT}: {len(data)} bytes, more than the {MAX_TREE_BYTES} allowed")
    try:
        node = _decode(cast(Json, canonical.load(data, Any, what=_WHAT)))
        same = bytes(encode_tree(node)) == data
    except (UsageError, RecursionError) as error:
        raise FormatError(f"{_WHAT}: {error}") from error
    if not same:
        raise FormatError(f"{_WHAT}: not in canonical form")
    return node


# Encoding


def _encode(node: Node, path: Path, depth: int, owned: bool = False) -> Json:
    """`owned`: within the value of one rank, where no other value per rank may stand."""
    kind = type(node)
    if kind is str:
        return _text(cast(str, node), path)
    if kind is LeafRef:
        return {"leaf": cast(LeafRef, node).index}
    if kind in _CONTAINERS:
        if depth >= MAX_DEPTH:
            _refuse_node(path, f"is nested deeper than {MAX_DEPTH} levels, or contains itself")
        return _encode_container(node, path, depth + 1, owned)
    return _encode_scalar(node, path)


_CONTAINERS: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    dict: "dict",
    OrderedDict: "ordered_dict",
    Counter: "counter",
    PerRankNodes: "per_rank",
}


def _encode_container(node: Node, path: Path, depth: int, owned: bool) -> Json:
    tag = _CONTAINERS[cast(type, type(node))]
    if isinstance(node, PerRankNodes):
        return {tag: _encode_ranks(node.by_rank, path, depth, owned)}
    if isinstance(node, list | tuple):
        items: list[Json] = [_encode(child, (*path, index), depth, owned) for index, child in enumerate(node)]
        return items if tag == "list" else {tag: items}
    members = cast("dict[Key, Node]", node)
    alike = Counter(hash(key) for key in members if _is_wide(key))
    if alike and max(alike.values()) > MAX_ALIKE_KEYS:
        _refuse_node(
            path,
            f"has more than {MAX_ALIKE_KEYS} keys with the same hash (multiples of 2^61 - 1, or chosen tuples?): use texts, or an array",
        )
    pairs: list[Json] = [[_encode_key(key, path), _encode(child, (*path, key), depth, owned)] for key, child in members.items()]
    if tag == "dict":
        return {tag: pairs}
    attributes = vars(node)
    if tag == "ordered_dict" and attributes.keys() == {"_metadata"}:
        return {"metadata": _encode(attributes["_metadata"], (*path, "_metadata"), depth, owned=True), tag: pairs}
    if attributes:
        _refuse_node(path, f"has attributes of its own ({', '.join(sorted(attributes))}): store a plain dict")
    return {tag: pairs}


def _encode_ranks(by_rank: dict[int, Node], path: Path, depth: int, owned: bool) -> Json:
    if owned:
        _refuse_node(
            path, "is a value per rank inside of another one (or of _metadata): give each rank one value that has all of it"
        )
    ranks = list(by_rank)
    if not ranks or not all(type(rank) is int and 0 <= rank <= MAX_RANK for rank in ranks) or ranks != sorted(ranks):
        _refuse_node(path, f"has values of the ranks {ranks[:10]}: they must ascend, from 0 to {MAX_RANK}, and be at least one")
    return [[rank, _encode(node, path, depth, owned=True)] for rank, node in by_rank.items()]


def _encode_scalar(node: Node, path: Path) -> Json:
    match node:
        case None:
            return None
        case bool():
            return node
        case np.generic():
            return _encode_numpy(node, path)
        case int() if type(node) is int:
            return _encode_int(node, path)
        case float() if type(node) is float:
            return _encode_float(node)
        case bytes() if type(node) is bytes:
            return {"bytes": base64.b64encode(node).decode()}
        case TorchDtype(name):
            return {"dtype": name if _DTYPE.fullmatch(name) else _refuse_node(path, f"is no torch dtype: {name[:40]!r}")}
        case TorchDevice(text):
            return {"device": text if _DEVICE.fullmatch(text) else _refuse_node(path, f"is no torch device: {text[:40]!r}")}
        case TorchSize(dims):
            if not all(type(n) is int and 0 <= n <= MAX_INT for n in dims):
                _refuse_node(path, f"is no torch size: {dims!r}")
            return {"size": list(dims)}
        case _:
            _refuse_node(path, advice(node))


def _encode_key(key: Key, path: Path) -> Json:
    if type(key) is str:
        return _text(key, path)
    if key is None or type(key) is bool or type(key) is int or type(key) is bytes:
        return _encode_scalar(key, path)
    if type(key) is float and not math.isnan(key):
        return _encode_float(key)
    if type(key) is tuple:
        return {"tuple": [_encode_key(part, path) for part in key]}
    reason = "NaN equals no key, not even itself" if type(key) is float else advice(key)
    _refuse_node(path, f"has the key {str(key)[:80]!r} of type {type(key).__name__}, which cannot be stored: {reason}")


def _encode_int(value: int, path: Path) -> Json:
    if -MAX_INT <= value <= MAX_INT:
        return value
    if abs(value) >= _TOO_LARGE:
        _refuse_node(path, f"is an integer of more than {MAX_INT_DIGITS} digits: store its bytes")
    return {"int": str(value)}


def _encode_float(value: float) -> Json:
    if math.isfinite(value):
        return value if value != 0 or math.copysign(1, value) > 0 else {"float": "-0.0"}
    bits = struct.pack(">d", value).hex()
    return {"float": str(value) if not math.isnan(value) or bits == _NAN_BITS else f"nan:{bits}"}


_NAN_BITS = "7ff8000000000000"


def _encode_numpy(value: np.generic, path: Path) -> Json:
    name = value.dtype.name
    if name not in NUMPY_SCALARS:
        _refuse_node(path, advice(value))
    return {"numpy": [name, np.array(value, dtype=value.dtype.newbyteorder("<")).tobytes().hex()]}


def _text(text: str, path: Path) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            _refuse_node(path, "has a text with half a surrogate pair, which is no Unicode: store os.fsencode(text)")
    return text


def _refuse_node(path: Path, why: str) -> NoReturn:
    raise UsageError(f"state at {format_path(path)!r} {why}")


# Decoding: structure only. What the values may be is decided by encoding them again.


def _decode(value: Json) -> Node:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"metadata", "ordered_dict"}:
        ordered = _tagged("ordered_dict", value["ordered_dict"])
        vars(ordered)["_metadata"] = _decode(value["metadata"])
        return ordered
    if len(value) != 1:
        raise FormatError(f"{_WHAT}: an object with the members {sorted(value)[:5]} is no value")
    return _tagged(*next(iter(value.items())))


def _tagged(tag: str, content: Json) -> Node:
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise FormatError(f"{_WHAT}: there is no type {tag[:40]!r}")
    try:
        return decoder(content)
    except (ValueError, TypeError, IndexError, struct.error) as error:
        raise FormatError(f"{_WHAT}: bad {tag}: {error}") from error


def _fill(members: dict[Key, Node], value: Json) -> Node:
    alike: Counter[int] = Counter()
    for pair in _items(value):
        stored, child = _items(pair)
        key = cast(Key, _decode(stored))
        if _is_wide(key):
            alike[hash(key)] += 1
            if alike[hash(key)] > MAX_ALIKE_KEYS:
                raise ValueError(f"more than {MAX_ALIKE_KEYS} keys with the same hash")
        members[key] = _decode(child)
    return members


def _decode_ranks(value: Json) -> PerRankNodes:
    by_rank: dict[int, Node] = {}
    for pair in _items(value):
        rank, node = _items(pair)
        by_rank[_index(rank)] = _decode(node)
    return PerRankNodes(by_rank)


def _is_wide(key: Key) -> bool:
    """Can its hash be that of many others by choice? Texts and bytes are hashed with a secret, small integers each to itself."""
    return isinstance(key, tuple) or (type(key) is int and not -MAX_INT <= key <= MAX_INT)


def _decode_float(value: Json) -> float:
    text = _str(value)
    if not text.startswith("nan:"):
        return float(text)
    number: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
    return number


def _decode_int(value: Json) -> int:
    if len(_str(value)) > MAX_INT_DIGITS + 1:
        raise ValueError(f"more than {MAX_INT_DIGITS} digits")
    return int(_str(value))


def _decode_numpy(value: Json) -> np.generic:
    name, content = _items(value)
    if _str(name) not in NUMPY_SCALARS:
        raise ValueError(f"no numpy scalar type {name!r}")
    dtype = np.dtype(_str(name)).newbyteorder("<")
    scalar: np.generic = np.frombuffer(bytes.fromhex(_str(content)), dtype)[0]
    return scalar


def _items(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise TypeError(f"expected an array, got {type(value).__name__}")
    return value


def _str(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    return value


def _index(value: Json) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise ValueError("expected an index")
    return value


_DECODERS: dict[str, Callable[[Json], Node]] = {
    "int": _decode_int,
    "float": _decode_float,
    "bytes": lambda value: base64.b64decode(_str(value), validate=True),
    "tuple": lambda value: tuple(_decode(item) for item in _items(value)),
    "dict": lambda value: _fill({}, value),
    "ordered_dict": lambda value: _fill(OrderedDict(), value),
    "counter": lambda value: _fill(cast("dict[Key, Node]", Counter()), value),
    "numpy": _decode_numpy,
    "leaf": lambda value: LeafRef(_index(value)),
    "per_rank": _decode_ranks,
    "dtype": lambda value: TorchDtype(_str(value)),
    "size": lambda value: TorchSize(tuple(_index(n) for n in _items(value))),
    "device": lambda value: TorchDevice(_str(value)),
}

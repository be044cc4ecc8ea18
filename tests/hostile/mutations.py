"""One document into hundreds of bad ones: every field dropped, null, of another type, out of range, twice, or beside an unknown one.

Every mutation here is one that the format refuses wherever it is made, with the few exceptions that `_allowed` lists: so a decoder
that lets one through is wrong, and needs no judge.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tests.hostile.forge import Json, dump

Path = tuple[str | int, ...]

WORDS: tuple[Any, ...] = (None, True, 7, -1, 1.5, 2**53, 2**63, 2**64, 10**400, "text", [], {})
"""What a field is replaced by. A number beyond 64 bits cannot be a double either."""

_FREE = {"metrics", "consistency", "versions", "environment"}
"""Objects whose names the user chose."""

_NULLABLE = {"parent", "rebase_of", "session", "tip", "remote"}


def mutations(document: dict[str, Json]) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each; names say the path and what was done there."""
    for path, value in _fields(document):
        where = ".".join(map(str, path))
        if isinstance(path[-1], str) and not (len(path) > 1 and path[-2] in _FREE):
            yield f"{where} dropped", dump(_without(document, path))
        for word in WORDS:
            if not _allowed(path, value, word):
                yield f"{where} is {_short(word)}", dump(_with(document, path, word))
        if isinstance(value, str):
            yield f"{where} has half a surrogate pair", dump(_with(document, path, f"{value}\ud800"))
            yield f"{where} has 5000 characters more", dump(_with(document, path, value + "x" * 5000))
        if isinstance(value, dict) and path[-1] not in _FREE:
            yield f"{where} has an unknown field", dump(_with(document, path, {**value, "zzz": 1}))
    yield "unknown field", dump({**document, "zzz": 1})
    yield from _spellings(document)


def _spellings(document: dict[str, Json]) -> Iterator[tuple[str, bytes]]:
    """The same values in bytes that are not theirs."""
    good = dump(document)
    first = next(iter(sorted(document)))
    member = dump({first: document[first]})[1:-1]
    yield "a field twice", b"{" + member + b"," + good[1:]
    yield "a field twice, the second other", good[:-1] + b"," + dump({first: 0})[1:-1] + b"}"
    yield "keys in another order", good.replace(member + b",", b"", 1)[:-1] + b"," + member + b"}"
    yield "a space", good.replace(b":", b": ", 1)
    yield "a line end behind it", good + b"\n"
    yield "a byte-order mark", b"\xef\xbb\xbf" + good
    yield "an escape", good.replace(b'"' + first.encode() + b'"', f'"\\u{ord(first[0]):04x}{first[1:]}"'.encode(), 1)
    yield "UTF-16", good.decode().encode("utf-16")
    yield "not UTF-8", good.replace(b'"', b'"\xff', 1)
    yield "cut off", good[:-1]
    yield "empty", b""
    yield "twice", good + good
    yield "a list around it", b"[" + good + b"]"
    yield "NaN", good.replace(b":", b":NaN,", 1)
    yield "deep arrays", b"[" * 200_000
    yield "deep objects", b'{"a":' * 200_000
    yield "deep in a field", good[:-1] + b',"zzz":' + b"[" * 200_000


def _fields(document: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Every field, and of a list its first member: the others are of the same kind."""
    pairs: list[tuple[str | int, Json]] = []
    if isinstance(document, dict) and path[:1] != ("tree",):
        pairs = list(document.items())
    elif isinstance(document, list) and document and path[:1] != ("tree",):
        pairs = list(enumerate(document)) if path[:1] == ("pieces",) and len(path) == 2 else [(0, document[0])]
    for name, value in pairs:
        yield (*path, name), value
        yield from _fields(value, (*path, name))


def _allowed(path: Path, value: Json, word: Any) -> bool:
    """Is this a value that may stand there, or the one that does?"""
    name = path[-1]
    free = len(path) > 1 and path[-2] in _FREE
    if word is None:
        return value is None or name in _NULLABLE
    if isinstance(word, bool):
        return isinstance(value, bool) or name == "remote"
    if isinstance(word, float):
        return free and path[0] in ("metrics", "consistency")
    if isinstance(word, int):
        return _allowed_number(path, value, word, free)
    if isinstance(word, str):
        return free or name in _TEXTS or (isinstance(name, int) and path[-2] == "tags")
    if path[0] == "tree":
        return True  # `trees` has those
    return isinstance(value, type(word)) and name not in ("pieces", "leaves", "world")


_TEXTS = {"reason", "node_name", "name", "library", "write_id"}


def _allowed_number(path: Path, value: Json, word: int, free: bool) -> bool:
    if path[0] == "tree":
        return abs(word) < 2**53  # a tree may be a number, if no leaf has to stand in it
    if free:
        return (path[0] == "consistency" and abs(word) < 2**53) or (path[0] == "metrics" and word < 10**308)
    if word == 7:  # in range nearly everywhere, and contradicted where something else says what it must be
        return isinstance(value, int) and not isinstance(value, bool)
    return word == -1 and path[-1] in ("storage", "rank", "alias_of")


def _with(document: Json, path: Path, word: Any) -> Json:
    result = copy.deepcopy(document)
    inner = result
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = word
    return result


def _without(document: Json, path: Path) -> Json:
    result = copy.deepcopy(document)
    inner = result
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return result


def _short(word: Any) -> str:
    return repr(word) if not isinstance(word, int) or abs(word) < 2**65 else f"an integer of {len(str(word))} digits"

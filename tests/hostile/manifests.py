"""Bad manifests that no change of one field makes: pieces, boxes, leaves, packs and trees that contradict each other, or the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.hostile.forge import Json, dump

Change = Callable[[Json], Json | None]

OTHER_RUN = "01JAAAAAAAAAAAAAAAAAAAAAA0"
_NAMES = (
    "../x", "/etc/passwd", "data/../x", "data//x", "C:\\x", "data/e7/\0", "data/e7/x\n", ".hidden", "", "data/e7/", "x" * 600,
    "data/e7/\u202egnp", "data/\uff45\uff17/x", "log/00000000000000000001.json", "data/e7/../../etc/passwd",
)  # fmt: skip


def _piece(index: int, **fields: Any) -> Change:
    """Fields of one piece, by name."""
    order = ("leaf", "offset", "shape", "pack", "start", "nbytes", "crc64nvme", "digest", "codec")

    def change(manifest: Json) -> None:
        for name, value in fields.items():
            manifest["pieces"][index][order.index(name)] = value

    return change


def _leaf(index: int, **fields: Any) -> Change:
    return lambda manifest: manifest["leaves"][index].update(fields)


def _top(**fields: Any) -> Change:
    return lambda manifest: manifest.update(fields)


def _pack(index: int, **fields: Any) -> Change:
    return lambda manifest: manifest["packs"][index].update(fields)


def _swap_pieces(manifest: Json) -> None:
    one, other = manifest["pieces"][0], manifest["pieces"][-1]
    one[0], other[0] = other[0], one[0]


def _repeat(name: str) -> Change:
    return lambda manifest: manifest[name].append(manifest[name][0])


def _drop(name: str, index: int = 0) -> Change:
    return lambda manifest: manifest[name].pop(index) and None


def _bomb_of_dimensions(manifest: Json) -> None:
    """Both a leaf and its piece, so that only the product tells."""
    manifest["leaves"][0]["shape"] = [2**53 - 1] * 64
    manifest["pieces"][0][1:3] = [[0] * 64, [2**53 - 1] * 64]


def _alias_of_alias(manifest: Json) -> None:
    manifest["leaves"][1].update(alias_of=0)
    manifest["leaves"][2].update(alias_of=1, shape=[65, 256], dtype="float32")


def _empty_but_wide(manifest: Json) -> None:
    next(leaf for leaf in manifest["leaves"] if 0 in leaf["shape"])["shape"] = [0, 2**40, 2**40]


def _all_as_one(manifest: Json) -> None:
    """Every piece at the same place of the same pack."""
    for piece in manifest["pieces"]:
        piece[3:5] = manifest["pieces"][0][3:5]


def _foreign_pack_name(name: str) -> Change:
    return lambda manifest: manifest["packs"][0].update(key=name)


def _lookalike(manifest: Json) -> None:
    """A cyrillic letter in an id."""
    manifest["packs"][0]["key"] = manifest["packs"][0]["key"].replace("data", "d\u0430ta")


def _other_directory(manifest: Json) -> None:
    manifest["packs"][0]["key"] = manifest["packs"][0]["key"].replace("data/e7/", "data/e8/")


CONTRADICTIONS: dict[str, Change] = {
    "a piece of a leaf that is not there": _piece(0, leaf=99),
    "a piece in a pack that is not there": _piece(0, pack=99),
    "a piece with too few bytes": _piece(1, nbytes=1020),
    "a piece with too many bytes": _piece(1, nbytes=1028),
    "a compressed piece that is as large as its box": _piece(0, nbytes=65536),
    "a raw piece with the bytes of a compressed one": _piece(0, codec="raw"),
    "a piece with another codec": _piece(0, codec="lz4"),
    "a piece at the header": _piece(0, start=0),
    "a piece off its page": _piece(0, start=4097),
    "a piece behind its pack": _piece(0, start=2**40),
    "a piece at the last address": _piece(0, start=2**53 - 4096),
    "a piece that runs past the end": _piece(7, pack=0, start=20480),
    "two pieces in one place": _piece(1, start=4096),
    "a piece with other dimensions": _piece(0, offset=[0], shape=[16384]),
    "a box outside of its leaf": _piece(0, offset=[60, 0]),
    "a box that overlaps": _piece(0, shape=[65, 256], nbytes=1000),
    "an empty box": _piece(0, shape=[0, 256]),
    "offset and shape of different length": _piece(0, offset=[0]),
    "65 dimensions": _piece(0, offset=[0] * 65, shape=[1] * 65),
    "boxes exchanged": _swap_pieces,
    "a piece twice": _repeat("pieces"),
    "a piece that is missing": _drop("pieces"),
    "all pieces in one place": _all_as_one,
    "a digest without its algorithm": _piece(0, digest="0" * 64),
    "a digest of another algorithm": _piece(0, digest=f"md5:{'0' * 64}"),
    "a digest in upper case": _piece(0, digest=f"blake3:{'A' * 64}"),
    "a crc with a sign": _piece(0, crc64nvme="-000000000000001"),
    "a crc in other digits": _piece(0, crc64nvme="\u0661" * 16),
    "a digest with other letters": _piece(0, digest="blake3:" + "\u00e9" * 64),
    "a shape whose product overflows": _bomb_of_dimensions,
    "a shape that is too large": _leaf(0, shape=[2**30, 2**30]),
    "an empty leaf that is too wide": _empty_but_wide,
    "65 dimensions of a leaf": _leaf(0, shape=[1] * 65),
    "an unknown dtype": _leaf(0, dtype="object"),
    "a dtype with code in it": _leaf(0, dtype="__import__('os')"),
    "an unknown kind": _leaf(0, kind="pickle"),
    "an alias of itself": _leaf(0, alias_of=0),
    "an alias of a later leaf": _leaf(0, alias_of=2),
    "an alias of nothing": _leaf(1, alias_of=2**53 - 1),
    "an alias of another shape": _leaf(2, alias_of=0),
    "an alias of an alias": _alias_of_alias,
    "an alias with pieces": _piece(2, leaf=1),
    "two leaves with one path": _leaf(2, path="model/weight"),
    "a path that is not the one in the tree": _leaf(0, path="model/other"),
    "a path that is an escape": _leaf(0, path="../../etc/passwd"),
    "a path with a NUL": _leaf(0, path="model/\0"),
    "a leaf too many": _repeat("leaves"),
    "a leaf too few": _drop("leaves", -1),
    "a pack twice": _repeat("packs"),
    "a pack too few": _drop("packs", -1),
    "a pack smaller than its pieces": _pack(0, nbytes=4096),
    "a pack of a snapshot that is no base": _top(bases=[], parent=None),
    "a pack with the id of another snapshot": _pack(1, snapshot=f"000000000099-{OTHER_RUN}-000001"),
    "a pack in another directory": _other_directory,
    "a pack key in another alphabet": _lookalike,
    "a base twice": lambda m: m["bases"].append(m["bases"][0]),
    "its own base": lambda m: m["bases"].append(m["snapshot"]),
    "its own parent": lambda m: m.update(parent=m["snapshot"]),
    "a parent that is no base": _top(parent=f"000000000099-{OTHER_RUN}-000001"),
    "no depth and a parent": lambda m: m.pop("depth") and None,
    "depth 0": _top(depth=0),
    "10,001 bases": lambda m: m["bases"].extend(f"{n:012d}-{OTHER_RUN}-000001" for n in range(10_001)),
    "a rebase that is none": _top(rebase_of=f"000000000030-{OTHER_RUN}-000001"),
    "no writer": _top(writers=[]),
    "a writer twice": _top(writers=[0, 0]),
    "writers out of order": _top(writers=[1, 0]),
    "a writer beyond all ranks": _top(writers=[10**5]),
    "another writer than that of its packs": _top(writers=[1]),
    "another step": _top(step=31),
    "another session": _top(session=OTHER_RUN),
    "another snapshot": lambda m: m.update(snapshot=m["bases"][0]),
    "another run": _top(run=OTHER_RUN),
    "a version to come": _top(version=2),
    "version 0": _top(version=0),
    "another format": _top(format="tieredckpt"),
    "the 30th of February": _top(created_at="2026-02-30T12:00:00.000000Z"),
    "the year 0": _top(created_at="0000-01-01T12:00:00.000000Z"),
    "the 25th hour": _top(created_at="2026-01-01T25:00:00.000000Z"),
    "a time without its microseconds": _top(created_at="2026-01-01T12:00:00Z"),
    "a time with digits of another script": _top(created_at="\u0662026-01-01T12:00:00.000000Z"),
    "a million ranks of a mesh": _top(world={"mesh": [["x", 1]] * 65, "nodes": [], "ranks": 1}),
    **{f"the pack key {name[:40]!r}": _foreign_pack_name(name) for name in _NAMES},
}  # fmt: skip
"""Changes of the manifest of step 30, each of which makes it one that must be refused."""


def _deep(opening: str, closing: str, levels: int) -> bytes:
    return (opening * levels + "null" + closing * levels).encode()


_TREES: dict[str, Json] = {
    "an unknown type": {"pickle": "gASVBQAAAAAAAABLAS4="},
    "two types at once": {"float": "nan", "int": "1"},
    "an object without a type": {},
    "a plain object": {"a": 1, "b": 2},
    "metadata without its dict": {"metadata": 1},
    "metadata of a plain dict": {"metadata": 1, "dict": []},
    "a leaf of no index": {"leaf": -1},
    "a leaf with a huge index": {"leaf": 2**53},
    "a leaf by name": {"leaf": "0"},
    "a leaf by truth": {"leaf": True},
    "a leaf by float": {"leaf": 0.0},
    "a leaf that is not there": {"leaf": 2**53 - 1},
    "a list as a key": {"dict": [[[1], 2]]},
    "a dict as a key": {"dict": [[{"dict": []}, 2]]},
    "a leaf as a key": {"dict": [[{"leaf": 0}, 2]]},
    "a numpy scalar as a key": {"dict": [[{"numpy": ["int64", "0000000000000000"]}, 2]]},
    "NaN as a key": {"dict": [[{"float": "nan"}, 2]]},
    "a key twice": {"dict": [["a", 1], ["a", 2]]},
    "two equal keys": {"dict": [[1, 1], [True, 2]]},
    "a pair of one": {"dict": [["a"]]},
    "a pair of three": {"dict": [["a", 1, 2]]},
    "pairs that are texts": {"dict": ["ab"]},
    "a dict that is an object": {"dict": {"a": 1}},
    "a dict that is null": {"dict": None},
    "a tuple that is a text": {"tuple": "ab"},
    "an integer that needs no tag": {"int": "5"},
    "an integer with a plus sign": {"int": "+9007199254740992"},
    "an integer with underscores": {"int": "9_007_199_254_740_992"},
    "an integer with spaces": {"int": " 9007199254740992 "},
    "an integer of another script": {"int": "\u0669" * 20},
    "an integer of 4001 digits": {"int": "9" * 4001},
    "an integer of a million digits": {"int": "9" * 10**6},
    "no integer": {"int": "x"},
    "an empty integer": {"int": ""},
    "an integer as a number": {"int": 5},
    "a float that needs no tag": {"float": "1.5"},
    "a float beyond all": {"float": "1e999"},
    "NaN with too few bits": {"float": "nan:7ff8"},
    "NaN that is none": {"float": "nan:0000000000000000"},
    "NaN in upper case": {"float": "NAN"},
    "NaN of a kind that needs no bits": {"float": "nan:7ff8000000000000"},
    "infinity in full": {"float": "Infinity"},
    "bytes without padding": {"bytes": "AP8"},
    "bytes with a line end": {"bytes": "AP8=\n"},
    "bytes of another alphabet": {"bytes": "AP8-"},
    "bytes with loose bits": {"bytes": "AP9="},
    "bytes as a list": {"bytes": [1, 2]},
    "a numpy object": {"numpy": ["object", "0000000000000000"]},
    "a numpy structure": {"numpy": ["i4,i4", "0000000000000000"]},
    "a numpy text": {"numpy": ["<U4", "00"]},
    "a numpy scalar with too few bytes": {"numpy": ["int64", "00"]},
    "a numpy scalar with too many bytes": {"numpy": ["int8", "0000"]},
    "a numpy scalar with no bytes": {"numpy": ["int8", ""]},
    "a numpy scalar in upper case": {"numpy": ["int8", "FF"]},
    "a numpy truth of 2": {"numpy": ["bool", "02"]},
    "a numpy scalar of one part": {"numpy": ["int8"]},
    "a dtype with code in it": {"dtype": "float32; import os"},
    "a dtype with a dot": {"dtype": "torch.float32"},
    "a dtype of 41 letters": {"dtype": "a" * 41},
    "a device of no number": {"device": "cuda:x"},
    "a device with a line end": {"device": "cpu\n"},
    "a size below zero": {"size": [-1]},
    "a size beyond 2^53": {"size": [2**53]},
    "a size of truth": {"size": [True]},
    "a counter of pairs too few": {"counter": [[1]]},
    "1001 keys beyond 2^53": {"dict": [[{"int": str((2**61 - 1) * number)}, 0] for number in range(1, 1002)]},
    "100,000 keys of one hash": {"dict": [[{"tuple": [{"int": str((2**61 - 1) * n)}]}, 0] for n in range(1, 100_001)]},
    "an integer beyond 64 bits": 2**64,
    "an integer beyond 2^53": 2**53,
    "half a surrogate pair": "\ud800",
    "no rank at all": {"per_rank": []},
    "ranks that descend": {"per_rank": [[1, 0], [0, 0]]},
    "a rank twice": {"per_rank": [[0, 1], [0, 1]]},
    "a rank below zero": {"per_rank": [[-1, 0]]},
    "a rank beyond the last": {"per_rank": [[100_000, 0]]},
    "a rank of truth": {"per_rank": [[True, 0]]},
    "a rank as a text": {"per_rank": [["0", 0]]},
    "a rank without a value": {"per_rank": [[0]]},
    "ranks as an object": {"per_rank": {"dict": [[0, 1]]}},
    "ranks inside ranks": {"per_rank": [[0, {"per_rank": [[0, 1]]}]]},
    "ranks deep inside ranks": {"per_rank": [[0, [{"tuple": [{"dict": [["a", {"per_rank": [[0, 1]]}]]}]}]]]},
    "ranks in metadata": {"metadata": {"per_rank": [[0, 1]]}, "ordered_dict": []},
    "ranks as a key": {"dict": [[{"per_rank": [[0, 1]]}, 1]]},
}  # fmt: skip

TREES: dict[str, bytes] = {name: dump(tree) for name, tree in _TREES.items()} | {
    f"{levels} {what}": _deep(opening, closing, levels)
    for levels in (102, 180, 400, 5000, 1_000_000)
    for what, opening, closing in (
        ("lists", "[", "]"),
        ("tuples", '{"tuple":[', "]}"),
        ("dicts", '{"dict":[["a",', "]]}"),
        ("ranks", '{"per_rank":[[0,', "]]}"),
        ("dicts of metadata", '{"metadata":', ',"ordered_dict":[]}'),
    )
} | {
    f"a key of {levels} tuples": b'{"dict":[[' + _deep('{"tuple":[', "]}", levels) + b",1]]}" for levels in (400, 5000, 1_000_000)
}  # fmt: skip
"""Texts of trees that stand for no state, whatever leaves there are."""

_HERE = "the tree stands here"


def with_tree(manifest: Json, tree: bytes) -> bytes:
    """The text of a manifest whose real tree stays, so that its leaves are placed: only what stands beside it is wrong."""
    text = dump({**manifest, "tree": {"dict": [*manifest["tree"]["dict"], ["zzz", _HERE]]}})
    return text.replace(dump(_HERE), tree)

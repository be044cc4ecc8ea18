"""Inputs that claim to be huge, in a process of their own whose memory is limited: `python -m tests.hostile.bombs DIRECTORY`.

Prints a line of JSON for each: its name, how it ended, and by how much the memory of the process has ever grown for it. What is
only claimed must not be allocated; what a store really holds is read only after its size has been compared with what it may be.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import tieredckpt as tc
from tests.cli.kit import run
from tests.golden import copy_to
from tests.hostile import blobs
from tests.hostile.driver import bucket
from tests.hostile.forge import Forgery, Json, compress
from tests.hostile.manifests import CONTRADICTIONS, with_tree
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.format import keys
from tieredckpt.format.manifest import decode_manifest
from tieredckpt.format.packs import parse_header
from tieredckpt.format.records import decode_record
from tieredckpt.format.tree_json import decode_tree

MIB = 1 << 20
LITTLE_BYTES, ROOM_BYTES = 256 * MIB, 2048 * MIB
"""Address space beyond that of a process that has loaded a snapshot: for decoders, and for whole tiers with their threads, and with
memory that may be mapped and not used.
"""


Bomb = tuple[str, Callable[[], object]]


def documents() -> Iterator[Bomb]:
    yield "a manifest that says 1 GiB in 50 bytes", lambda: decode_manifest(blobs.claiming(1 << 30, blobs.run_of_zeros(1)))
    yield "a manifest that says 2^60", lambda: decode_manifest(blobs.claiming(1 << 60, blobs.run_of_zeros(100)))
    yield "a manifest that says 1 and holds 1 GiB", lambda: decode_manifest(blobs.claiming(1, blobs.run_of_zeros(8192)))
    yield "a manifest that says 1 MiB and holds 1 GiB", lambda: decode_manifest(blobs.claiming(MIB, blobs.run_of_zeros(8192)))
    yield "a manifest that is 1 GiB", lambda: decode_manifest(blobs.claiming(1 << 30, blobs.run_of_zeros(8192)))
    yield "a manifest of deep arrays", lambda: decode_manifest(compress(b"[" * 20 * MIB))
    yield "a tree of deep arrays", lambda: decode_tree(b"[" * 20 * MIB)
    yield "an integer of 16 million digits", lambda: decode_tree(b'{"int":"' + b"9" * 16 * MIB + b'"}')
    yield "a record of deep objects", lambda: decode_record(b'{"a":' * 200_000, 1)
    yield "a header that says 100 MB", lambda: parse_header((10**8 // 4096 * 4096 - 8).to_bytes(8, "little"), 1 << 40)


def tiers(scratch: Path) -> Iterator[Bomb]:
    for name, change in _HUGE.items():
        for how, call in {"load": _load, "pull": _pull, "restore": _restore, "verify": _verify}.items():
            if call is _restore and _BEYOND in name:
                continue  # nobody has such a target
            yield f"{name}, {how}", lambda change=change, call=call: _on(_forged(change), call, scratch)
    for name in ("an empty leaf that is too wide", "a shape whose product overflows"):
        yield f"{name}, load", lambda name=name: _on(_forged(CONTRADICTIONS[name]), _load, scratch)
    yield "2100 leaves of 4 PiB, load", lambda: _on(_forged(_more_than_there_are_addresses), _load, scratch)
    deep = Forgery()
    deep.put_manifest(30, with_tree(deep.manifest(30), b"[" * MIB))
    yield "a deep tree, load", lambda: _on(deep, _load, scratch)


def _claim(manifest: Json, stored: int, rows: int, codec: str) -> None:
    """The weight and its first piece, in a pack that is said to be as large."""
    manifest["leaves"][0]["shape"] = [rows, 256]
    manifest["leaves"][1]["shape"] = [rows, 256]
    first, rest = manifest["pieces"][:2]
    first[2], first[5], first[8] = [rows - 1, 256], stored, codec
    rest[1], rest[3], rest[4] = [rows - 1, 0], 0, 4096 + -(-stored // 4096) * 4096
    for piece in manifest["pieces"][2:]:
        if piece[3] == 0:
            piece[4] += rest[4]
    manifest["packs"][0]["nbytes"] = max(piece[4] + piece[5] for piece in manifest["pieces"] if piece[3] == 0)


def _more_than_there_are_addresses(manifest: Json) -> None:
    """Each leaf is one that may be; all together they are more than 2^63 bytes."""
    first = len(manifest["leaves"])
    for number in range(2100):
        manifest["leaves"].append({**manifest["leaves"][3], "dtype": "uint8", "path": f"big/{number}", "shape": [1 << 52]})
        manifest["pieces"].append([first + number, [0], [1 << 52], 0, 4096 * (100 + number), 1, *manifest["pieces"][0][6:]])
    manifest["packs"][0]["nbytes"] = 1 << 40
    manifest["tree"]["dict"].append(["big", [{"leaf": first + number} for number in range(2100)]])


_FITTING, _BEYOND = "200 MiB", "32 TiB"
"""What the address space has room for, and what it has not."""

_HUGE: dict[str, Callable[[Json], None]] = {
    f"{what} of {size}": lambda manifest, codec=codec, rows=rows, stored=stored: _claim(manifest, stored(rows), rows + 1, codec)
    for what, codec, stored in (
        ("a compressed piece that is small", "zstd", lambda rows: 129),
        ("a compressed piece that is large", "zstd", lambda rows: rows * 1000),
        ("a raw piece", "raw", lambda rows: rows * 1024),
    )
    for size, rows in ((_FITTING, 200 * 1024), (_BEYOND, 1 << 35))
}  # fmt: skip
"""Changes of the manifest of step 30. Only the first one's pack has what is read: a frame that holds other than its box."""


def _forged(change: Callable[[Json], None]) -> Forgery:
    forgery = Forgery()
    forgery.change_manifest(30, change)
    return forgery


def _on(forgery: Forgery, call: Callable[[str, Path], None], scratch: Path) -> None:
    with bucket(forgery.objects) as (url, _):
        call(url, scratch)


def _load(place: str, scratch: Path) -> None:
    with tc.Tier.open(place) as tier:
        tier.load(step=30)


def _pull(place: str, scratch: Path) -> None:
    _as_error(run("pull", place, scratch / "pulled").code)


def _verify(place: str, scratch: Path) -> None:
    _as_error(run("verify", place).code)


def _as_error(code: int) -> None:
    if code:
        raise TieredCheckpointError(f"exit code {code}")


def _restore(place: str, scratch: Path) -> None:
    """Into a target that has the shape, and whose memory nobody has touched."""
    with tc.Tier.open(place) as tier:
        shape = tier.manifest(tier.find(step=30).snapshot_id).leaves[0].shape
    target = {"model": {"weight": torch.empty(shape)}}
    with tc.Checkpointer(None, place, state=target, allow_unfenced=True) as ckpt:
        ckpt.restore(step=30, keys=["model/weight"])


def sparse(scratch: Path) -> Iterator[Bomb]:
    golden = copy_to(scratch / "golden")
    forgery = Forgery()
    objects = {
        "format.json": (keys.FORMAT_KEY, ("ls", "verify")),
        "a record": (keys.record_key(11), ("ls", "verify")),
        "a manifest": (keys.manifest_key(forgery.snapshot(30)), ("verify", "show", "du")),
        "a pack": (forgery.manifest(30)["packs"][0]["key"], ("verify",)),
        "a receipt": (keys.receipt_key(forgery.snapshot(30), 0), ("verify",)),
        "an upload manifest": (keys.upload_key(forgery.snapshot(30)), ("verify",)),
    }
    for name, (key, commands) in objects.items():
        for command in commands:
            yield (
                f"{name} of 1 TiB, {command}",
                lambda key=key, command=command: _with_sparse(golden.remote / key, golden.remote, command),
            )


def _with_sparse(path: Path, root: Path, command: str) -> None:
    good = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    try:
        _as_error(run(command, root).code)
    finally:
        path.write_bytes(good)


def _peak() -> int:
    """Most memory that the process has had in use."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _size() -> int:
    """Its address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(scratch: Path) -> None:
    with bucket(Forgery().objects) as (url, _):
        _load(url, scratch)
        _pull(url, scratch)
        run("verify", url)
    _explode(documents(), LITTLE_BYTES)
    _explode(tiers(scratch), ROOM_BYTES)
    _explode(sparse(scratch), ROOM_BYTES)


def _explode(bombs: Iterator[Bomb], room_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_size() + room_bytes, resource.RLIM_INFINITY))
    for name, explode in bombs:
        before = _peak()
        try:
            explode()
            ended = "accepted"
        except TieredCheckpointError as error:
            ended = f"refused: {str(error)[:300]}"
        except Exception as error:
            ended = f"{type(error).__name__}: {str(error)[:200]}"
        print(json.dumps({"name": name, "ended": ended, "grown": _peak() - before}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

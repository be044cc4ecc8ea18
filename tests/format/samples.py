"""One valid value of every stored kind, for the tests of this directory and for the examples of `docs/format-v1.md`."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np

from tieredckpt.format import keys, records
from tieredckpt.format.manifest import Component, Manifest, PackEntry, Piece
from tieredckpt.format.objects import NodeFile, Receipt, RepositoryFile, StoredPack, UploadManifest
from tieredckpt.format.packs import PackItem, PackLayout, build_layout, pack_digest
from tieredckpt.format.records import Record, seal
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.digest import crc64, digest, sha256_digest
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef, Node

RUN = "01JAAAAAAAAAAAAAAAAAAAAAA0"
SESSION = "01JBBBBBBBBBBBBBBBBBBBBBB1"
EARLIER = "01JBBBBBBBBBBBBBBBBBBBBBB0"
NODE = "01JCCCCCCCCCCCCCCCCCCCCCC0"
ULID = "01JDDDDDDDDDDDDDDDDDDDDDD0"
ROOT = f"fresh-{ULID}"
SNAPSHOT = f"000000000500-{SESSION}-000001"
OLDER = f"000000000400-{EARLIER}-000009"
REBASED = f"{SNAPSHOT}-{ULID}"
PACK = keys.pack_key(SNAPSHOT, 0, 0)
WHEN = "2026-03-01T12:00:00.000000Z"
ZERO = f"sha256:{'0' * 64}"

WEIGHT = np.array([1.0, -2.0], np.float32)
COUNT = np.array(500, np.int64)
DATA = (WEIGHT.tobytes(), COUNT.tobytes())

TREE: Node = {
    "model": {"weight": LeafRef(0)},
    "optimizer": {"state": {}, "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), "params": [0]}]},
    "counters": OrderedDict([("samples", LeafRef(1)), ("best", float("inf")), ("seed", 2**64)]),
}

COMMIT = records.CommitRecord(
    session=SESSION,
    origin=SESSION,
    snapshot=SNAPSHOT,
    predecessors=(OLDER, ROOT),
    manifest_digest=ZERO,
    manifest_bytes=1234,
    step=500,
    saved_at=WHEN,
    continues=(EARLIER,),
    nodes=(NODE,),
    bytes_total=16,
    bytes_new=8208,
    packs=1,
    tags=("nightly",),
    metrics={"loss": 2.25, "perplexity": "inf"},
)

UNSEALED: tuple[Record, ...] = (
    records.OpenRecord(session=SESSION, continues=(EARLIER,), node=NODE, node_name="trainer-0"),
    records.ResumeRecord(session=SESSION, target=OLDER, predecessors=(ROOT,), remote=True, continues=(EARLIER,)),
    COMMIT,
    records.RetireRecord(snapshots=(OLDER,), session=SESSION, reason="keep-last 1"),
    records.SweepRecord(packs=(keys.pack_key(OLDER, 0, 0),), snapshots=(OLDER,), reason="retired"),
    records.PinRecord(snapshot=SNAPSHOT, reason="published"),
    records.UnpinRecord(snapshot=SNAPSHOT),
    records.FailedRestoreRecord(session=SESSION, snapshot=SNAPSHOT, packs=(PACK,), reason="digest of one piece differs"),
)


def sealed(record: Record, seq: int = 7) -> Record:
    return seal(record, seq, ULID, WHEN)


def layout() -> PackLayout:
    items = (PackItem("model/weight", "float32", (2,), 8), PackItem("counters/samples", "int64", (), 8))
    return build_layout(items, {"tieredckpt": "1", "snapshot": SNAPSHOT})


def pack_bytes() -> bytes:
    made = layout()
    return made.header + b"".join(data.ljust(n, b"\0") for data, n in zip(DATA, made.padded, strict=True))


def manifest() -> Manifest:
    made = layout()
    digests = [digest("blake3", data) for data in DATA]
    return Manifest(
        run=RUN,
        snapshot=SNAPSHOT,
        step=500,
        session=SESSION,
        created_at=WHEN,
        library="tieredckpt 0.1.0",
        predecessor=OLDER,
        continues=(EARLIER,),
        consistency={"optimizer_step": 500},
        components=(
            Component(name="model", kind="model", level="weights"),
            Component(name="optimizer", kind="optimizer", level="training"),
            Component(name="counters", kind="extra", level="strict"),
        ),
        environment={"torch": "2.13.0"},
        tree=encode_tree(TREE),
        leaves=(
            Leaf(path="model/weight", dtype="float32", shape=(2,), requires_grad=True),
            Leaf(path="counters/samples", dtype="int64", shape=(), kind="numpy"),
        ),
        pieces=(
            Piece(0, (0,), (2,), 0, made.starts[0], 8, crc64(DATA[0]), digests[0]),
            Piece(1, (), (), 0, made.starts[1], 8, crc64(DATA[1]), digests[1]),
        ),
        packs=(PackEntry(key=PACK, nbytes=made.nbytes, digest=pack_digest(made.header, digests, "blake3"), snapshot=SNAPSHOT),),
    )


def commit_of(stored: bytes) -> records.CommitRecord:
    """The commit record of a manifest's stored bytes."""
    return msgspec.structs.replace(COMMIT, manifest_digest=sha256_digest(stored), manifest_bytes=len(stored))


def stored_pack() -> StoredPack:
    entry = manifest().packs[0]
    return StoredPack(key=entry.key, nbytes=entry.nbytes, digest=entry.digest)


REPOSITORY = RepositoryFile(run=RUN, created_at=WHEN)
NODE_FILE = NodeFile(id=NODE, name="trainer-0", created_at=WHEN)


def receipt() -> Receipt:
    return Receipt(snapshot=SNAPSHOT, writer=0, node=NODE, packs=(stored_pack(),))


def upload(manifest_digest: str = ZERO) -> UploadManifest:
    return UploadManifest(snapshot=SNAPSHOT, manifest_digest=manifest_digest, packs=(stored_pack(),))

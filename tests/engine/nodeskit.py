"""A run of several nodes, made by hand: what its ranks would have written, each node's part on its own disk, one bucket.

Four ranks, two on each node, hold a quarter each of one leaf. `save` commits on the nodes it is told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec import UNSET

from tests.engine.runkit import SMALL, DrivenEnv, Wire, value_of
from tieredckpt.engine.commit import Committer, Prepared
from tieredckpt.engine.log import Appended
from tieredckpt.engine.packing import Packed, PackWriter
from tieredckpt.engine.parts import Part
from tieredckpt.engine.tier import OpenTier, RemoteLink, TierOpener, open_existing
from tieredckpt.engine.uploader import Uploader
from tieredckpt.errors import SaveError
from tieredckpt.format.manifest import Manifest, World
from tieredckpt.format.records import CommitRecord, OpenRecord, ResumeRecord
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box
from tieredckpt.model.fields import utc_text
from tieredckpt.model.ids import SnapshotId, make_root_id, make_snapshot_id
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.layout import PlannedPiece, SaveLayout, page_aligned
from tieredckpt.plan.log import LogState
from tieredckpt.plan.reuse import Reuse
from tieredckpt.plan.uploads import UploadPolicy
from tieredckpt.store.memory import MemoryStore

RANKS = (0, 1, 2, 3)
QUARTER = 1500
LEAF = Leaf(path="w", dtype="uint8", shape=(QUARTER * len(RANKS),), kind="numpy")


@dataclass(slots=True)
class Node:
    """One local root, and the ranks that save to it."""

    tier: OpenTier
    ranks: tuple[int, ...]
    uploader: Uploader
    wire: Wire
    refused: list[SaveError] = field(default_factory=list)

    @property
    def state(self) -> LogState:
        return self.tier.log.refresh()


class Nodes:
    """Two nodes (or as many as `ranks` lists) and a bucket; every session is one of all of them."""

    def __init__(self, ranks: Sequence[tuple[int, ...]] = ((0, 1), (2, 3)), policy: UploadPolicy = "all") -> None:
        self.env = DrivenEnv(7)
        self.pool: Executor = self.env.executor("one", 1)
        self.bucket = MemoryStore("bucket")
        self.values: dict[str, bytes] = {}
        self.nodes: list[Node] = []
        for number, own in enumerate(ranks):
            disk, wire = MemoryStore(f"disk {number}"), Wire(self.bucket, f"node {number}", [])
            opener = TierOpener(self.env, SMALL)
            local, remote = opener.open(disk, wire)
            assert local is not None
            link = RemoteLink(wire, opener, local.run, remote, disk)
            node = Node(local, own, Uploader(
                local, link, policy=policy, sending=self.pool, env=self.env, settings=SMALL,
                report=lambda _snapshot, error, number=number: self.nodes[number].refused.append(error),
            ), wire)  # fmt: skip
            self.nodes.append(node)
        self._saves = 0
        self.begin()

    def begin(self) -> None:
        """A session of all nodes: it opens, and goes on from nothing."""
        self.session = self.env.new_ulid()
        self.line = [make_root_id(self.env.new_ulid())]
        for node in self.nodes:
            newest = node.state.newest
            record = OpenRecord(session=self.session, continues=() if newest is None else (newest,), node=node.tier.node)
            assert isinstance(node.tier.log.append(record), Appended)
            resume = ResumeRecord(session=self.session, target=self.line[0], remote=False)
            assert isinstance(node.tier.log.append(resume), Appended)

    def save(self, step: int, on: Sequence[int] = (0, 1), base: Manifest | None = None, same: Sequence[int] = ()) -> Manifest:
        """Every rank writes; the nodes `on` commit. Pieces of the ranks `same` are as in `base`, and referred to."""
        self._saves += 1
        snapshot = make_snapshot_id(step, self.session, self._saves)
        value = bytearray(value_of(snapshot)[: QUARTER * len(RANKS)])
        for rank in same:
            assert base is not None
            value[rank * QUARTER : (rank + 1) * QUARTER] = self.values[base.snapshot][rank * QUARTER : (rank + 1) * QUARTER]
        self.values[snapshot] = bytes(value)
        packed = {rank: self._write(node, rank, snapshot, bytes(value), base) for node in self.nodes for rank in node.ranks}
        manifest = self._manifest(step, snapshot, packed, base)
        prepared = Prepared.of(manifest)
        for number in on:
            node = self.nodes[number]
            named = frozenset(pack.key for rank in node.ranks for pack in packed[rank].packs)
            committer = Committer(node.tier, node.tier.node, self.env, SMALL)
            outcome = committer.publish(prepared, partial(self._record, prepared), part=Part(frozenset(node.ranks), named))
            assert isinstance(outcome, Appended), outcome
        self.line.append(snapshot)
        return manifest

    def remote(self) -> LogState:
        return open_existing("remote", self.bucket, self.env, SMALL).log.refresh()

    def upload(self, number: int, most: int = 20) -> None:
        """The node's uploader works until it has nothing to do."""
        for _ in range(most):
            if not self.nodes[number].uploader.step():
                return
        raise AssertionError("the uploader never rests")

    def remote_value(self, manifest: Manifest) -> bytes:
        """Read from the bucket alone, with no code of the restore."""
        value = bytearray(LEAF.nbytes)
        for piece in manifest.pieces:
            pack = self.bucket.get(manifest.packs[piece.pack].key, max_bytes=1 << 20)
            value[piece.offset[0] : piece.offset[0] + piece.nbytes] = pack[piece.start : piece.start + piece.nbytes]
        return bytes(value)

    def _write(self, node: Node, rank: int, snapshot: SnapshotId, value: bytes, base: Manifest | None) -> Packed:
        box = Box((rank * QUARTER,), (QUARTER,))
        arena = bytearray(value[box.offset[0] : box.end[0]].ljust(page_aligned(QUARTER), b"\0"))
        layout = SaveLayout((PlannedPiece(0, box, QUARTER, 0),), len(arena))
        reuse = None if base is None else Reuse(base, [pack.key for pack in base.packs])
        writer = PackWriter(node.tier.store, SMALL, self.pool, self.pool)
        return writer.write(snapshot, rank, (LEAF,), layout, memoryview(arena), reuse=reuse)

    def _manifest(self, step: int, snapshot: str, packed: dict[int, Packed], base: Manifest | None) -> Manifest:
        packs = {pack.key: pack for rank in RANKS for pack in packed[rank].packs}
        number = {key: index for index, key in enumerate(packs)}
        pieces = [
            msgspec.structs.replace(piece, pack=number[packed[rank].packs[piece.pack].key])
            for rank in RANKS
            for piece in packed[rank].pieces
        ]
        refers = any(pack.snapshot != snapshot for pack in packs.values())
        parent = base.snapshot if base is not None and refers else None
        return Manifest(
            run=self.nodes[0].tier.run, snapshot=snapshot, step=step, session=self.session,
            created_at=utc_text(self.env.wall_time()), library="test", predecessor=self.line[-1],
            parent=parent, bases=() if parent is None else (parent,), depth=UNSET if parent is None else 1,
            world=World(ranks=len(RANKS), nodes=tuple(node.tier.node for node in self.nodes)),
            tree=msgspec.Raw(encode_tree({"w": LeafRef(0)})), leaves=(LEAF,), pieces=tuple(pieces), packs=tuple(packs.values()),
            writers=RANKS,
        )  # fmt: skip

    def _record(self, prepared: Prepared, log: LogState) -> CommitRecord:
        """With the predecessors back to the newest one that this node's log knows: it may lack some."""
        manifest = prepared.manifest
        known = next(number for number, name in enumerate(reversed(self.line), start=1) if name in log.ancestry)
        return CommitRecord(
            session=self.session, origin=self.session, snapshot=manifest.snapshot, predecessors=tuple(reversed(self.line[-known:])),
            manifest_digest=prepared.digest, manifest_bytes=len(prepared.stored), step=manifest.step,
            saved_at=manifest.created_at, nodes=manifest.world.nodes, parent=manifest.parent, packs=len(manifest.packs),
            bytes_total=LEAF.nbytes, bytes_new=sum(pack.nbytes for pack in prepared.own_packs),
        )  # fmt: skip

"""A snapshot in staging memory, verified: what a restore hands to whoever loads it, and then to whoever fills the local tier from it.

Some of it may lie in memory that the ranks of a node share, each having read a part (see `engine.host_memory`). Whoever loads does not
see the difference.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from tieredckpt.engine.landing import Landing
from tieredckpt.format.manifest import Manifest
from tieredckpt.plan.choose import Candidate
from tieredckpt.plan.reading import Image, LandedPieces, ReadPlan, landed_pieces, pack_images


class Memory(Protocol):
    """Bytes that somebody gives back."""

    @property
    def view(self) -> memoryview: ...

    def release(self) -> None:
        """Idempotent. Views must not be used afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class SharedPart:
    """What the ranks of a node have read for each other.

    mine    numbers of the packs that this rank has read
    wanted  (pack, start) of the pieces that this rank needs
    """

    plan: ReadPlan
    memory: Memory
    mine: frozenset[int]
    wanted: Set[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PackImage:
    """A pack that was read whole, as it lies in `view`: all but its header, and the gaps between runs."""

    image: Image
    view: memoryview

    @property
    def header_bytes(self) -> int:
        return self.image.header_bytes

    def complete(self, header: bytes | bytearray) -> memoryview:
        """The pack's bytes: its header added, its gaps zeroed."""
        image = self.image
        self.view[image.slot : image.slot + len(header)] = header
        for slot, nbytes in image.gaps:
            self.view[slot : slot + nbytes] = bytes(nbytes)
        return self.view[image.slot : image.slot + image.nbytes]


@dataclass(slots=True)
class Landed:
    """Whoever has loaded it, or cannot, releases it.

    plan, arena  what this process reads for itself, and where
    """

    manifest: Manifest
    stored_manifest: bytes
    candidate: Candidate
    tree: object
    plan: ReadPlan
    arena: Memory
    landing: Landing
    shared: SharedPart | None = None
    rejected: list[tuple[str, str]] = field(default_factory=list)
    bad_here: set[str] = field(default_factory=set)
    """Keys of packs that turned out damaged on the local tier."""

    def pieces(self) -> LandedPieces:
        """What has landed of each leaf."""
        own = landed_pieces(self.plan, self.arena.view)
        if self.shared is None:
            return own
        wanted = self.shared.wanted
        others = landed_pieces(self.shared.plan, self.shared.memory.view, lambda piece: (piece.pack, piece.start) in wanted)
        return {leaf: own.get(leaf, ()) + others.get(leaf, ()) for leaf in own.keys() | others.keys()}

    def images(self) -> dict[int, PackImage]:
        """Pack number → its image, of the packs that this process has read whole."""
        found = {number: PackImage(image, self.arena.view) for number, image in pack_images(self.plan, self.manifest).items()}
        if self.shared is not None:
            images = pack_images(self.shared.plan, self.manifest).items()
            found |= {number: PackImage(image, self.shared.memory.view) for number, image in images if number in self.shared.mine}
        return found

    def bytes_by_pack(self) -> dict[int, int]:
        """Pack number → how many bytes of it this process has read."""
        runs = list(self.plan.runs)
        if self.shared is not None:
            runs += [run for run in self.shared.plan.runs if run.pack in self.shared.mine]
        found: dict[int, int] = {}
        for run in runs:
            found[run.pack] = found.get(run.pack, 0) + run.nbytes
        return found

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        self.arena.release()
        if self.shared is not None:
            self.shared.memory.release()

    def __enter__(self) -> Landed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

"""States of several leaves for jobs of `runkit`: as dictionaries, changed a little at a time, and loaded by what reads a tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tests.engine.runkit import DrivenEnv, Job, Place
from tieredckpt.engine.arena import Arena
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.landing import Lander
from tieredckpt.engine.pack_check import Verify, check_pack, pieces_by_pack
from tieredckpt.engine.restorer import Fresh
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import InlineEnv
from tieredckpt.format.manifest import Manifest
from tieredckpt.model.ids import original_of
from tieredckpt.model.leaf import DTYPE_BYTES, Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.content import Content
from tieredckpt.plan.layout import SaveLayout, page_aligned
from tieredckpt.plan.reading import LandedPieces, landed_pieces, plan_reading
from tieredckpt.testing.store_checks.tools import noise


@dataclass(frozen=True, slots=True)
class Tensor:
    """`data`: row-major. `alias_of`: the name of a tensor before it that shares its memory."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    alias_of: str | None = None


State = Mapping[str, Tensor]
"""Path → tensor, in order."""


def tensor(dtype: str, *shape: int, seed: int = 0, random_bytes: bool = False) -> Tensor:
    nbytes = DTYPE_BYTES[dtype] * prod(shape)
    data = noise(nbytes, seed) if random_bytes else (b"%d " % seed * nbytes)[:nbytes]
    return Tensor(dtype, shape, data)


STATES: tuple[State, ...] = (
    {
        "w": tensor("uint8", 6000),
        "b": tensor("float32", 33, 40, seed=1, random_bytes=True),
        "empty": tensor("int16", 0, 5),
        "one": tensor("float64", seed=2),
        "half": tensor("bfloat16", 3, 5, 70, seed=3),
    },
)


def leaves_of(state: State) -> tuple[Leaf, ...]:
    at = {name: index for index, name in enumerate(state)}
    return tuple(
        Leaf(path=name, dtype=t.dtype, shape=t.shape, alias_of=-1 if t.alias_of is None else at[t.alias_of])
        for name, t in state.items()
    )


def mutate(state: State, change: int, seed: int) -> State:
    """A little different: mostly a few bytes, now and then leaves that come, go, and change their shape, dtype or name."""
    found = dict(state)
    owners = [name for name, t in found.items() if t.alias_of is None and t.data]
    name = owners[change % len(owners)]
    old = found[name]
    aliases = [alias for alias, t in found.items() if t.alias_of == name]
    match change // 4:
        case 10:
            found[f"new{seed}"] = tensor("uint8", 1 + seed % 3000, seed=seed, random_bytes=bool(seed % 2))
        case 11 if len(owners) > 2 and not aliases:
            del found[name]
        case 12 if not aliases:
            found[name] = replace(old, dtype="uint8", shape=(len(old.data),))
        case 13 if not aliases:
            found[name] = tensor(old.dtype, *(extent + 1 for extent in old.shape), seed=seed)
        case 14:
            found[f"shared{seed}"] = replace(old, alias_of=name)
        case 15 if not aliases:
            del found[name]
            found[f"moved{seed}"] = old
        case _:
            data = bytearray(old.data)
            data[change * 97 % len(data)] ^= 1 + seed % 255
            for one in (name, *aliases):
                found[one] = replace(found[one], data=bytes(data))
    return found


def view(data: memoryview | bytes | bytearray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements without a meaning: raw bytes of their size."""
    return np.frombuffer(data, dtype=f"V{DTYPE_BYTES[dtype]}").reshape(shape)


def stage(state: State, layout: SaveLayout, arena: Arena) -> None:
    tensors = list(state.values())
    for piece in layout.pieces:
        whole = tensors[piece.leaf]
        box = tuple(slice(start, stop) for start, stop in zip(piece.box.offset, piece.box.end, strict=True))
        raw = view(whole.data, whole.dtype, whole.shape)[box].tobytes()
        arena.view[piece.slot : piece.slot + page_aligned(piece.nbytes)] = raw.ljust(page_aligned(piece.nbytes), b"\0")


def assembled(manifest: Manifest, landed: LandedPieces) -> State:
    found: dict[str, Tensor] = {}
    for index, leaf in enumerate(manifest.leaves):
        source = leaf.alias_of if leaf.alias_of >= 0 else index
        whole = np.zeros(leaf.shape, dtype=f"V{DTYPE_BYTES[leaf.dtype]}")
        for piece in landed.get(source, ()):
            box = tuple(slice(start, stop) for start, stop in zip(piece.box.offset, piece.box.end, strict=True))
            whole[box] = view(piece.data, leaf.dtype, piece.box.shape)
        alias = manifest.leaves[leaf.alias_of].path if leaf.alias_of >= 0 else None
        found[leaf.path] = Tensor(leaf.dtype, leaf.shape, whole.tobytes(), alias)
    return found


def load(tier: OpenTier, manifest: Manifest, verify: Verify = "digest") -> State:
    """From this tier alone, by the reader of restores, after every byte of every pack was checked."""
    pieces = pieces_by_pack(manifest)
    for number, pack in enumerate(manifest.packs):
        data = memoryview(bytearray(pack.nbytes))
        tier.store.read_into(pack.key, 0, data)
        check_pack(pack, pieces[number], data)
    plan = plan_reading(manifest, range(len(manifest.leaves)))
    arena = memoryview(bytearray(plan.arena_bytes))
    local, remote = (None, tier) if tier.is_remote else (tier, None)
    pool = InlineEnv().executor("read", 1)
    Lander(manifest=manifest, local=local, remote=remote, verify=verify, remote_out_of_reach=False, pool=pool).land(plan, arena)
    return assembled(manifest, landed_pieces(plan, arena))


@dataclass(slots=True)
class ChainPlace(Place):
    """`states`: original of each snapshot → what was saved."""

    states: dict[str, State] = field(default_factory=dict)

    def job(self, *, out_of_reach: bool = False, **options: object) -> ChainJob:
        self.jobs += 1
        env = DrivenEnv(self.jobs)
        env.sleep(self.env.monotonic() - env.monotonic() + self.jobs)
        return ChainJob(self, f"job {self.jobs}", env, out_of_reach=out_of_reach, **options)


class ChainJob(Job):
    """Saves and restores states of several leaves; compares what it restores."""

    place: ChainPlace

    def save(self, step: int, state: State, metrics: Mapping[str, float] | None = None) -> SaveHandle:  # type: ignore[override]
        handle = self.run.begin_save(step, self.env.monotonic())
        leaves = leaves_of(state)
        layout = self.run.lay_out(leaves)
        arena = self.run.stage(layout)
        stage(state, layout, arena)
        self.place.states[handle.snapshot_id] = state
        tree = {name: LeafRef(index) for index, name in enumerate(state)}
        self.run.submit(
            handle, Content(tree, leaves), layout, arena,
            saved_at=self.env.wall_time(), metrics=dict(metrics or {}), tags=(),
        )  # fmt: skip
        return handle

    def restore(self, step: int | None = None, snapshot: str | None = None, *, rehydrate: bool = True) -> str | None:
        result = self.run.restore(Wanted(step=step, snapshot=snapshot), lambda manifest, _tree: range(len(manifest.leaves)))
        if isinstance(result, Fresh):
            self.landed = None
            return None
        self.landed = result
        found = assembled(result.manifest, result.pieces())
        assert found == self.place.states[original_of(result.candidate.snapshot)], result.candidate.snapshot
        self.run.refill(result, rehydrate=rehydrate)
        return result.candidate.snapshot

"""Two directories as the two tiers of a run, and ways to damage what lies in them behind the library's back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.engine import kit
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.run import Run
from tieredckpt.env import InlineEnv
from tieredckpt.format import keys
from tieredckpt.settings import PAGE_BYTES
from tieredckpt.store.local import LocalStore
from tieredckpt.testing.faults import FaultStore, Rule

Damage = Callable[[Path], None]


def flip(position: int) -> Damage:
    """One bit of one byte; a negative position counts from the end."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return damage


def flip_behind(marker: bytes) -> Damage:
    """The first byte behind `marker`."""
    return lambda path: flip(path.read_bytes().index(marker) + len(marker))(path)


def cut_to(nbytes: int) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(nbytes)

    return damage


def remove(path: Path) -> None:
    path.unlink()


@dataclass
class Places:
    """Two directories as the two tiers; every `run` is another process's view of them."""

    root: Path
    handles: list[SaveHandle] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    local_script: tuple[Rule, ...] = ()
    remote_script: tuple[Rule, ...] = ()

    @property
    def local(self) -> Path:
        return self.root / "local"

    @property
    def remote(self) -> Path:
        return self.root / "remote"

    def run(self, *, both: bool = True) -> Run:
        env = InlineEnv(len(self.runs) + 1000)
        local = FaultStore(LocalStore(self.local, env=env, create=True), self.local_script, env=env)
        remote = FaultStore(LocalStore(self.remote, env=env, create=True), self.remote_script, env=env) if both else None
        run = kit.start(local, remote, env)
        self.runs.append(run)
        return run

    def close(self) -> None:
        for run in self.runs:
            run.close()

    def save_two(self, *, both: bool = True) -> None:
        run = self.run(both=both)
        kit.restore(run)
        for step in (1, 2):
            self.handles.append(kit.save(run, step))
            self.handles[-1].local.result(0)
        if both:
            kit.send(run)
            assert self.handles[-1].remote.result(0) is not None

    def object_of(self, step: int, kind: str, tier: str = "local") -> Path:
        """The first pack, or the manifest, of what was saved at `step`."""
        snapshot = self.handles[step - 1].snapshot_id
        key = keys.pack_key(snapshot, 0, 0) if kind == "pack" else keys.manifest_key(snapshot)
        return self.root / tier / key

    def records(self, tier: str, kind: str) -> list[Path]:
        return [path for path in sorted((self.root / tier / "log").iterdir()) if f'"kind":"{kind}"'.encode() in path.read_bytes()]


def find_filler(places: Places, step: int) -> tuple[Path, int]:
    """A pack with two pieces in one run, and a byte between them."""
    for path in sorted((places.local / "data").rglob(f"{places.handles[step - 1].snapshot_id}.*")):
        data = path.read_bytes()
        for start in range(2 * PAGE_BYTES, len(data), PAGE_BYTES):
            if not any(data[start - 50 : start]):
                return path, start - 10
    raise AssertionError("no filler between two pieces")

"""Examining a directory: what it lies on, what it can do, how much room there is, and how fast the local tier would be there.

All trials are in one new directory of mode 0700, `.tieredckpt-doctor-<ULID>`, which is removed again and whose name is no key. A place
that does not exist yet is examined in its parent, where it would be made. What a killed doctor has left is removed by the next one:
whoever is at work holds an flock on its directory, so one that can be locked is nobody's. Whatever the disk refuses is a finding.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path

from tieredckpt.cli.examination import FEW, Examination, Level, abilities, seconds_of
from tieredckpt.cli.output import size
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, StoreError, UsageError
from tieredckpt.model.ids import is_ulid
from tieredckpt.settings import KIB, MIB
from tieredckpt.store.disk_trial import try_abilities
from tieredckpt.store.file_system import Kind
from tieredckpt.store.local import LocalStore
from tieredckpt.store.os_errors import errno_name, translate
from tieredckpt.testing.store_checks import Bench
from tieredckpt.testing.store_checks.tools import noise

_SCRATCH = ".tieredckpt-doctor-"
_PACK_BYTES = 64 * MIB
_PACKS, _QUICK_PACKS = 4, 1
_SYNC_ROUNDS = 20
_LITTLE_ROOM_BYTES = 1024 * MIB
_FEW_INODES = 10_000
_CHECKS_BYTES, _CHECKS_INODES = 16 * MIB, 200
"""Several times what one of the checks takes: each begins in an empty directory."""


def examine_directory(path: str, env: Env, *, quick: bool) -> Examination:
    """`quick`: less is written, and the conformance checks are left out. UsageError for what can be no directory."""
    where = Path(os.path.realpath(path))
    found = Examination(str(where), "directory")
    try:
        exists = where.exists()
        found.facts["exists"] = exists
        if exists:
            LocalStore(where, env=env).close()  # owner and mode: what opening a local tier there would say
            found.find(
                Level.GOOD, f"mode {where.stat().st_mode & 0o7777:04o}, owned by this user, and nobody else may write there"
            )
        elif not where.parent.is_dir():
            raise UsageError(f"neither {where} nor {where.parent} is there: name a directory, or one whose parent exists")
        with _scratch(found, where if exists else where.parent, env) as scratch:
            _look(found, scratch, env, quick=quick)
    except UsageError as error:
        if not os.path.isdir(where):
            raise
        found.find(Level.UNSAFE, str(error))
    except (StoreError, CapacityError) as error:
        found.find(Level.UNSAFE, str(error))
    except OSError as error:
        found.find(Level.UNSAFE, str(translate(error, "examining", str(error.filename or where))))
    return found


@contextmanager
def _scratch(found: Examination, parent: Path, env: Env) -> Iterator[Path]:
    try:
        _sweep(found, parent)
        scratch, lock = _make_locked(parent, env)
    except OSError as error:
        raise translate(error, "making a directory in", str(parent)) from error
    try:
        yield scratch
    finally:
        try:
            shutil.rmtree(scratch)
        except OSError as error:
            raise translate(error, "removing the scratch directory", str(scratch)) from error
        finally:
            os.close(lock)


def _make_locked(parent: Path, env: Env) -> tuple[Path, int]:
    """A new scratch directory and the descriptor that holds its lock; another name if a sweep was quicker than the lock."""
    while True:
        scratch = parent / f"{_SCRATCH}{env.new_ulid()}"
        scratch.mkdir(mode=0o700)
        try:
            lock = _try_lock(scratch)
        except OSError:  # no locks on this file system: the trials say so, and no sweep can lock it either
            lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if lock is not None:
            return scratch, lock


def _sweep(found: Examination, parent: Path) -> None:
    """Remove the scratch of doctors that were killed. What cannot be removed does no harm, and is said; another user's is theirs."""
    try:
        names = sorted(os.listdir(parent))
    except PermissionError:  # what is to be made in it needs no listing, as in a directory that is shared by users
        return
    for name in names:
        left = parent / name
        if not (name.startswith(_SCRATCH) and is_ulid(name.removeprefix(_SCRATCH))):
            continue
        try:
            if os.lstat(left).st_uid != os.geteuid():
                continue
            lock = _try_lock(left)
            if lock is None:
                continue
            try:
                shutil.rmtree(left)
            finally:
                os.close(lock)
        except FileNotFoundError:
            continue  # another doctor had it first
        except OSError as error:
            found.find(Level.MISSING, f"{left}, which an earlier doctor has left, stays: {errno_name(error)}; delete it by hand")


def _try_lock(path: Path) -> int | None:
    """A descriptor of this directory that holds its lock; None if somebody else does, or if it is gone. OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink > 0:
            return fd
    except BlockingIOError:
        pass  # its doctor is at work
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _look(found: Examination, scratch: Path, env: Env, *, quick: bool) -> None:
    store = LocalStore(scratch, env=env)
    try:
        _tell_file_system(found, store)
        _tell_room(found, store)
        (scratch / "trial").mkdir(mode=0o700)
        fd = os.open(scratch / "trial", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for ability in try_abilities(fd):
                missing = Level.UNSAFE if ability.needed else Level.MISSING
                found.find(missing if ability.problem else Level.GOOD, ": ".join(filter(None, (ability.name, ability.problem))))
        finally:
            os.close(fd)
        if found.safe:
            _measure(found, store, scratch, env, _QUICK_PACKS if quick else _PACKS)
            if not quick:
                _check(found, store, scratch, env)
    finally:
        store.close()


def _tell_file_system(found: Examination, store: LocalStore) -> None:
    below = store.file_system()
    found.facts |= {
        "file_system": below.type or None,
        "mount_point": below.mount_point or None,
        "file_system_kind": below.kind.value,
    }
    match below.kind:
        case Kind.VOLATILE:
            found.find(
                Level.DANGEROUS, f"{below.remark}. Good enough for a local tier only if what is lost with it is in the bucket"
            )
        case Kind.NETWORK:
            found.find(Level.MISSING, f"a disk of this machine: {below.remark}")
        case Kind.UNKNOWN:
            found.find(
                Level.MISSING,
                "the type of the file system is not known, because there is no /proc: make sure that it is on a disk",
            )
        case Kind.DISK:
            found.find(Level.GOOD, f"{below.type}, mounted at {below.mount_point}: a disk of this machine")


def _tell_room(found: Examination, store: LocalStore) -> None:
    nbytes, inodes = store.free_bytes(), store.free_inodes()
    found.facts |= {"free_bytes": nbytes, "free_inodes": inodes}
    little = nbytes < _LITTLE_ROOM_BYTES or (inodes is not None and inodes < _FEW_INODES)
    said = "as many files as fit" if inodes is None else f"{inodes} files"
    found.find(Level.DANGEROUS if little else Level.GOOD, f"room for {size(nbytes)} and {said}{': not much' if little else ''}")


def _measure(found: Examination, store: LocalStore, scratch: Path, env: Env, packs: int) -> None:
    """Packs as the local tier writes and reads them, one after the other: written direct where possible, synced, linked; read cold."""
    if store.free_bytes() < 2 * packs * _PACK_BYTES:
        found.find(Level.MISSING, f"the speed was not measured: there is no room for {size(2 * packs * _PACK_BYTES)}")
        return
    written, out = memoryview(mmap.mmap(-1, _PACK_BYTES)), memoryview(mmap.mmap(-1, _PACK_BYTES))
    written[:] = noise(_PACK_BYTES, "pack")
    write_s = sum(seconds_of(env, store.put, f"packs/{n}", [written]) for n in range(packs))
    for n in range(packs):
        _forget_cached(scratch / "packs" / str(n))
    read_s = sum(seconds_of(env, store.read_into, f"packs/{n}", 0, out) for n in range(packs))
    same = out == written
    if not same:
        found.find(Level.UNSAFE, "a pack is read back with other bytes than it was written with")
    syncs = [seconds_of(env, store.create, f"records/{n}", noise(KIB, n)) for n in range(_SYNC_ROUNDS)]
    amount, sync_ms = packs * _PACK_BYTES / MIB, 1000 * statistics.median(syncs)
    found.measured |= {
        "write_mib_s": round(amount / write_s),
        "read_mib_s": round(amount / read_s),
        "commit_1kib_ms": round(sync_ms, 2),
    }
    speeds = (
        f"{amount / write_s:.0f} MiB/s written and synced, {amount / read_s:.0f} MiB/s read, dropped from the page cache before"
    )
    found.find(Level.GOOD, f"speed: {speeds} ({packs} x {_PACK_BYTES // MIB} MiB, one after the other, once)")
    found.find(Level.GOOD, f"latency: {sync_ms:.2f} ms to make 1 KiB durable under a name ({_SYNC_ROUNDS} times, median)")


def _forget_cached(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _check(found: Examination, store: LocalStore, scratch: Path, env: Env) -> None:
    inodes = store.free_inodes()
    if store.free_bytes() < _CHECKS_BYTES or (inodes is not None and inodes < _CHECKS_INODES):
        what = f"{size(_CHECKS_BYTES)} and {_CHECKS_INODES} files"
        found.find(Level.MISSING, f"the conformance checks were not run: there is no room for {what}")
        return
    found.check(_benches(scratch, env))


def _benches(scratch: Path, env: Env) -> Callable[[], AbstractContextManager[Bench]]:
    """A new local tier for each check, in a directory of its own."""
    numbers = count()

    @contextmanager
    def make_bench() -> Iterator[Bench]:
        root = scratch / f"check-{next(numbers)}"
        store = LocalStore(root, env=env, create=True)

        def raw_get(key: str) -> bytes | None:
            return (root / key).read_bytes() if (root / key).is_file() else None

        def raw_set(key: str, data: bytes) -> None:
            (root / key).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (root / key).write_bytes(data)

        try:
            yield Bench(
                store=store, raw_get=raw_get, raw_set=raw_set, abilities=abilities(tells_conflicts=True), env=env, extent=FEW
            )
        finally:
            store.close()
            shutil.rmtree(root)

    return make_bench

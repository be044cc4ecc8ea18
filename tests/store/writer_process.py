"""A process that writes into a directory and is killed: in the middle of a put, or at any moment.

    writer_process.py dying KIND ROOT KEY   puts what is on its input, once in each way to die before the object has its name
    writer_process.py telling KIND ROOT     puts the objects of the JSON on its input (key → hex), prints each key once it is acknowledged

KIND is "local" for `LocalStore`, "fsspec" for `FsspecStore` on fsspec's own files.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from fsspec.implementations.local import LocalFileSystem

from tieredckpt.env import Env
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.fsspec_store import FsspecStore
from tieredckpt.store.local import LocalStore


def die(*_arguments: object, **_named: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(fd: int, buffers: list[memoryview], offset: int, _write=os.pwrite) -> None:
    _write(fd, buffers[0][: buffers[0].nbytes // 2], offset)
    die()


DEATHS = {
    "local": ((os, "pwritev", die_half_way), (os, "fsync", die), (os, "link", die)),
    "fsspec": ((LocalFileSystem, "mv", die),),
}
"""With half of the bytes written, with all of them unsynced, with all of them there and without a name."""


def open_store(kind: str, root: str) -> ObjectStore:
    if kind == "local":
        return LocalStore(root, env=Env())
    files = LocalFileSystem(skip_instance_cache=True, use_listings_cache=False)
    return FsspecStore.over(files, root, settings=Settings(), env=Env())


def dying(kind: str, root: str, key: str, data: bytes) -> None:
    for owner, call, death in DEATHS[kind]:
        child = os.fork()
        if child == 0:
            store = open_store(kind, root)
            setattr(owner, call, death)
            store.put(key, [data])
            os._exit(1)  # it has not died: the kill came too late
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"the writer that was to die in {call} ended with status {status}")


def telling(kind: str, root: str, objects: dict[str, str]) -> None:
    store = open_store(kind, root)
    for key, data in objects.items():
        store.put(key, [bytes.fromhex(data)])
        print(key, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    mode, kind, root, *key = sys.argv[1:]
    if mode == "dying":
        dying(kind, root, *key, sys.stdin.buffer.read())
    else:
        telling(kind, root, json.loads(sys.stdin.readline()))

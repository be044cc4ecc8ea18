"""A trainer with an external uploader, and an uploader that dies, in processes of their own: `python -m tests.faults.external_run`.

train LOCAL REMOTE STEP…         saves these steps, tells when they are local, and sleeps until it is killed
die LOCAL REMOTE PACKS           uploads, and kills itself right before it sends a pack, after so many
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from tests.faults import numbered_run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.uploading import Uploading
from tieredckpt.env import Env
from tieredckpt.format import keys
from tieredckpt.settings import KIB
from tieredckpt.store.base import Buffer
from tieredckpt.store.url import open_store

SETTINGS = replace(numbered_run.SETTINGS, pack_bytes=4 * KIB, piece_bytes=4 * KIB)
"""Many packs, so that there is a middle of an upload."""


def train(local: str, remote: str, steps: Sequence[int]) -> None:
    numbered_run.SETTINGS = SETTINGS
    options = RunOptions(retention=numbered_run.RETENTION, settings=SETTINGS, uploader="external")
    run = numbered_run.open_run(local, remote, options)
    print("resumed", numbered_run.restore(run), flush=True)
    for step in steps:
        numbered_run.save(run, step)
    run.wait("local")
    print("local", flush=True)
    signal.pause()


def die(local: str, remote: str, packs: int) -> None:
    env = Env()
    store = open_store(remote, None, settings=SETTINGS, env=env)
    put, left = store.put, [packs]

    def put_or_die(key: str, parts: Sequence[Buffer]) -> None:
        if key.startswith(keys.DATA_PREFIX):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        put(key, parts)

    store.put = put_or_die  # type: ignore[method-assign]
    Uploading(
        lambda: open_store(local, None, settings=SETTINGS, env=env, create=False),
        store,
        policy="all",
        env=env,
        settings=replace(SETTINGS, upload_threads=1),
        allow_unfenced=False,
        tell=lambda _event: None,
        stopped=lambda: False,
    ).run()


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2], sys.argv[3], [int(step) for step in sys.argv[4:]])
    else:
        die(sys.argv[2], sys.argv[3], int(sys.argv[4]))

"""One rank: meets the others, calls its function, says what came of it. Started by `kit`, never by hand."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from tests.ranks.limits import START_S


def main(function: str, timeout_s: float, folder: Path) -> int:
    """0 if the function returned, 1 if it raised. A process that hangs prints its stacks and ends."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(START_S, exit=True)
    import torch  # after the limit is set
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=START_S + timeout_s))
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    args = json.loads((folder / "args.json").read_text())
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    value, error = None, ""
    try:
        value = json.loads(json.dumps(call(rank, ranks, **args)))
    except BaseException as caught:
        traceback.print_exc()
        error = f"{type(caught).__name__}: {caught}"
    new = folder / f"{rank}.new"
    new.write_text(json.dumps({"value": value, "error": error}))
    new.rename(folder / f"{rank}.json")
    return 1 if error else 0


if __name__ == "__main__":
    code = main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no goodbye: it would wait for ranks that have died

"""Becomes another program, which the kernel kills when whoever started it is gone: `python tied.py PARENT_PID COMMAND…`.

The failure it exists for: a test run that is killed, and servers that hold ports, memory and disk for days because nobody was left to
stop them. `finally` and `atexit` do not run then; the kernel's parent-death signal does not need them (Linux only). It stays with the
process across `exec`, so that the pid is the server's own, and it is not sent for a parent that has died before it was asked for:
hence the comparison. The *thread* that starts a server counts as its parent, see `localstack.process.running`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == int(parent):
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

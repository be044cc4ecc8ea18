"""Reading a byte range of a local file into the caller's memory, by where the bytes are.

A warm file is several times faster through the page cache than around it; a cold one is faster and steadier around it. So the
page cache is asked first, with a read that refuses to wait for the disk; what it does not have is read direct where address,
offset and length allow, and through the page cache otherwise.
"""

from __future__ import annotations

import fcntl
import os

from tieredckpt.settings import PAGE_BYTES
from tieredckpt.store.durable import DIRECT_MIN_BYTES, NO_DIRECT, address_of


def read_range(fd: int, offset: int, out: memoryview) -> int:
    """Fill `out` (bytes, writable) from `offset`; returns how much was there. OSError. May leave O_DIRECT set on `fd`."""
    done = _read_resident(fd, offset, out)
    if out.nbytes - done >= DIRECT_MIN_BYTES:
        done = _read_direct(fd, offset, out, done)
    return _read_cached(fd, offset, out, done)


def _read_resident(fd: int, offset: int, out: memoryview) -> int:
    done = 0
    while done < out.nbytes:
        try:
            count = os.preadv(fd, [out[done:]], offset + done, os.RWF_NOWAIT)
        except BlockingIOError:  # the next page is on the disk
            break
        except OSError as error:
            if error.errno in NO_DIRECT:  # this file system cannot tell
                break
            raise
        if count == 0:
            break
        done += count
    return done


def _read_direct(fd: int, offset: int, out: memoryview, done: int) -> int:
    done = max(0, (offset + done) // PAGE_BYTES * PAGE_BYTES - offset)  # a short resident read may end inside a page
    if (offset + done) % PAGE_BYTES or address_of(out[done:]) % PAGE_BYTES:
        return done
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        whole = out.nbytes // PAGE_BYTES * PAGE_BYTES
        while done < whole:
            count = os.preadv(fd, [out[done:whole]], offset + done)
            done += count
            if count == 0 or count % PAGE_BYTES:  # the end of the file
                break
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return done


def _read_cached(fd: int, offset: int, out: memoryview, done: int) -> int:
    while done < out.nbytes:
        count = os.preadv(fd, [out[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done

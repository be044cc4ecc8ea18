"""Packs to and from an S3 endpoint through obstore and through boto3, side by side: seconds, and CPU-seconds of this process per GiB.

    python -m benchmarks.s3_clients                                    (a sink on the loopback address: the cost of the client alone)
    python -m benchmarks.s3_clients --url 's3://bucket/scratch?endpoint_url=…'       (a real store; what is written is deleted)

Rounds are interleaved and medians are taken; ratios within one run are what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from statistics import median
from typing import Literal

import numpy as np

from tieredckpt.env import Env
from tieredckpt.settings import MIB, Settings
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import parse_url

Client = Literal["obstore", "boto3"]
CLIENTS: tuple[Client, ...] = ("obstore", "boto3")
_HEADER = b"h" * 4096
_BLOCK = 1 << 18


class WrongBytesError(Exception):
    """What was read is not what was written."""


@dataclass(frozen=True, slots=True)
class Cost:
    seconds: float
    cpu_s: float


@dataclass(slots=True)
class Costs:
    """Of every round, by client."""

    puts: dict[str, list[Cost]] = field(default_factory=lambda: {name: [] for name in CLIENTS})
    gets: dict[str, list[Cost]] = field(default_factory=lambda: {name: [] for name in CLIENTS})


class _Sink(BaseHTTPRequestHandler):
    """Throws bodies away, and answers every range with the bytes that `content` gives for it."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        left = int(self.headers["Content-Length"])
        block = memoryview(bytearray(_BLOCK))
        while left:
            left -= self.rfile.readinto(block[: min(left, _BLOCK)])
        self._answer(200, b"")

    def do_GET(self) -> None:
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        begin, end = int(first), int(last) + 1
        self._answer(206, content(begin, end), {"Content-Range": f"bytes {begin}-{end - 1}/{end}"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"<DeleteResult/>")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        fields = {"ETag": '"sink"', "Last-Modified": "Tue, 15 Nov 1994 12:45:26 GMT", "Content-Length": str(len(body))}
        for name, value in {**fields, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def content(begin: int, end: int) -> bytes:
    """A pack's bytes, which the sink knows without keeping them: after the header, those of one block again and again."""
    block = np.arange(_BLOCK, dtype=np.uint32).view(np.uint8)[:_BLOCK].tobytes()
    start = begin - len(_HEADER)
    copies = (end - begin) // _BLOCK + 2
    shift = start % _BLOCK
    return (block * copies)[shift : shift + end - begin]


def _serve(tell: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    tell.send(server.server_port)
    server.serve_forever()


@contextlib.contextmanager
def sink() -> Iterator[str]:
    """The URL of a bucket that keeps nothing, in another process, so that its CPU is not counted."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"s3://sink/packs?endpoint_url=http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def measured(packs: int, threads: int, act: Callable[[str, memoryview], None], memory: Sequence[memoryview]) -> Cost:
    """`act` on every pack, by so many threads, each with memory of its own."""

    def work(thread: int) -> None:
        for number in range(thread, packs, threads):
            act(f"data/{number:04d}", memory[thread])

    before, began = _cpu_s(), time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return Cost(time.perf_counter() - began, _cpu_s() - before)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(url: str, packs: int, pack_bytes: int, threads: int, rounds: int) -> Costs:
    """WrongBytesError if a pack is not read back as it was written."""
    costs = Costs()
    memory = [memoryview(mmap.mmap(-1, pack_bytes)) for _ in range(threads)]
    expected = content(len(_HEADER), len(_HEADER) + pack_bytes)
    credentials = {"key": "bench", "secret": "bench"} if "s3://sink/" in url else None
    for _ in range(rounds):
        for client in CLIENTS:
            store = S3Store.open(parse_url(url), credentials, settings=Settings(), env=Env(), bulk=client)
            with contextlib.closing(store):
                for view in memory:
                    view[:] = expected
                put = measured(packs, threads, lambda key, data: store.put(key, [_HEADER, data]), memory)  # noqa: B023
                for view in memory:
                    np.frombuffer(view, np.uint8).fill(0)
                get = measured(packs, threads, lambda key, data: store.read_into(key, len(_HEADER), data), memory)  # noqa: B023
                if any(view != expected for view in memory):
                    raise WrongBytesError(f"{client} read other bytes than were written")
                if store.remarks():
                    raise WrongBytesError(f"{client} did not do it all by itself: {'; '.join(store.remarks())}")
                store.delete([f"data/{number:04d}" for number in range(packs)])
            costs.puts[client].append(put)
            costs.gets[client].append(get)
    return costs


def report(costs: Costs, nbytes: int) -> str:
    lines = [f"{'':12}{'seconds':>10}{'MB/s':>10}{'CPU-s/GiB':>12}   medians of {len(costs.puts['boto3'])} rounds"]
    for what, rounds in (("put", costs.puts), ("get", costs.gets)):
        for client in CLIENTS:
            seconds, cpu_s = _medians(rounds[client])
            lines.append(f"{what} {client:8}{seconds:10.2f}{nbytes / 1e6 / seconds:10.0f}{cpu_s / nbytes * 2**30:12.2f}")
        (fast, fast_cpu), (slow, slow_cpu) = (_medians(rounds[client]) for client in CLIENTS)
        lines.append(f"    obstore/boto3: {fast / slow:.2f} of the time, {fast_cpu / slow_cpu:.2f} of the CPU")
    return "\n".join(lines)


def _medians(rounds: Sequence[Cost]) -> tuple[float, float]:
    return median(cost.seconds for cost in rounds), median(cost.cpu_s for cost in rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3_clients", description="obstore and boto3 side by side.")
    parser.add_argument("--url", help="where to put packs (default: a sink on the loopback address)")
    parser.add_argument("--packs", type=int, default=16)
    parser.add_argument("--pack-mib", type=int, default=64)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON, with the values of every round")
    parsed = parser.parse_args(arguments)
    nbytes = parsed.packs * parsed.pack_mib * MIB
    with contextlib.ExitStack() as held:
        url = parsed.url or held.enter_context(sink())
        costs = measure(url, parsed.packs, parsed.pack_mib * MIB, parsed.threads, parsed.rounds)
    if parsed.json:
        rounds = {"put": costs.puts, "get": costs.gets}
        values = {what: {name: [[c.seconds, c.cpu_s] for c in found[name]] for name in CLIENTS} for what, found in rounds.items()}
        print(json.dumps({"bytes": nbytes, "seconds_and_cpu_s": values}, indent=1))
    else:
        print(report(costs, nbytes))
    return 0


if __name__ == "__main__":
    sys.exit(main())

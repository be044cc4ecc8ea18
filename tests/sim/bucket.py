"""The simulated bucket: one map of objects, what is still on its way there, and who is cut off.

Between the connections of the processes and `objects`. A request that has left belongs to nobody any more: it may arrive after its
client has given up, and after its process has died; the `weather` says when, and a conditional put is judged then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from tests.sim.answers import Answer, Request
from tests.sim.connection import Connection
from tests.sim.kernel import Kernel, Process
from tests.sim.objects import Objects
from tests.sim.weather import Kind, Weather
from tieredckpt.store.base import ObjectStore


@dataclass(frozen=True, slots=True)
class OnItsWay:
    """A request that changes something and has not arrived. `process`: whose death sets it adrift; None: nobody waits for it."""

    request: Request
    arrive: Callable[[], object]
    process: Process | None


class Bucket:
    """See the module's docstring.

    deadline_s  how long its clients wait for an answer
    outage_s    and for a connection
    page_keys   most keys in one page of a list
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.weather = Weather.calm()
        self.objects = Objects()
        self.deadline_s = 60.0
        self.outage_s = 10.0
        self.page_keys = 1000
        self.requests = 0
        self._cut_off: set[str | None] = set()
        self._late: list[tuple[int, int, OnItsWay]] = []
        self._leaving: dict[int, OnItsWay] = {}
        self._numbers = count(1)

    @property
    def store(self) -> ObjectStore:
        """The objects themselves: no faults, no giving way."""
        return self.objects

    def connect(self, process: Process) -> Connection:
        """How `process` reaches the bucket."""
        return Connection(self, process)

    def outage(self, node: str | None, on: bool) -> None:
        """Nothing passes between this node and the bucket, or nothing of anybody's."""
        if on:
            self._cut_off.add(node)
        else:
            self._cut_off.discard(node)

    def is_out(self, process: Process) -> bool:
        return bool(self._cut_off) and not self._cut_off.isdisjoint((None, process.node))

    def land_late(self) -> int:
        """Everything that is still on its way, and that no living process waits for, arrives now; returns how much that was."""
        self._set_adrift()
        landed = len(self._late)
        while self._late:
            self._land(heapq.heappop(self._late)[2])
        return landed

    # ---------------------------------------------------------------------------------------- requests on their way

    def leave(self, request: Request, arrive: Callable[[], object], process: Process) -> int:
        """It is on its way, until `arrived` says that its process goes on with it. Returns its number."""
        number = next(self._numbers)
        self._leaving[number] = OnItsWay(request, arrive, process)
        return number

    def arrived(self, number: int) -> None:
        del self._leaving[number]

    def send_late(self, request: Request, arrive: Callable[[], object], delay: int) -> None:
        """It arrives before the request that comes `delay` requests after now."""
        heapq.heappush(self._late, (self.requests + delay, next(self._numbers), OnItsWay(request, arrive, None)))

    def let_arrive(self) -> None:
        """A request is sent: what is due arrives before it."""
        self.requests += 1
        if self._leaving:
            self._set_adrift()
        while self._late and self._late[0][0] <= self.requests:
            self._land(heapq.heappop(self._late)[2])

    def somebody_creates(self, key: str) -> bool:
        """Is a create of that key on its way?"""
        waiting = [*self._leaving.values(), *(sent for _, _, sent in self._late)]
        return any(sent.request.method == "create" and sent.request.key == key for sent in waiting)

    def _set_adrift(self) -> None:
        for number, sent in list(self._leaving.items()):
            if sent.process is None or not sent.process.dead:
                continue
            del self._leaving[number]
            delay = self.weather.fate_of_adrift()
            self.weather.note(Kind.ADRIFT)
            if delay is not None:
                self.send_late(sent.request, sent.arrive, delay)

    def _land(self, sent: OnItsWay) -> None:
        self.kernel.event(f"bucket: {sent.request} arrives late: {Answer(sent.arrive())}")

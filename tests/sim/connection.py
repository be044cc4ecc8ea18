"""How one process reaches the simulated bucket: the way there and back, on which answers are lost and requests are late.

Between the engine and `bucket`. A request leaves (the process gives way), arrives (the objects change, in one step), and its answer
comes back (the process gives way again); what may happen in between is the `weather`'s, and the whole node can be cut off. A
connection of a dead process touches nothing.

Errors are those of `S3Store` (`answers`). As there, `delete` raises nothing but names each key that it could not delete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from tests.sim import answers
from tests.sim.answers import Answer, Page, Request
from tests.sim.kernel import Process
from tests.sim.weather import Fault, Kind
from tieredckpt.errors import StoreError, TieredCheckpointError
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, check_key, check_prefix

if TYPE_CHECKING:
    from tests.sim.bucket import Bucket

T = TypeVar("T")

BATCH_KEYS = 1000


class Connection:
    """An `ObjectStore`, as one process sees it."""

    def __init__(self, bucket: Bucket, process: Process) -> None:
        self._bucket = bucket
        self._kernel = bucket.kernel
        self._objects = bucket.objects
        self._process = process

    @property
    def label(self) -> str:
        return self._objects.label

    def place(self) -> tuple[str, ...]:
        """Asked by `store.base.place_of`."""
        return ("s3", answers.ENDPOINT, "bucket", "run/")

    def stat(self, key: str) -> ObjectStat | None:
        return self._read(Request("stat", check_key(key)), lambda: self._objects.stat(key))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        def cut(share: float) -> int:
            return int(share * len(self._objects.get(key, max_bytes=max_bytes)))

        return self._read(Request("get", check_key(key)), lambda: self._objects.get(key, max_bytes=max_bytes), cut)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")

        def cut(share: float) -> int:
            data = self._objects.read(key, offset, view.nbytes)
            done = int(share * view.nbytes)
            view[:done] = data[:done]
            return done

        self._read(Request("read_into", check_key(key)), lambda: self._objects.read_into(key, offset, view), cut)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        return self._pages(Request("list", check_prefix(prefix)), after)

    def create(self, key: str, data: Buffer) -> Created:
        held = bytes(data)
        return self._change(Request("create", check_key(key)), lambda: self._objects.create(key, held))

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        held = b"".join(parts)
        self._change(Request("put", check_key(key)), lambda: self._objects.put(key, (held,)))

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        for key in keys:
            check_key(key)
        failures: list[DeleteFailure] = []
        for start in range(0, len(keys), BATCH_KEYS):
            failures += self._delete_batch(tuple(keys[start : start + BATCH_KEYS]))
        return failures

    def settle(self, keys: Sequence[str]) -> None:
        """Visible means durable here."""

    def close(self) -> None:
        """The bucket outlives its clients."""

    # ---------------------------------------------------------------------------------------- looking

    def _pages(self, request: Request, after: str) -> Iterator[ObjectStat]:
        more = True
        while more:
            fault = self._begin(request)
            if fault is not None and fault.kind in (Kind.CUT, Kind.SHORT_PAGE):
                answer = Answer(self._short_page(request, after, fault))
            else:
                answer = self._look(request, fault, lambda after=after: self._page(request, after))
            page = self._hear(request, answer)
            yield from page.found
            if page.error is not None:
                raise page.error
            more = page.more
            after = page.found[-1].key if page.found else after

    def _page(self, request: Request, after: str) -> Page:
        most = self._bucket.page_keys
        found = self._objects.page(request.key, after, most)
        return Page(found, len(found) == most)

    def _short_page(self, request: Request, after: str, fault: Fault) -> Page:
        """The beginning of a page; a page of one key is not short, and cannot break off in the middle."""
        page = self._page(request, after)
        if len(page.found) < 2:
            return page
        self._note(fault)
        error = answers.reset(request) if fault.kind is Kind.CUT else None
        return Page(page.found[: 1 + int(fault.how * (len(page.found) - 1))], True, error)

    def _read(self, request: Request, look: Callable[[], T], cut: Callable[[float], int] | None = None) -> T:
        fault = self._begin(request)
        return self._hear(request, self._look(request, fault, look, cut))

    def _begin(self, request: Request) -> Fault | None:
        """A request that only looks is sent, and arrives."""
        fault = self._draw(request)
        self._pause()
        self._fail_if_out(request)
        return fault

    def _look(
        self, request: Request, fault: Fault | None, look: Callable[[], T], cut: Callable[[float], int] | None = None
    ) -> Answer[T]:
        """`cut`: read only that share of it; returns how many bytes that is."""
        try:
            return Answer(look() if fault is None else self._look_badly(request, fault, look, cut))
        except TieredCheckpointError as error:
            return Answer(error=error)

    def _look_badly(self, request: Request, fault: Fault, look: Callable[[], T], cut: Callable[[float], int] | None) -> T:
        self._note(fault)
        match fault.kind:
            case Kind.STALL:
                self._stall(fault)
                if fault.how < 0.5:
                    return look()
                raise answers.timed_out(request)
            case Kind.CUT if cut is not None:
                raise answers.cut_off(request, cut(fault.how))
            case Kind.LOST_ANSWER:
                raise self._silence(request, fault)
            case Kind.FORBIDDEN:
                raise answers.forbidden(request)
            case _:
                raise answers.busy(request, fault.how)

    # ---------------------------------------------------------------------------------------- changing

    def _delete_batch(self, batch: tuple[str, ...]) -> Sequence[DeleteFailure]:
        request = Request("delete", batch[0], len(batch) - 1)
        try:
            return self._change(request, lambda: self._objects.delete(batch), batch)
        except StoreError as error:
            return [DeleteFailure(key, error) for key in batch]

    def _change(self, request: Request, apply: Callable[[], T], batch: Sequence[str] = ()) -> T:
        fault = self._draw(request)
        number = self._bucket.leave(request, apply, self._process)
        self._pause()
        if fault is not None and fault.kind is Kind.STALL and fault.how < 0.25:
            self._stall(fault)
        self._bucket.arrived(number)
        self._fail_if_out(request)
        if fault is not None and fault.kind is Kind.REFUSED_FOR_NOTHING and not self._can_be_refused_for_nothing(request.key):
            fault = None
        if fault is None:
            return self._hear(request, Answer(apply()))
        self._note(fault)
        try:
            answer = Answer(self._change_badly(request, fault, apply, batch))
        except StoreError as error:
            answer = Answer(error=error)
        return self._hear(request, answer)

    def _change_badly(self, request: Request, fault: Fault, apply: Callable[[], T], batch: Sequence[str]) -> T:
        match fault.kind:
            case Kind.LOST_ANSWER:
                apply()
                raise self._silence(request, fault)
            case Kind.LATE:
                self._bucket.send_late(request, apply, fault.delay)
                raise self._silence(request, fault)
            case Kind.TWICE if request.method == "create":
                apply()
                self._pause()
                return apply()
            case Kind.TWICE:
                self._bucket.send_late(request, apply, fault.delay)
                return apply()
            case Kind.BUSY_AFTER:
                apply()
                raise answers.busy(request, fault.how)
            case Kind.STALL:
                return self._change_and_stall(request, fault, apply)
            case Kind.REFUSED_FOR_NOTHING:
                return Created.EXISTS
            case Kind.UNDECIDED:
                raise answers.undecided(request)
            case Kind.PARTIAL:
                return self._delete_some(batch, fault)
            case Kind.FORBIDDEN:
                raise answers.forbidden(request)
            case _:
                raise answers.busy(request, fault.how)

    def _change_and_stall(self, request: Request, fault: Fault, apply: Callable[[], T]) -> T:
        """Done behind the silence or before it, or not at all; heard of in the end, or not."""
        if fault.how < 0.25:  # it has stalled on its way
            return apply()
        done = apply() if fault.how < 0.75 else None
        self._stall(fault)
        if fault.how < 0.5:
            return done
        raise answers.timed_out(request)

    def _delete_some(self, batch: Sequence[str], fault: Fault) -> Sequence[DeleteFailure]:
        failed = set(self._bucket.weather.some_of(batch, fault.how))
        self._objects.delete([key for key in batch if key not in failed])
        return [answers.not_deleted(key) for key in batch if key in failed]

    def _can_be_refused_for_nothing(self, key: str) -> bool:
        """Only where another create of the key is on its way, which may be told that it has won before it can be seen."""
        return key not in self._objects.data and self._bucket.somebody_creates(key)

    # ---------------------------------------------------------------------------------------- on the way

    def _draw(self, request: Request) -> Fault | None:
        """A living process sends a request; what is due arrives before it."""
        self._process.check()
        self._bucket.let_arrive()
        self._fail_if_out(request)
        return self._bucket.weather.draw(request.method)

    def _hear(self, request: Request, answer: Answer[T]) -> T:
        """The answer comes back."""
        self._kernel.event(f"bucket: {request}: {answer}")
        self._pause()
        self._fail_if_out(request)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _fail_if_out(self, request: Request) -> None:
        if self._bucket.is_out(self._process):
            self._kernel.event(f"bucket: {request}: out of reach")
            self._sleep(self._bucket.outage_s)
            raise answers.unreachable(request)

    def _pause(self) -> None:
        self._kernel.give_way()
        self._process.check()

    def _sleep(self, seconds: float) -> None:
        self._kernel.sleep(seconds)
        self._process.check()

    def _stall(self, fault: Fault) -> None:
        self._sleep(self._bucket.deadline_s * (1.1 + 2 * fault.when))

    def _silence(self, request: Request, fault: Fault) -> StoreError:
        """The connection is reset at once, or nothing comes until the client gives up."""
        if fault.when < 0.5:
            return answers.reset(request)
        self._sleep(self._bucket.deadline_s)
        return answers.timed_out(request)

    def _note(self, fault: Fault) -> None:
        self._bucket.weather.note(fault.kind)

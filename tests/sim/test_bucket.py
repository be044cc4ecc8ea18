"""The simulated bucket: every kind of fault happens, does what it says, and breaks nothing that S3 promises.

C24, C25, C26, C33, C42, C48, C67, C72, C73.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.sim import answers, bench
from tests.sim.answers import Request
from tests.sim.bench import told
from tests.sim.bucket import Bucket
from tests.sim.kernel import Kernel, Killed, Process
from tests.sim.weather import Kind, Weather
from tests.store.scripted_server import NO_ANSWER, error, scripted
from tieredckpt.errors import NotFoundError, StoreError
from tieredckpt.store.base import Created, ObjectStat, ObjectStore
from tieredckpt.testing.store_checks import Abilities, Hooks, Missing
from tieredckpt.testing.store_suite import StoreSuite

KEY = "log/00000000000000000001.json"


def only(kind: Kind, seed: int = 1, share: float = 1.0) -> Weather:
    return Weather(random.Random(seed), {kind: share})


@pytest.fixture
def kernel() -> Kernel:
    return Kernel(1)


@pytest.fixture
def bucket(kernel: Kernel) -> Bucket:
    return Bucket(kernel)


@pytest.fixture
def process(kernel: Kernel) -> Process:
    return bench.process(kernel)


@pytest.fixture
def store(bucket: Bucket, process: Process) -> ObjectStore:
    return bucket.connect(process)


def quietly(bucket: Bucket, requests: int) -> None:
    """Somebody else's requests, in calm weather."""
    bucket.weather = Weather.calm()
    bystander = bucket.connect(bench.process(bucket.kernel, "bystander", "elsewhere"))
    for _ in range(requests):
        bystander.stat("data/nothing")


# ------------------------------------------------------------------------------------------ the contract


class TestCalmBucket(StoreSuite):
    """In calm weather it is a bucket like any other; under one kind of fault it fails as one does."""

    abilities = Abilities(
        one_winner=True,
        tells_conflicts=Missing("a plain PUT replaces what is there; keys are unique to their bytes"),
        pages=True,
        huge_objects=Missing("an object is in memory, all of it", "it would take the memory"),
        interrupted_puts=Missing(
            "a request that has left its writer arrives whole or not at all", "there is no half of it to be seen"
        ),
        partial_deletes=Missing("which keys are not deleted is drawn", "no single key can be chosen"),
        cut_reads=True,
        refusals=True,
        outages=True,
        survives_kill=Missing("it lives in this process", "the process that would be killed is the one that checks"),
    )

    @pytest.fixture
    def store(self, bucket: Bucket, process: Process) -> ObjectStore:
        self.bucket = bucket
        return bucket.connect(process)

    def raw_get(self, store, key):
        return self.bucket.objects.data.get(key)

    def raw_set(self, store, key, data):
        self.bucket.store.put(key, [data])

    def hooks(self, store):
        return Hooks(
            paged=self.paged,
            cutting_reads=lambda _after: self.under(Kind.CUT),
            refusing=lambda _key: self.under(Kind.FORBIDDEN),
            failing=lambda: self.under(Kind.BUSY),
        )

    @contextlib.contextmanager
    def paged(self, page_keys: int) -> Iterator[ObjectStore]:
        self.bucket.page_keys = page_keys
        yield self.bucket.connect(bench.process(self.bucket.kernel, "paged"))

    @contextlib.contextmanager
    def under(self, kind: Kind) -> Iterator[ObjectStore]:
        """Another way to the same objects."""
        other = Bucket(self.bucket.kernel)
        other.objects, other.weather = self.bucket.objects, only(kind)
        yield other.connect(bench.process(other.kernel, "under fault"))


# ------------------------------------------------------------------------------------------ each kind


def test_c24_c25_a_lost_answer_is_of_a_request_that_was_applied(bucket: Bucket, store: ObjectStore) -> None:
    bucket.weather = only(Kind.LOST_ANSWER)
    for request in (lambda: store.create(KEY, b"record"), lambda: store.put("data/a", [b"pa", b"ck"])):
        answer = told(request)
        assert isinstance(answer, StoreError)
        assert answer.retryable
    assert bucket.objects.data == {KEY: b"record", "data/a": b"pack"}
    assert [failure.error.retryable for failure in store.delete([KEY, "data/a"])] == [True, True]
    assert bucket.objects.data == {}
    assert bucket.weather.counts == {Kind.LOST_ANSWER: 3}


@pytest.mark.parametrize("seed", range(8))
def test_c25_a_late_create_is_judged_when_it_arrives(bucket: Bucket, store: ObjectStore, seed: int) -> None:
    bucket.weather = only(Kind.LATE, seed)
    assert told(lambda: store.create(KEY, b"late")).retryable
    assert bucket.objects.data == {}, "not applied while its client waits"
    if overtaken := seed % 2 == 0:
        assert bucket.store.create(KEY, b"somebody else's") is Created.CREATED
    quietly(bucket, 401)
    assert bucket.objects.data == {KEY: b"somebody else's" if overtaken else b"late"}


def test_c67_a_late_request_outlives_its_process(kernel: Kernel, bucket: Bucket, process: Process, store: ObjectStore) -> None:
    bucket.weather = only(Kind.LATE)
    assert told(lambda: store.put("data/a", [b"pack"])).retryable
    kernel.kill(process)
    assert bucket.store.stat("data/a") is None
    assert bucket.land_late() == 1
    assert bucket.store.get("data/a", max_bytes=9) == b"pack"
    assert bucket.land_late() == 0


def test_c24_a_create_that_is_repeated_is_told_that_its_own_object_exists(bucket: Bucket, store: ObjectStore) -> None:
    bucket.weather = only(Kind.TWICE)
    assert store.create(KEY, b"record") is Created.EXISTS
    assert bucket.objects.data == {KEY: b"record"}


def test_a_put_that_is_repeated_may_bring_back_what_was_deleted(bucket: Bucket, store: ObjectStore) -> None:
    bucket.weather = only(Kind.TWICE)
    store.put("data/a", [b"pack"])
    bucket.weather = Weather.calm()
    assert store.delete(["data/a"]) == []
    bucket.land_late()
    assert bucket.objects.data == {"data/a": b"pack"}
    assert bucket.objects.overwritten == []


def test_i2_a_put_of_other_bytes_is_noticed(bucket: Bucket, store: ObjectStore) -> None:
    store.put("data/a", [b"pack"])
    store.put("data/a", [b"pack"])
    assert bucket.objects.overwritten == []
    store.put("data/a", [b"other"])
    assert [(found.key, found.before, found.after) for found in bucket.objects.overwritten] == [("data/a", b"pack", b"other")]


@pytest.mark.parametrize(
    ("kind", "text"), [(Kind.UNDECIDED, "HTTP 409 ConditionalRequestConflict while creating"), (Kind.BUSY, "HTTP ")]
)
def test_c26_c48_what_was_not_decided_was_not_applied(bucket: Bucket, store: ObjectStore, kind: Kind, text: str) -> None:
    bucket.weather = only(kind)
    answer = told(lambda: store.create(KEY, b"record"))
    assert isinstance(answer, StoreError)
    assert answer.retryable
    assert text in str(answer)
    quietly(bucket, 500)
    assert bucket.objects.data == {}


def test_c48_a_busy_server_may_have_applied_it(bucket: Bucket, store: ObjectStore) -> None:
    bucket.weather = only(Kind.BUSY_AFTER)
    assert told(lambda: store.create(KEY, b"record")).retryable
    assert bucket.objects.data == {KEY: b"record"}


def test_c73_what_is_forbidden_is_refused_for_good(bucket: Bucket, store: ObjectStore) -> None:
    bucket.store.put("data/a", [b"pack"])
    bucket.weather = only(Kind.FORBIDDEN)
    requests = [
        lambda: store.create(KEY, b"record"), lambda: store.get("data/a", max_bytes=9), lambda: list(store.list("")),
        lambda: store.stat("data/a"), lambda: store.put("data/b", [b""]),
    ]  # fmt: skip
    assert [told(request).retryable for request in requests] == [False] * 5
    assert [failure.error.retryable for failure in store.delete(["data/a"])] == [False]
    assert bucket.objects.data == {"data/a": b"pack"}


@pytest.mark.parametrize("under_way", [True, False])
def test_a_refusal_for_nothing_needs_another_create_under_way(bucket: Bucket, store: ObjectStore, under_way: bool) -> None:
    """S3 does not refuse a condition that nobody could have broken."""
    if under_way:
        bucket.weather = only(Kind.LATE)
        told(lambda: store.create(KEY, b"late"))
    bucket.weather = only(Kind.REFUSED_FOR_NOTHING)
    bucket.requests = -1000  # the late one does not arrive before
    assert store.create(KEY, b"record") is (Created.EXISTS if under_way else Created.CREATED)
    assert bucket.weather.counts[Kind.REFUSED_FOR_NOTHING] == under_way
    assert bucket.objects.data == ({} if under_way else {KEY: b"record"})


def test_c33_a_stall_is_longer_than_any_deadline_and_ends_in_each_way(kernel: Kernel, bucket: Bucket, store: ObjectStore) -> None:
    bucket.weather, seen = only(Kind.STALL), Counter()
    for number in range(60):
        key, before = f"log/{number}", kernel.now()
        answer = told(lambda key=key: store.create(key, b"record"))
        assert kernel.now() - before > bucket.deadline_s
        heard = answer is Created.CREATED
        assert heard or answer.retryable
        seen[heard, key in bucket.objects.data] += 1
    assert set(seen) == {(True, True), (False, True), (False, False)}
    there = next(iter(bucket.objects.data))
    assert {type(told(lambda: store.get(there, max_bytes=9))) for _ in range(20)} == {bytes, StoreError}


def test_c33_a_read_that_is_cut_is_an_error_and_leaves_its_memory_alone_afterwards(bucket: Bucket, store: ObjectStore) -> None:
    data = bytes(range(1, 251))
    bucket.store.put("data/a", [data])
    done = set()
    for seed in range(20):
        bucket.weather, memory = only(Kind.CUT, seed), bytearray(250)
        assert told(lambda memory=memory: store.read_into("data/a", 0, memoryview(memory))).retryable
        done.add(len(memory.rstrip(b"\0")))
        assert data.startswith(memory.rstrip(b"\0"))
        assert told(lambda: store.get("data/a", max_bytes=250)).retryable
        memory[:] = bytes(250)
        quietly(bucket, 5)
        assert memory == bytes(250)
    assert len(done) > 5
    assert max(done) < 250
    assert isinstance(told(lambda: store.get("data/absent", max_bytes=9)), NotFoundError), "there is nothing to cut"


def test_c42_a_list_is_complete_in_short_pages_or_breaks_off_with_an_error(bucket: Bucket, store: ObjectStore) -> None:
    names = [f"data/{number:03d}" for number in range(50)]
    for name in names:
        bucket.store.put(name, [b""])
    bucket.weather = only(Kind.SHORT_PAGE)
    assert [stat.key for stat in store.list("data/")] == names
    assert [stat.key for stat in store.list("data/", after=names[30])] == names[31:]
    assert bucket.weather.counts[Kind.SHORT_PAGE] > 3
    bucket.weather, lengths = only(Kind.CUT), set()
    for _ in range(10):
        found: list[str] = []
        with pytest.raises(StoreError):
            collect(store.list("data/"), found)
        assert found == names[: len(found)]
        lengths.add(len(found))
    assert len(lengths) > 3
    assert max(lengths) < 50


def collect(items: Iterator[ObjectStat], found: list[str]) -> None:
    for item in items:
        found.append(item.key)


def test_c42_pages_of_a_list_are_requests_of_their_own(
    kernel: Kernel, bucket: Bucket, process: Process, store: ObjectStore
) -> None:
    """What is written behind the page that was read is found; what is written before it is not: no promise, and nothing is lost of what was
    there all the time."""
    bucket.page_keys = 2
    for name in "bdfh":
        bucket.store.put(f"data/{name}", [b""])
    items = store.list("data/")
    first = [next(items).key, next(items).key]
    for name in "acg":
        bucket.store.put(f"data/{name}", [b""])
    assert first + [stat.key for stat in items] == ["data/b", "data/d", "data/f", "data/g", "data/h"]


def test_c72_some_of_the_keys_are_not_deleted_and_named(bucket: Bucket, store: ObjectStore) -> None:
    names = [f"data/{number}" for number in range(9)]
    counts = set()
    for seed in range(10):
        for name in names:
            bucket.store.put(name, [b""])
        bucket.weather = only(Kind.PARTIAL, seed)
        failures = store.delete(names)
        assert all(isinstance(failure.error, StoreError) and failure.error.retryable for failure in failures)
        assert sorted(failure.key for failure in failures) == sorted(bucket.objects.data)
        counts.add(len(failures))
    assert min(counts) >= 1
    assert len(counts) > 3


S3_SAYS = [
    (error(409, "ConditionalRequestConflict"), answers.undecided),
    (error(403, "AccessDenied"), answers.forbidden),
    *((error(*what), partial(answers.busy, how=(number + 0.5) / len(answers.BUSY))) for number, what in enumerate(answers.BUSY)),
    (NO_ANSWER, answers.reset),
]


@pytest.mark.parametrize(("answer", "simulated"), S3_SAYS, ids=lambda value: str(value[0]) if isinstance(value, tuple) else "")
def test_c24_c26_c48_errors_are_those_that_the_real_store_makes_of_the_same_answer(
    answer: tuple, simulated: Callable[[Request], StoreError]
) -> None:
    with scripted() as server:
        server.answers.append(answer)
        real = told(lambda: server.store().create(KEY, b"record"))
    ours = simulated(Request("create", KEY))
    assert type(ours) is type(real) is StoreError
    assert (ours.retryable, ours.key) == (real.retryable, real.key)
    assert beginning(ours) == beginning(real)


def beginning(error: StoreError) -> str:
    """The text without the store's place and the server's own words."""
    return str(error).partition(" s3://")[0]


# ------------------------------------------------------------------------------------------ processes and nodes


def test_two_requests_interleave_before_and_behind_each_step() -> None:
    """Of two creates of one key either one wins, and the loser may hear first."""
    seen = Counter()
    for seed in range(40):
        kernel = Kernel(seed)
        bucket, heard = Bucket(kernel), []
        a, b = bench.process(kernel, "a"), bench.process(kernel, "b")

        def create(process: Process, bucket: Bucket = bucket, heard: list = heard) -> None:
            heard.append((process.name, bucket.connect(process).create(KEY, process.name.encode())))

        bench.run(kernel, (a, lambda a=a, create=create: create(a)), (b, lambda b=b, create=create: create(b)))
        assert sorted(outcome.value for _, outcome in heard) == ["created", "exists"]
        assert dict(heard)[bucket.objects.data[KEY].decode()] is Created.CREATED
        seen[tuple((name, outcome.value) for name, outcome in heard)] += 1
    assert len(seen) == 4


def test_a_dead_process_touches_nothing(kernel: Kernel, bucket: Bucket, process: Process, store: ObjectStore) -> None:
    bucket.store.put("data/a", [b"pack"])
    bucket.weather = Weather(random.Random(1))
    kernel.kill(process)
    before, drawn = kernel.digest, bucket.weather._random.getstate()
    memory = bytearray(4)
    requests = [
        lambda: store.create(KEY, b""), lambda: store.put(KEY, [b""]), lambda: store.delete(["data/a"]), lambda: store.stat(KEY),
        lambda: store.get("data/a", max_bytes=9), lambda: store.read_into("data/a", 0, memoryview(memory)), lambda: list(store.list("")),
    ]  # fmt: skip
    for request in requests:
        with pytest.raises(Killed):
            request()
    assert (kernel.digest, bucket.weather._random.getstate(), memory) == (before, drawn, bytearray(4))
    assert bucket.objects.data == {"data/a": b"pack"}


def test_what_a_process_has_sent_may_arrive_after_its_death_or_never() -> None:
    """It dies while its create is on its way: done soon, later, or not at all; and nobody waits for the answer."""
    seen = Counter()
    for seed in range(60):
        kernel = Kernel(seed)
        bucket, process = Bucket(kernel), bench.process(kernel)
        bucket.weather = Weather(random.Random(seed), {Kind.BUSY: 1e-9})
        connection = bucket.connect(process)
        kernel.spawn(process, "work", lambda connection=connection: connection.create(KEY, b"record"))
        kernel.turns(1)
        kernel.kill(process)
        assert bucket.objects.data == {}
        bystander = bucket.connect(bench.process(kernel, "bystander"))
        for _ in range(3):
            bystander.stat("data/x")
        soon = KEY in bucket.objects.data
        bucket.land_late()
        assert bucket.weather.counts[Kind.ADRIFT] == 1
        seen["soon" if soon else "later" if KEY in bucket.objects.data else "never"] += 1
    assert len(seen) == 3, seen


@pytest.mark.parametrize(("node", "reaches"), [("node 1", [False, True]), (None, [False, False])])
def test_an_outage_is_one_nodes_or_everybodys(kernel: Kernel, bucket: Bucket, node: str | None, reaches: list[bool]) -> None:
    here, there = (bucket.connect(bench.process(kernel, name, name)) for name in ("node 1", "node 2"))
    bucket.store.put("data/a", [b"pack"])
    bucket.outage(node, True)
    for connection, reached in zip((here, there), reaches, strict=True):
        before = kernel.now()
        answer = told(lambda connection=connection: connection.get("data/a", max_bytes=9))
        failures = connection.delete(["data/x"])
        assert (answer == b"pack") is (failures == []) is reached
        if not reached:
            assert answer.retryable
            assert failures[0].error.retryable
            assert kernel.now() - before == 2 * bucket.outage_s
    bucket.outage(node, False)
    assert here.get("data/a", max_bytes=9) == there.get("data/a", max_bytes=9) == b"pack"


def test_an_outage_begins_in_the_middle_of_a_request() -> None:
    """It never arrives, or it was done and the answer is lost."""
    seen = set()
    for seed in range(30):
        kernel = Kernel(seed)
        bucket, process = Bucket(kernel), bench.process(kernel)
        heard: list[object] = []

        def work(bucket: Bucket = bucket, process: Process = process, heard: list[object] = heard) -> None:
            heard.append(told(lambda: bucket.connect(process).create(KEY, b"record")))

        bench.run(kernel, (process, work), (bench.process(kernel, "weather"), lambda bucket=bucket: bucket.outage(None, True)))
        assert len(heard) == 1
        seen.add((heard == [Created.CREATED], KEY in bucket.objects.data))
    assert seen == {(True, True), (False, True), (False, False)}


def test_a_request_that_is_on_its_way_when_the_outage_begins_never_arrives(
    kernel: Kernel, bucket: Bucket, process: Process
) -> None:
    heard: list[object] = []
    connection = bucket.connect(process)
    kernel.spawn(process, "work", lambda: heard.append(told(lambda: connection.create(KEY, b"record"))))
    kernel.turns(1)
    bucket.outage(None, True)
    kernel.pass_time(2 * bucket.outage_s)
    assert [type(answer) for answer in heard] == [StoreError]
    assert bucket.land_late() == 0
    assert bucket.objects.data == {}

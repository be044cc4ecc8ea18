"""The sweep over answers: at every request of save, upload and restore, everything that S3 may answer, or not (I3, I5, I6, I12).

C24 C25 C26 C27 C33 C48 C67 C99. A bounded sample, every fault at every group of requests, in `make test`; all of it by
`make answers` (`TIEREDCKPT_TEST_ANSWERS=full`, or about so many injections).
"""

from __future__ import annotations

import os
import queue
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from localstack.fault_proxy import proxied
from localstack.process import S3Server
from tests.faults.answers import FAULTS, Injection, Site, injections, stratified, why_not
from tests.faults.answers_story import FIRST, LONG_S, NEXT, PARTS, Bucket, Lane, begin, tell
from tieredckpt.errors import NotFoundError, StoreError
from tieredckpt.store.base import Created
from tieredckpt.store.s3 import BulkClient
from tieredckpt.testing.proxy_acts import ProxyAct, ProxyRule, StallBody, TruncateBody

HOW_MANY = os.environ.get("TIEREDCKPT_TEST_ANSWERS", "sample")
CHUNKS = 8 if HOW_MANY == "full" else 2
LANES = 5
"""Stories at the same time: most of a story is waiting."""
DEADLINE_S = 8 * LONG_S
"""Of one story, whatever happens to it."""

Outcomes = Counter[tuple[str, str]]
"""(fault, how the story ended) → how often."""


@pytest.fixture
def work() -> Iterator[Path]:
    """In memory, where there is such a directory: what the disk does is not what is tried here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="answers-", dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


class Sweep:
    """Lanes before one server, and the requests of the story without faults there."""

    def __init__(self, server: S3Server, work: Path, stack: ExitStack, bulk: BulkClient = "obstore") -> None:
        self._work = work
        self._lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        bucket = Bucket(server)
        stack.callback(bucket.close)
        for _ in range(LANES):
            _, proxy = stack.enter_context(proxied(server))
            lane = Lane(bucket, proxy, bulk)
            stack.callback(lane.close)
            self._lanes.put(lane)
        self.sites, self.begun = begin(lane, self._place("clean"))

    def run(self, chosen: Sequence[Injection]) -> Outcomes:
        """AssertionError, naming all injections after which the oracle disagreed."""
        outcomes: Outcomes = Counter()
        wrong: list[str] = []
        with ThreadPoolExecutor(LANES) as pool:
            told = [(injection, pool.submit(self._tell, number, injection)) for number, injection in enumerate(chosen)]
            for injection, future in told:
                try:
                    outcomes[injection.fault.name, future.result(DEADLINE_S)] += 1
                except Exception as error:  # all of them are wanted, not the first one
                    wrong.append(f"{injection}:\n{''.join(traceback.format_exception(error)[-3:])}")
        assert not wrong, f"{len(wrong)} of {len(chosen)}:\n" + "\n".join(wrong)
        return outcomes

    def _tell(self, number: int, injection: Injection) -> str:
        lane = self._lanes.get()
        followed = HOW_MANY == "full" or number % 4 == 0
        try:
            return tell(lane, self._place(str(number)), injection, self.begun, followed=followed)
        finally:
            self._lanes.put(lane)

    def _place(self, name: str) -> Path:
        """A directory whose name no other test has: it is that of the place in the bucket, too."""
        return self._work / f"{self._work.name}-{name}"


def chosen_of(sites: Sequence[Site]) -> list[Injection]:
    everything = injections(sites)
    if HOW_MANY == "full":
        return everything
    if HOW_MANY == "sample":
        return stratified(everything)
    return everything[:: max(1, len(everything) // int(HOW_MANY))]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_answer_at_every_request_ends_as_the_oracle_says(
    chunk: int, ministack: S3Server, work: Path, swept: Callable[[str], None]
) -> None:
    """Packs go through either client of S3: in a sample half of them, in the full sweep all through obstore, and again below."""
    bulk: BulkClient = "boto3" if HOW_MANY != "full" and chunk % 2 else "obstore"
    with ExitStack() as stack:
        sweep = Sweep(ministack, work, stack, bulk)
        chosen = chosen_of(sweep.sites)[chunk::CHUNKS]
        outcomes = sweep.run(chosen)
    swept(summary(f"ministack, {bulk}", outcomes))
    missed = sum(count for (_, ending), count in outcomes.items() if ending == "not reached")
    assert missed <= len(chosen) // 20, "the story does not repeat itself: too many sites were never reached"


@pytest.mark.skipif(HOW_MANY != "full", reason="the sample has these: TIEREDCKPT_TEST_ANSWERS=full")
def test_every_answer_at_every_request_for_a_pack_with_boto3_alone(
    ministack: S3Server, work: Path, swept: Callable[[str], None]
) -> None:
    with ExitStack() as stack:
        sweep = Sweep(ministack, work, stack, "boto3")
        swept(summary("ministack, boto3", sweep.run([one for one in injections(sweep.sites) if one.site.kind == "pack"])))


def test_some_of_the_answers_with_another_server(seaweedfs: S3Server, work: Path, swept: Callable[[str], None]) -> None:
    """Which checks signatures, and which has its own way of saying the same."""
    with ExitStack() as stack:
        sweep = Sweep(seaweedfs, work, stack)
        swept(summary("SeaweedFS", sweep.run(stratified(injections(sweep.sites))[:: 1 if HOW_MANY == "full" else 16])))


def test_the_table_of_faults_leaves_nothing_out_silently() -> None:
    """What is left out has its reason, every fault has its sites, and every site has faults before and after the server acts."""
    operations = ("PutObject", "GetObject", "HeadObject", "ListObjectsV2", "DeleteObjects")
    sites = [Site(NEXT, operation, kind, 1) for operation in operations for kind in ("record", "pack")]
    reasons = {(fault.name, site.operation, site.kind): why_not(site, fault) for fault in FAULTS for site in sites}
    left_out = Counter(reason for reason in reasons.values() if reason)
    assert left_out == {
        "changes nothing: it cannot be applied": 6 * 7,
        "its answer has no body that anybody reads": 6 * 2,
        "sends no condition": 9 * 5,
        "no store says 409 to it": 8,
    }
    assert {fault.name for fault in FAULTS} == {name for (name, _, _), reason in reasons.items() if not reason}
    kept = [injection.site for injection in injections(sites)]
    assert all(kept.count(site) >= 5 for site in sites)
    assert sorted(PARTS) == [FIRST, NEXT]


@pytest.mark.parametrize("act", [TruncateBody(20), StallBody(20)], ids=["truncated", "stalled"])
def test_an_answer_that_breaks_off_is_an_outage_whatever_it_was_going_to_say(act: ProxyAct, ministack: S3Server) -> None:
    """C99: the body of an error, or of a list. What it was going to say is asked for again, by the store or by its caller."""
    with ExitStack() as stack:
        _, proxy = stack.enter_context(proxied(ministack))
        bucket = Bucket(ministack)
        lane = Lane(bucket, proxy)
        stack.callback(bucket.close)
        stack.callback(lane.close)
        store = lane.line(f"cut-{type(act).__name__}")
        store.create("there", b"1")
        for call, answer in (
            (lambda: store.get("absent", max_bytes=10), "absent"),
            (lambda: [stat.key for stat in store.list("")], ["there"]),
            (lambda: store.create("there", b"2"), Created.EXISTS),
        ):
            proxy.script([ProxyRule(act)])
            assert answer_or_outage(call) in (answer, "outage")
            assert answer_or_outage(call) == answer


def answer_or_outage(call: Callable[[], object]) -> object:
    try:
        return call()
    except NotFoundError:
        return "absent"
    except StoreError as error:
        return "outage" if error.retryable else "refused"


def summary(what: str, outcomes: Outcomes) -> str:
    """One line for the end of the run; each fault and how it ended is printed as well, for `-s`."""
    for (fault, ending), count in sorted(outcomes.items()):
        print(f"  {count:4}  {fault}: {ending}")
    endings = Counter[str]()
    for (_, ending), count in outcomes.items():
        endings[ending.partition(":")[0].partition(",")[0]] += count
    ended = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
    return f"answers, {what}: {outcomes.total()} injections ({ended})"

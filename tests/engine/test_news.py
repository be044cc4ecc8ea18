"""What a leader tells of its uploads: once, whole, in bounded room, without asking a store on the uploader's thread."""

from __future__ import annotations

import pytest

from tests.engine.runkit import Job, Place, begun, damage_snapshot
from tieredckpt.engine.background import Duties
from tieredckpt.engine.board import Board
from tieredckpt.engine.handle import SnapshotInfo
from tieredckpt.engine.news import KEPT_NOTES, UploadNews, UploadNote, heard
from tieredckpt.env import Env
from tieredckpt.errors import FencedError, FormatError, SaveError, StoreError, TieredCheckpointError
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.ranks import LocalRanks


def info(name: str, step: int = 5) -> SnapshotInfo:
    return SnapshotInfo(
        snapshot_id=name,
        step=step,
        session="s",
        created_at="2026-01-01T00:00:00Z",
        tiers=("local", "remote"),
        current=True,
        parent=None,
        predecessor="p",
        bytes_total=10,
        bytes_new=7,
        tags=("a", "b"),
        metrics={"loss": 0.25},
        pinned=False,
        suspect=False,
    )


def board_of(ranks: LocalRanks, rank: int) -> Board:
    return Board(ranks.notes(rank), rank=rank, size=ranks.size, env=ranks.env, timeout_s=5.0)


@pytest.mark.parametrize(
    ("outcome", "note"),
    [
        (info("x"), UploadNote(info=info("x"))),
        (None, UploadNote()),
        (SaveError("a pack is damaged", step=5, rank=0, tier="remote"), UploadNote(failure="a pack is damaged", code="save")),
        (FencedError("session b owns the run"), UploadNote(failure="session b owns the run", code="fenced")),
    ],
)
def test_what_is_told_is_heard_once_it_is_sent(outcome: SnapshotInfo | TieredCheckpointError | None, note: UploadNote) -> None:
    ranks = LocalRanks(4)
    news = UploadNews(board_of(ranks, 2))
    assert not news.outbox.send()
    news.tell("x", outcome)
    assert heard(board_of(ranks, 3), 2, "x") is None, "telling must not ask the store of the ranks"
    assert news.outbox.send()
    assert heard(board_of(ranks, 3), 2, "x") == note
    assert heard(board_of(ranks, 3), 0, "x") is None, "another leader's"


def test_whoever_sends_is_woken_for_each_that_is_new() -> None:
    news, woken = UploadNews(board_of(LocalRanks(2), 0)), list[bool]()
    news.outbox.woken = lambda: woken.append(True)
    news.tell("x", None)
    news.tell("x", None)
    news.outbox.send()
    news.tell("x", None)
    news.tell("y", None)
    assert len(woken) == 2


def test_the_first_word_stands_and_is_posted_once() -> None:
    ranks = LocalRanks(2)
    news = UploadNews(board_of(ranks, 0))
    news.tell("x", info("x"))
    news.tell("x", None)
    news.outbox.send()
    news.tell("x", FencedError("too late"))
    assert not news.outbox.send()
    assert ranks.puts[0] == 1
    assert heard(board_of(ranks, 1), 0, "x") == UploadNote(info=info("x"))


def test_the_last_notes_stay_and_the_store_does_not_grow() -> None:
    ranks = LocalRanks(2)
    news = UploadNews(board_of(ranks, 0))
    for number in range(3 * KEPT_NOTES):
        news.tell(f"x{number}", info(f"x{number}", number))
        if number % 5 == 0:
            news.outbox.send()
    news.outbox.send()
    assert len(ranks.values) == KEPT_NOTES
    reader = board_of(ranks, 1)
    there = [number for number in range(3 * KEPT_NOTES) if heard(reader, 0, f"x{number}") is not None]
    assert there == list(range(2 * KEPT_NOTES, 3 * KEPT_NOTES))


def test_what_an_outage_has_held_up_is_sent_after_it_in_order() -> None:
    class Flaky(Board):
        down = True
        posted: list[str]

        def post(self, key: str, data: bytes) -> None:
            if self.down:
                raise StoreError("out of reach", retryable=True)
            self.posted.append(key)
            super().post(key, data)

    ranks = LocalRanks(2)
    board = Flaky(ranks.notes(0), rank=0, size=2, env=Env(), timeout_s=5.0)
    board.posted = []
    news = UploadNews(board)
    news.tell("x", None)
    news.tell("y", None)
    with pytest.raises(StoreError, match="out of reach"):
        news.outbox.send()
    board.down = False
    news.tell("z", None)
    assert news.outbox.send()
    assert board.posted == ["upload/x", "upload/y", "upload/z"]


def test_bytes_that_are_no_note_are_refused_by_name() -> None:
    ranks = LocalRanks(2)
    board_of(ranks, 0).post("upload/x", b"\xc1")
    with pytest.raises(FormatError, match="rank 0 says of x"):
        heard(board_of(ranks, 1), 0, "x")


# ------------------------------------------------------------------------------------------- where the uploader tells


class Told(UploadNews):
    """Every call, also of what was told before."""

    def __init__(self) -> None:
        super().__init__(board_of(LocalRanks(2), 0))
        self.calls: list[tuple[str, object]] = []

    def tell(self, snapshot_id: str, outcome: SnapshotInfo | TieredCheckpointError | None) -> None:
        self.calls.append((snapshot_id, outcome))
        super().tell(snapshot_id, outcome)


def telling(place: Place, **options: object) -> tuple[Job, Told]:
    """A job whose node has several ranks, and what it tells them."""
    job, told = begun(place, **options), Told()
    job.run.background._duties = Duties(news=told)
    return job, told


def test_each_snapshot_is_told_exactly_once_as_its_handle_is() -> None:
    job, told = telling(Place())
    handles = [job.save(step) for step in (10, 20, 30)]
    for _ in range(3):
        job.work()
    assert told.calls == [(handle.snapshot_id, handle.remote.result(0)) for handle in handles]
    assert [handle.remote.result(0).step for handle in handles] == [10, 20, 30]  # type: ignore[union-attr]


def test_what_the_policy_passes_over_is_told_as_not_sent() -> None:
    job, told = telling(Place(), upload="latest")
    job.outage()
    first, last = job.save(10), job.save(20)
    job.outage(False)
    for _ in range(3):
        job.work()
    assert told.calls == [(first.snapshot_id, None), (last.snapshot_id, last.remote.result(0))]


def test_what_cannot_be_sent_is_told_once_with_its_failure() -> None:
    place = Place()
    job, told = telling(place)
    job.outage()
    bad, good = job.save(10), job.save(20)
    assert isinstance(place.local, MemoryStore)
    damage_snapshot(place.local, bad.snapshot_id)
    job.outage(False)
    for _ in range(3):
        job.work()
    assert told.calls == [(bad.snapshot_id, bad.remote.exception(0)), (good.snapshot_id, good.remote.result(0))]


def test_i7_when_the_run_has_another_owner_the_ranks_are_told_of_what_was_open() -> None:
    place = Place()
    job, told = telling(place)
    sent = job.save(5)
    job.work()
    job.outage()
    left = job.save(10)
    begun(place.another_node())
    job.outage(False)
    job.work()
    assert isinstance(left.remote.exception(0), FencedError)
    assert told.calls == [(sent.snapshot_id, sent.remote.result(0)), (left.snapshot_id, left.remote.exception(0))]

"""The one step of which everything that ranks do together is made: all say something, one decides, all hear the same.

Above `board`, below the joint save and restore. The rules:

- Rank 0 coordinates. It collects what the others say, decides, and posts the decision: there is one, for everybody.
- Where one rank fails, all fail. The rank where it happened raises its own error; the others one that names every rank that failed,
  with its text. A bare barrier would leave the healthy ranks waiting (C32); a status that only travels up would let rank 2 go on
  with what rank 1 never did (I14).
- A rank that has left (`Board.leave`) without a word has failed at once.
- A rank that is not heard of within the timeout has failed, and only this exchange with it. If it comes later, it finds the decision,
  and what it has to say is never read. If rank 0 is silent, the others give up after twice the timeout, and take back what they said,
  so that a coordinator that wakes up cannot decide in their name.
- Who works longer than the timeout and gets on (`pulse`) is waited for; so is a rank 0 that waits for one.
- A topic is used once: whoever tries again chooses another. So no note of an earlier attempt can be taken for one of a later.
- Ranks take away what they said once they have heard the decision; rank 0 takes away decisions, some time later. The store does not grow.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from tieredckpt.engine.board import Board
from tieredckpt.engine.pulse import Pulse, Watch
from tieredckpt.engine.topics import in_words, is_long_work
from tieredckpt.env import Deadline
from tieredckpt.errors import (
    CapacityError,
    ConflictError,
    CorruptionError,
    FencedError,
    FormatError,
    InternalError,
    MismatchError,
    NotFoundError,
    RankFailedError,
    StoreError,
    TieredCheckpointError,
    UsageError,
)

_log = logging.getLogger(__name__)

COORDINATOR = 0

KEPT_TOPICS = 64
KEPT_BYTES = 64 << 20
"""Decisions that stay for ranks that come late: at most so many, and of so many bytes; the last two in any case."""

TALK_EVERY_S = 20.0
"""After so long rank 0 says for whom it waits, and again."""

GRACE_S = 5.0
"""When a rank has failed, the others are waited for this long, to name all that failed; not for the whole timeout."""

_TRAVELS: dict[str, type[TieredCheckpointError]] = {
    error.code: error
    for error in (UsageError, ConflictError, FencedError, NotFoundError, FormatError, CorruptionError, CapacityError)
}
"""Errors that every rank raises as they are, where all failed ranks have the same: callers act on the class."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`common` for every rank, and for some ranks a part of their own."""

    common: bytes = b""
    each: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank hears. `own` is empty where the decision has nothing for it alone."""

    common: bytes
    own: bytes


class _Failure(msgspec.Struct, frozen=True):
    rank: int
    text: str
    code: str
    retryable: bool = False
    differences: tuple[str, ...] = ()
    of_all: bool = False
    """The coordinator has compared what all ranks said: it is no fault of its own."""


class _Said(msgspec.Struct, frozen=True):
    """What a rank posts: its contribution, or why there is none."""

    data: bytes = b""
    failure: _Failure | None = None


class _Verdict(msgspec.Struct, frozen=True):
    """What the coordinator posts."""

    common: bytes = b""
    own_bytes: dict[int, int] = {}
    """Rank → size of its own part, which is a note of its own."""
    failures: tuple[_Failure, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_Post = TypeVar("_Post", _Said, _Verdict)


class Council:
    """All ranks of one checkpointer. `board` is None in a job of one rank, where everything is decided on the spot.

    Safe for several threads of a rank, as long as their topics differ.
    """

    def __init__(self, board: Board | None, work: str = "") -> None:
        self.rank = board.rank if board else COORDINATOR
        self.size = board.size if board else 1
        self._board = board
        self._recent: deque[str] = deque(maxlen=4 * KEPT_TOPICS)
        self._kept = _Kept(board.env.lock() if board else nullcontext())
        self._pulse = Pulse(board, work) if board else None

    def beside(self, work: str) -> Council:
        """The same ranks, for long work beside that of this one: neither takes the other's signs of life for its own."""
        other = Council(self._board, work)
        other._kept = self._kept
        return other

    @property
    def board(self) -> Board | None:
        """For what ranks hand to each other between exchanges."""
        return self._board

    def beat(self) -> None:
        """Called by whoever works for an exchange, each time that a piece of the work is done."""
        if self._pulse is not None:
            self._pulse.beat()

    def exchange(
        self,
        topic: str,
        mine: Callable[[], bytes],
        decide: Callable[[Mapping[int, bytes]], Decision],
        who: Sequence[int] | None = None,
    ) -> Outcome:
        """What the coordinator decided, having heard what `mine()` gave on every rank of `who` (default: all) and on itself.

        Called by all of them with the same `topic`, which must be new. `decide` runs on the coordinator alone, with rank → bytes.

        If `mine` fails anywhere, or `decide` fails, or a rank is not heard of within the timeout, every rank raises: the one where it
        happened its own error, the others the same class where that tells them what to do (`MismatchError` with all differences,
        `FencedError`, ...), else `RankFailedError`. A silent coordinator is given up after twice the timeout.
        """
        if topic in self._recent:
            raise InternalError(f"the topic {topic} has been used before")
        self._recent.append(topic)
        if self._board is None or self.size == 1:
            decision = decide({self.rank: mine()})
            return Outcome(decision.common, decision.each.get(self.rank, b""))
        parties = sorted({COORDINATOR, *(range(self.size) if who is None else who)})
        if self.rank not in parties:
            raise InternalError(f"rank {self.rank} takes no part in {topic}")
        assert self._pulse is not None
        self._pulse.begin(topic)
        if self.rank == COORDINATOR:
            return self._lead(self._board, topic, parties[1:], mine, decide)
        return _follow(self._board, topic, mine, self._pulse.watch(topic))

    def close(self) -> None:
        """End the waits of other threads and let go of the store."""
        if self._board is not None:
            self._board.close()

    def _lead(
        self,
        board: Board,
        topic: str,
        others: Sequence[int],
        mine: Callable[[], bytes],
        decide: Callable[[Mapping[int, bytes]], Decision],
    ) -> Outcome:
        assert self._pulse is not None
        failures: list[_Failure] = []
        deciding = False
        try:
            own = mine()
            heard, failures = _hear(board, topic, others, self._pulse)
            if failures:
                raise _joint_error(topic, failures)
            deciding = True
            decision = decide({COORDINATOR: own, **heard})
            for rank, part in decision.each.items():
                if rank != COORDINATOR:
                    board.post(_own(topic, rank), part)
        except BaseException as error:
            with _noting(error, "the other ranks could not be told of it"):
                if not failures:
                    others_failed = _hear(board, topic, others, self._pulse, hurry=True)[1]
                    failures = [_failure(COORDINATOR, error, of_all=deciding), *others_failed]
                self._tell(board, topic, others, _Verdict(failures=tuple(failures)))
            raise
        # Outside: a decision whose post has an unknown fate may have been heard, and must not be followed by another.
        own_bytes = {rank: len(part) for rank, part in decision.each.items() if rank != COORDINATOR}
        self._tell(board, topic, others, _Verdict(decision.common, own_bytes))
        return Outcome(decision.common, decision.each.get(COORDINATOR, b""))

    def _tell(self, board: Board, topic: str, others: Sequence[int], verdict: _Verdict) -> None:
        """Post the decision: from here on it is made. Take away those that have been kept long enough."""
        posted = _encode(verdict)
        board.post(_decision(topic), posted)
        late = tuple(others) if verdict.failures else ()
        for old in self._kept.add(_Told(topic, len(posted), late)):
            _take_away(board, _decision(old.topic), COORDINATOR, old.size)
            for rank in old.late:  # said too late, or by a rank that has failed and gone
                _take_away(board, _contribution(old.topic), rank, None)


@dataclass(frozen=True, slots=True)
class _Told:
    """A decision on the board. `late`: ranks that may leave a note on it that nobody reads."""

    topic: str
    size: int
    late: tuple[int, ...]


class _Kept:
    """The decisions that the coordinator has posted: they stay for ranks that come late, and go, oldest first."""

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self._told: deque[_Told] = deque()
        self._bytes = 0

    def add(self, told: _Told) -> list[_Told]:
        """Those that have to go."""
        out: list[_Told] = []
        with self._lock:
            self._told.append(told)
            self._bytes += told.size
            while len(self._told) > KEPT_TOPICS or (self._bytes > KEPT_BYTES and len(self._told) > 2):
                out.append(self._told.popleft())
                self._bytes -= out[-1].size
        return out


def _hear(
    board: Board, topic: str, ranks: Sequence[int], pulse: Pulse, *, hurry: bool = False
) -> tuple[dict[int, bytes], list[_Failure]]:
    """What `ranks` say, and why they fail. `hurry`: it has failed already, only who else has is of interest."""
    deadline, grace_s = board.deadline(), min(GRACE_S, board.timeout_s)
    found: dict[int, bytes] = {}
    watch = pulse.watch(topic)
    while not hurry:
        missing = [rank for rank in ranks if rank not in found]
        found |= _collect_and_talk(board, topic, missing, deadline)
        missing = [rank for rank in missing if rank not in found]
        if not missing or not deadline.expired or not all([watch.moved(rank) for rank in missing]):
            break
        pulse.beat()
        deadline = board.deadline()
    missing = [rank for rank in ranks if rank not in found]
    gone = board.gone(missing) if missing else {}
    last_words = {rank: board.peek(_contribution(topic), rank) for rank in gone}  # why it has left, most often
    found |= {rank: data for rank, data in last_words.items() if data is not None}
    if not deadline.expired:
        found |= board.collect(_contribution(topic), [rank for rank in missing if rank not in gone], board.deadline(grace_s))
    said = {rank: _decoded(_Said, data, topic) for rank, data in found.items()}
    failures = [note.failure for note in said.values() if note.failure is not None]
    failures += [_Failure(rank, reason, RankFailedError.code) for rank, reason in gone.items() if rank not in found]
    if deadline.expired:
        text = f"not heard of within {board.timeout_s:g} s"
        failures += [
            _Failure(rank, text, RankFailedError.code, True) for rank in missing if rank not in found.keys() | gone.keys()
        ]
    return {rank: note.data for rank, note in said.items()}, sorted(failures, key=lambda failure: failure.rank)


def _collect_and_talk(board: Board, topic: str, ranks: Sequence[int], deadline: Deadline) -> dict[int, bytes]:
    """Until all have spoken, one has failed or left, or the deadline has passed."""
    found: dict[int, bytes] = {}
    failed = False

    def tells_failure(data: bytes) -> bool:
        nonlocal failed
        failed = failed or _tells_failure(topic, data)
        return failed

    missing = list(ranks)
    waited = 0.0
    while missing:
        left = deadline.remaining()
        talk = board.deadline(TALK_EVERY_S if left is None else min(TALK_EVERY_S, left))
        found |= board.collect(_contribution(topic), missing, talk, stop=tells_failure)
        missing = [rank for rank in missing if rank not in found]
        if not missing or failed or not talk.expired or deadline.expired:
            break
        waited += TALK_EVERY_S
        names = ", ".join(map(str, missing))
        doubt, level = ("", logging.INFO) if is_long_work(topic) else (": do all ranks make the same calls?", logging.WARNING)
        _log.log(level, "rank 0 has waited %.0f s for rank(s) %s, %s%s", waited, names, in_words(topic), doubt)
    return found


def _follow(board: Board, topic: str, mine: Callable[[], bytes], watch: Watch) -> Outcome:
    early = board.peek(_decision(topic), COORDINATOR)
    if early is not None:
        failures = _decoded(_Verdict, early, topic).failures
        raise _joint_error(topic, failures) if failures else InternalError(f"{topic} has been decided without rank {board.rank}")
    try:
        said = _encode(_Said(mine()))
    except BaseException as error:
        with _noting(error, "the other ranks could not be told of it"):
            board.post(_contribution(topic), _encode(_Said(failure=_failure(board.rank, error))))
        raise
    board.post(_contribution(topic), said)
    try:
        verdict = _decoded(_Verdict, _read_decision(board, topic, watch), topic)
    finally:
        _take_away(board, _contribution(topic), board.rank, len(said))
    if verdict.failures:
        raise _joint_error(topic, verdict.failures)
    own_bytes = verdict.own_bytes.get(board.rank)
    if own_bytes is None:
        return Outcome(verdict.common, b"")
    own = board.read(_own(topic, board.rank), COORDINATOR, f"what it decided for rank {board.rank}, {in_words(topic)}")
    _take_away(board, _own(topic, board.rank), COORDINATOR, own_bytes)
    return Outcome(verdict.common, own)


def _read_decision(board: Board, topic: str, watch: Watch) -> bytes:
    """RankFailedError if rank 0 says nothing for twice the timeout, nor gets on."""
    while True:
        try:
            what = f"its decision, {in_words(topic)}"
            return board.read(_decision(topic), COORDINATOR, what, board.deadline(2 * board.timeout_s))
        except RankFailedError:
            if not watch.moved(COORDINATOR):
                raise


def _joint_error(topic: str, failures: Sequence[_Failure]) -> TieredCheckpointError:
    """What a rank raises for the failures of others."""
    by_text: dict[str, list[int]] = {}
    for failure in failures:
        by_text.setdefault(failure.text, []).append(failure.rank)
    said = "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items())
    message = f"{said} ({in_words(topic)})"
    _log.debug("%s has failed: %s", topic, said)
    codes = {failure.code for failure in failures}
    first = failures[0]
    if first.of_all and codes == {MismatchError.code}:
        return MismatchError(first.text, first.differences)
    if first.of_all and codes == {UsageError.code}:
        return UsageError(first.text)
    code = codes.pop() if len(codes) == 1 else "several"
    if code == MismatchError.code:
        return MismatchError(message, [f"rank {failure.rank}: {text}" for failure in failures for text in failure.differences])
    if code in _TRAVELS:
        return _TRAVELS[code](message)
    retryable = all(failure.retryable for failure in failures)
    return RankFailedError(message, ranks=[failure.rank for failure in failures], retryable=retryable, cause=code)


def _failure(rank: int, error: BaseException, *, of_all: bool = False) -> _Failure:
    known = isinstance(error, TieredCheckpointError)
    return _Failure(
        rank=rank,
        text=str(error) if known else f"{type(error).__name__}: {error}",
        code=error.code if isinstance(error, TieredCheckpointError) else TieredCheckpointError.code,
        retryable=isinstance(error, StoreError) and error.retryable,
        differences=error.differences if isinstance(error, MismatchError) else (),
        of_all=of_all,
    )


def _tells_failure(topic: str, data: bytes) -> bool:
    return _decoded(_Said, data, topic).failure is not None


def _decoded(kind: type[_Post], data: bytes, topic: str) -> _Post:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise FormatError(
            f"what was said {in_words(topic)} cannot be read: do all ranks run the same version? {error}"
        ) from error


def _take_away(board: Board, key: str, rank: int, size: int | None) -> None:
    """What is decided is decided: a note that cannot be removed costs a little room."""
    try:
        board.remove(key, rank, size)
    except StoreError as error:
        _log.warning("a note could not be removed: %s", error)


@contextmanager
def _noting(error: BaseException, what: str) -> Iterator[None]:
    """`error` is about to be raised: a store that fails as well must not take its place, and is told in a note of it."""
    try:
        yield
    except StoreError as lost:
        error.add_note(f"{what}: {lost}")


def _contribution(topic: str) -> str:
    return f"{topic}/said"


def _decision(topic: str) -> str:
    return f"{topic}/decided"


def _own(topic: str, rank: int) -> str:
    return f"{topic}/for/{rank}"

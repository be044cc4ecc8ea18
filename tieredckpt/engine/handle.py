"""What `save` gives back: three futures and the numbers of one save."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tieredckpt.errors import FencedError
from tieredckpt.model.ids import SnapshotId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One snapshot as the logs know it.

    tiers        of "local" and "remote", the ones where it is live
    current      on the current lineage
    parent       base of an incremental snapshot; predecessor: what the run went on from (a snapshot id or a lineage root)
    bytes_total  of all its pieces; bytes_new: of the packs that it owns
    suspect      a restore found damage that no tier could make good
    unfenced     saved by a session that used a bucket without create-if-absent (`allow_unfenced`)
    """

    snapshot_id: str
    step: int
    session: str
    created_at: str
    tiers: tuple[str, ...]
    current: bool
    parent: str | None
    predecessor: str
    bytes_total: int
    bytes_new: int
    tags: tuple[str, ...]
    metrics: dict[str, float]
    pinned: bool
    suspect: bool
    unfenced: bool = False


class Outcome(Future[T]):
    """A future that knows if somebody has been given its failure, so that each one is reported exactly once (I12)."""

    def __init__(self) -> None:
        super().__init__()
        self._delivered = False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._delivered = True
        return error

    def result(self, timeout: float | None = None) -> T:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return super().result()

    def failure(self) -> BaseException | None:
        """The failure so far, without counting as delivered."""
        return super().exception() if self.done() else None

    @property
    def undelivered(self) -> bool:
        """It failed, and nobody was given the failure yet."""
        return not self._delivered and self.failure() is not None

    def take_undelivered(self) -> BaseException | None:
        """The failure, if nobody has been given it yet; from now on it counts as delivered."""
        if self._delivered or not self.done():
            return None
        return self.exception()

    def succeed(self, value: T) -> None:
        """Set the result unless the outcome is known already."""
        with suppress(InvalidStateError):  # another thread was faster
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Set the failure unless the outcome is known already."""
        with suppress(InvalidStateError):  # another thread was faster
            self.set_exception(error)


class SaveHandle:
    """One save, from staging to the bucket. Each future gives a `SnapshotInfo` (`remote`: None where the policy does not send it).

    `timings` in seconds: `waited` for staging memory, `staged`, then `local` and `remote`, counted from the call of `save`,
    which was at `began` on the monotonic clock.
    """

    def __init__(self, snapshot_id: SnapshotId, step: int, began: float) -> None:
        self.snapshot_id = snapshot_id
        self.step = step
        self.began = began
        self.staged: Outcome[SnapshotInfo] = Outcome()
        self.local: Outcome[SnapshotInfo] = Outcome()
        self.remote: Outcome[SnapshotInfo | None] = Outcome()
        self.timings: dict[str, float] = {}
        self.has_remote = True
        """False: there is no bucket, and `remote` is None from the start."""

    @property
    def status(self) -> str:
        """The furthest that it got: "staging", "staged", "local", "remote", "not sent", "fenced" or "failed"."""
        over = self.remote.done()  # before the failures are looked at, or one that comes in between would be raised here
        failure = self.local.failure() or self.remote.failure()
        if failure is not None:
            return "fenced" if isinstance(failure, FencedError) else "failed"
        if over and self.remote.result() is not None:
            return "remote"
        if not self.local.done():
            return "staged" if self.staged.done() else "staging"
        return "not sent" if over and self.has_remote else "local"

    def fail(self, error: BaseException) -> None:
        """Every outcome that is still open becomes `error`."""
        for outcome in (self.staged, self.local, self.remote):
            outcome.fail(error)

    def take_undelivered(self) -> BaseException | None:
        """The failure of this save, if no future of it has given it to anybody yet."""
        failed = [outcome for outcome in (self.staged, self.local, self.remote) if outcome.failure() is not None]
        taken = [outcome.take_undelivered() for outcome in failed]
        return taken[0] if taken and all(error is not None for error in taken) else None

    def count_as_fenced(self) -> None:
        """Somebody has been told that the run has another owner: this save need not tell it again."""
        for outcome in (self.staged, self.local, self.remote):
            if isinstance(outcome.failure(), FencedError):
                outcome.take_undelivered()

    def __repr__(self) -> str:
        return f"SaveHandle({self.snapshot_id}, {self.status})"

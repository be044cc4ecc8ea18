"""What a seeded bug is: an exact replacement in one file, and the suites that must turn red when it is planted.

A *suite* is one of the three machines that look for bugs. Tests, by their node ids; exploration, of one configuration of the protocol;
simulation, of so many lives of a run as it takes. A bug names each suite that has caught it, and where simulation is not among them,
`blind` says why not or how far it was tried.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Known(enum.Enum):
    """The faults that a checkpointing library must be proven safe from: most have destroyed somebody's checkpoints."""

    NO_FILE_FSYNC = "no file fsync"
    NO_DIRECTORY_FSYNC = "no directory fsync"
    FSYNC_AGAIN = "fsync tried again"
    ACKNOWLEDGED_EARLY = "acknowledged before the directory fsync"
    RECORD_BEFORE_PACK = "record before the last pack"
    SHORT_WRITE = "short write ignored"
    NO_DIGEST = "digest not checked on restore"
    NO_WRITE_ID = "write id ignored on 412"
    CONFLICT_FOR_EXISTS = "409 taken for 412"
    CLEANUP_ON_UNKNOWN = "cleanup on unknown"
    RECORD_DELETED = "log record deleted by GC"
    LIVE_PACK_SWEPT = "sweep of a pack that a live child names"
    PINS_IGNORED = "pins ignored"
    LIST_ERROR = "list error taken for empty"
    BASE_UNCHECKED = "base not checked at commit"
    SESSION_UNCHECKED = "session not checked at commit"
    SESSION_BY_CLOCK = "session from the clock"
    NEWEST_BY_NAME = "newest by name sort"
    LOCAL_TRUSTED = "local tier trusted unverified"
    RANKS_DIFFER = "ranks restore different snapshots"
    QUEUE_DROPPED = "queue entry dropped before commit"
    CREDENTIALS_SHOWN = "credentials in repr"
    PATH_UNCHECKED = "path joined unchecked"
    STALE_BUFFER = "stale staged buffer written"


@dataclass(frozen=True, slots=True)
class Pytest:
    """Node ids, quick ones; one that fails is enough."""

    nodes: tuple[str, ...]

    def __str__(self) -> str:
        return "tests"


@dataclass(frozen=True, slots=True)
class Exploration:
    """A configuration of `tests.plan.configs`; `lost_answers`: with every request a step of its own, whose answer may be lost."""

    config: str
    lost_answers: bool = False

    def __str__(self) -> str:
        return "exploration"


@dataclass(frozen=True, slots=True)
class Simulation:
    """Lives of a run, from the first seed on."""

    def __str__(self) -> str:
        return "simulation"


Suite = Pytest | Exploration | Simulation
LIVES = Simulation()


@dataclass(frozen=True, slots=True)
class SeededBug:
    """`old`, which is found exactly once in `file`, becomes `new`, and `suites` turn red.

    known  which of the known faults it is, if any
    blind  why simulation is not among its suites: it does not go there, or how far it was tried
    """

    name: str
    file: str
    old: str
    new: str
    suites: tuple[Suite, ...]
    known: Known | None = None
    blind: str = ""


def nodes(*ids: str) -> Pytest:
    """Tests by their node ids."""
    return Pytest(ids)


def planted(bug: SeededBug, text: str) -> str:
    """The file's text with the bug. ValueError unless the place is found exactly once."""
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: its place is found {text.count(bug.old)} times in {bug.file}")
    return text.replace(bug.old, bug.new)

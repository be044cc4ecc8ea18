"""Which processes of a job of many ranks are hit, where, and how: the cells of the crash matrix, each with a name.

    kill-leader-before-manifest-save2

The act, whom it hits, the moment, the step, and the phase of the job in which that step is taken. Who is stalled is stopped until the
others have noticed, and then goes on with them. Steps are named as what is put:
plain words on the local tier, `sent-…` in the bucket, `read-…` for what is read, `said-…`, `decided-…` and `chunk` for notes on the board.
Where disks are filled again, a pack of an earlier snapshot is a `base`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

RANKS = 4
NODES = ("a", "b")

ACTORS = {"coordinator": 0, "beside": 1, "leader": 2, "plain": 3}
"""Roles of one rank: rank 0 leads the first node, rank 2 the other one."""

GROUPS = {"first-node": (0, (0, 1)), "node": (2, (2, 3)), "job": (2, (0, 1, 2, 3))}
"""Roles of several: the rank at whose step it happens, and all that are hit."""

PHASES = ("start", "save1", "upload1", "save2", "upload2", "rollback", "branch", "collect")
"""What the job does, in this order. It ends behind the phase of the scenario, with one more save."""

RESUMING = "restart"
"""The one phase of a job that resumes an earlier one."""

REFILLING = "refill"
"""The same of a job whose nodes have lost their disks: what it resumes is in the bucket, and it fills the disks again."""

ALONE = "-alone"
"""Of a job without a bucket: what lies on the disk of another node is passed on when it is restored."""

PREPARED = {"": 2, ALONE: 2, "-full": 1}
"""The jobs that others resume, and their last steps: as most are, without a bucket, and one whose last save has no bases."""

_STEPS: dict[str, dict[str, tuple[str, ...]]] = {
    "start": {
        "node": ("coordinator", "beside", "leader"),
        "format": ("coordinator", "leader"),
        "sent-format": ("coordinator",),
        "open": ("coordinator", "leader"),
        "sent-open": ("coordinator",),
        "sent-resume": ("coordinator",),
        "resume": ("coordinator", "leader"),
        "decided-opened": ("coordinator",),
    },
    "save1": {
        "pack": ("coordinator", "beside", "leader", "plain"),
        "receipt": ("coordinator", "leader"),
        "manifest": ("coordinator", "leader"),
        "record": ("coordinator", "leader"),
        "said-agree": ("beside", "plain"),
        "decided-agree": ("coordinator",),
        "said-written": ("beside", "leader", "plain"),
        "decided-written": ("coordinator",),
        "said-commit": ("beside", "leader"),
        "decided-commit": ("coordinator",),
    },
    "upload1": {
        "sent-pack": ("coordinator", "leader"),
        "sent-receipt": ("coordinator", "leader"),
        "sent-manifest": ("coordinator", "leader"),
        "sent-upload": ("coordinator", "leader"),
        "sent-record": ("coordinator", "leader"),
    },
    RESUMING: {
        "open": ("coordinator", "leader"),
        "sent-open": ("coordinator",),
        "decided-choose": ("coordinator",),
        "decided-manifest": ("coordinator",),
        "said-match": ("beside", "plain"),
        "sent-resume": ("coordinator",),
        "resume": ("coordinator", "leader"),
        "read-pack": ("coordinator", "beside", "leader", "plain"),
        "decided-land": ("coordinator",),
        "said-load": ("beside", "leader"),
        "decided-load": ("coordinator",),
    },
    "rollback": {
        "sent-resume": ("coordinator",),
        "resume": ("coordinator", "leader"),
        "read-pack": ("beside", "leader"),
        "said-load": ("plain",),
    },
    "branch": {
        "pack": ("plain",),
        "record": ("coordinator", "leader"),
        "sent-record": ("coordinator", "leader"),
    },
    "collect": {
        "retire": ("coordinator", "leader"),
        "sweep": ("coordinator", "leader"),
        "sent-retire": ("coordinator",),
        "sent-sweep": ("coordinator",),
    },
}
_STEPS[REFILLING] = {
    "said-has": ("beside", "leader", "plain"),
    "decided-has": ("coordinator",),
    "base": ("beside", "leader"),
    "pack": ("coordinator", "beside", "leader", "plain"),
    "said-packs": ("beside", "leader", "plain"),
    "decided-packs": ("coordinator",),
    "receipt": ("coordinator", "leader"),
    "manifest": ("coordinator", "leader"),
    "record": ("coordinator", "leader"),
    "said-adopt": ("beside", "leader", "plain"),
    "decided-adopt": ("coordinator",),
}
_STEPS["save2" + ALONE] = {
    "manifest": ("leader",),
    "record": ("coordinator", "leader"),
    "said-commit": ("leader",),
    "decided-commit": ("coordinator",),
}
_STEPS[RESUMING + ALONE] = {
    "open": ("coordinator", "leader"),
    "resume": ("coordinator", "leader"),
    "read-pack": ("beside", "leader"),
    "said-wanted": ("plain",),
    "decided-wanted": ("coordinator",),
    "chunk": ("coordinator",),
    "said-load": ("plain",),
    "decided-load": ("coordinator",),
}
_STEPS["save2"], _STEPS["upload2"] = _STEPS["save1"], _STEPS["upload1"]

_OF_GROUPS = {
    "start": ("open", "resume"),
    "save1": ("pack", "manifest", "record"),
    "upload1": ("sent-receipt", "sent-record"),
    "save2": ("pack", "receipt", "manifest", "record"),
    "upload2": ("sent-pack", "sent-manifest", "sent-record"),
    RESUMING: ("open", "resume", "read-pack"),
    RESUMING + ALONE: ("open", "resume", "read-pack"),
    REFILLING: ("pack", "receipt", "manifest", "record"),
    "save2" + ALONE: ("record",),
    "rollback": ("resume",),
    "branch": ("record",),
}


_ALL_WAYS = (("kill", "before"), ("kill", "after"), ("stop", "before"), ("stop", "after"))


_GOING_ON = ("save1", "upload1", "save2", "upload2", "branch", REFILLING)
"""Phases in which a job goes on when a rank that was late is back: only that save has failed, or that refill."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One cell. `actor`: the rank at whose step it happens; `hit`: the ranks that are killed or stopped there."""

    act: str
    role: str
    moment: str
    step: str
    phase: str
    actor: int
    hit: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.act}-{self.role}-{self.moment}-{self.step}-{self.phase}"

    @property
    def phases(self) -> tuple[str, ...]:
        """Of the job that is hit."""
        return (self.during,) if self.resumes else PHASES[: PHASES.index(self.during) + 1]

    @property
    def resumes(self) -> bool:
        """The job that is hit goes on from what an earlier one has saved."""
        return self.during in (RESUMING, REFILLING)

    @property
    def refills(self) -> bool:
        """This job, and the next one, fill the disks that the nodes have lost."""
        return self.during == REFILLING

    @property
    def during(self) -> str:
        """The phase, with a bucket or without one."""
        return self.phase.removesuffix(ALONE)

    @property
    def alone(self) -> bool:
        """There is no bucket."""
        return self.phase.endswith(ALONE)

    @property
    def prepared(self) -> tuple[str, int]:
        """Which of the prepared jobs is resumed, and its last step.

        One without bases where a pack is not written: whether bases are there is looked at again before the record.
        """
        kind = ALONE if self.alone else "-full" if self.refills and self.step == "pack" else ""
        return kind, PREPARED[kind]

    @property
    def last_steps(self) -> tuple[int, ...]:
        """Of the saves at the end of the job that is hit: whoever is left must find out there, at the latest, and who is back go on."""
        return (90, 91, 92) if self.act == "stall" and not self.refills else (90,)

    @property
    def lost(self) -> str | None:
        """The node whose disk is gone when the job is started again, with all ranks of it."""
        nodes = {rank * len(NODES) // RANKS for rank in self.hit}
        if self.act != "kill" or self.alone or len(self.hit) == 1 or self._draw(2):
            return None
        return NODES[max(nodes)]

    @property
    def ranks_after(self) -> int:
        """Of the job that goes on: now and then fewer."""
        return 2 if self._draw(3) == 0 else RANKS

    @property
    def wakes(self) -> str:
        """When those that were stopped go on: before the next job starts, in it, or after its end. "": they were killed, or are back."""
        return "" if self.act != "stop" else ("before", "within", "after")[self._draw(3)]

    def _draw(self, of: int) -> int:
        return zlib.crc32(f"{of} {self.name}".encode()) % of


def scenarios() -> Iterator[Scenario]:
    """All of them."""
    for phase, steps in _STEPS.items():
        for step, roles in steps.items():
            for role in roles:
                yield from _at(role, step, phase, _ALL_WAYS)
                if phase.removesuffix(ALONE) in _GOING_ON:
                    yield from _at(role, step, phase, (("stall", "before"), ("stall", "after")))
        for step in _OF_GROUPS.get(phase, ()):
            for role in GROUPS:
                yield from _at(role, step, phase, (way for way in _ALL_WAYS if way != ("stop", "before")))


def _at(role: str, step: str, phase: str, how: Iterable[tuple[str, str]]) -> Iterator[Scenario]:
    actor, hit = GROUPS[role] if role in GROUPS else (ACTORS[role], (ACTORS[role],))
    for act, moment in how:
        yield Scenario(act, role, moment, step, phase, actor, hit)

"""Whole lives of a run against a model that is a few lists: saves, crashes at any write, restarts, outages, roll-backs, collections,
and a second node.

The model knows the *line*: what was acknowledged on the current lineage, oldest first. After a crash there may be two of them, until
the next restore shows which one it was. Nothing here is random but hypothesis' choices: a failure is replayed from its printed steps.
"""

from __future__ import annotations

import os
from contextlib import suppress

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.engine.runkit import Job, Killed, Place, Request
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.errors import NotFoundError, StoreError
from tieredckpt.plan.lineage import current_line
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.store.memory import MemoryStore

FEW = 40
LIVES = int(os.environ.get("TIEREDCKPT_TEST_LIVES", FEW))
"""The same few in every run of all tests; many others by `make lives LIVES=…`."""

KEEP = Retention(KeepLast(2), KeepLast(3))
MOMENTS = st.sampled_from([0] * 30 + list(range(1, 13)))
"""0: nothing happens; n: the process is killed at its n-th write from now."""


class Lives(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.place = Place(journal=[])
        self.disks = [self.place.local, MemoryStore("other disk")]
        self.lines: list[list[str]] = [[]]
        self.job: Job | None = None
        self.step = 0
        self.open: dict[str, SaveHandle] = {}
        self.remote_acked: set[str] = set()
        self.retired: set[str] = set()
        self.offline = False
        self.start(False)

    # ------------------------------------------------------------------------------------------ the process

    def start(self, out_of_reach: bool, moment: int = 0, lost: bool = False) -> None:
        """A new process restores. With `moment`, it is killed at that write (`lost`: which had been applied)."""
        self.offline = out_of_reach
        try:
            self.job = self.place.job(out_of_reach=out_of_reach, retention=KEEP)
        except StoreError:  # no run on this disk yet, and no bucket
            assert out_of_reach
            self.job = None
            return
        self.arm(moment, lost)
        expected = [self.expected(line) for line in self.lines]
        try:
            restored = self.job.restore()
        except Killed:
            self.job = None
            self.lines += [line[: line.index(name) + 1] for line, name in zip(self.lines, expected, strict=True) if name in line]
            return
        except (StoreError, NotFoundError) as error:
            # This disk has nothing to go on from; or the run was set back to a snapshot that only a lost disk had: a person decides.
            only_elsewhere = isinstance(error, NotFoundError) and any(self.lines) and expected == [None] * len(expected)
            assert out_of_reach or only_elsewhere
            self.job.die()
            self.job = None
            return
        finally:
            self.disarm()
        self.settle(restored, expected)

    def settle(self, restored: str | None, expected: list[str | None]) -> None:
        if self.offline and restored not in expected and expected == [None] * len(expected):
            # This disk does not know of a roll-back on the other one, and neither can it ask: it goes on with its own past, and the
            # bucket will refuse what it saves.
            self.job_is_dead()
            self.bury()
            return
        assert restored in expected, f"restored {restored}, expected one of {expected}"
        line = self.lines[expected.index(restored)]
        self.lines = [line[: line.index(restored) + 1] if restored is not None else []]

    def expected(self, line: list[str]) -> str | None:
        """The newest of the line that a restore can have now: all of it is on this disk, or else what the bucket has."""
        local = self.place.log("local").live if self.place.store("local").stat("format.json") else {}
        remote = {} if self.offline else self.place.log("remote").live
        if line and line[-1] in local:
            return line[-1]
        return next((name for name in reversed(line) if name in remote or (self.offline and name in local)), None)

    def arm(self, moment: int, lost: bool) -> None:
        """Killed at the `moment`-th write from now, on whichever tier."""
        if not moment or self.job is None:
            return
        count = 0

        def die(request: Request) -> Killed | None:
            nonlocal count
            count += request.method in ("create", "put", "delete")
            if count < moment:
                return None
            self.job_is_dead()
            return Killed()

        for wire in self.job.wires:
            if lost:
                wire.lost_answer = die
            else:
                wire.fault = die

    def job_is_dead(self) -> None:
        assert self.job is not None
        self.job.die()

    def disarm(self) -> None:
        for wire in self.job.wires if self.job is not None else ():
            wire.fault = wire.lost_answer = None

    @property
    def alive(self) -> bool:
        return self.job is not None

    def bury(self) -> None:
        """If the process was killed, it is gone."""
        if self.job is not None and any(wire.dead for wire in self.job.wires):
            self.job, self.open = None, {}

    # ------------------------------------------------------------------------------------------ rules

    @precondition(lambda self: self.alive)
    @rule(moment=MOMENTS, lost=st.booleans())
    def save(self, moment: int, lost: bool) -> None:
        assert self.job is not None
        self.step += 1
        self.arm(moment, lost)
        try:
            handle = self.job.save(self.step)
        except Killed:
            self.bury()
            return
        self.disarm()
        line = [*self.lines[0], handle.snapshot_id]
        killed = any(wire.dead for wire in self.job.wires)
        if killed and (not handle.local.done() or handle.local.exception(0) is not None):
            self.lines.append(line)  # the record may be in the log all the same
        else:
            assert handle.local.result(0).current
            self.lines = [line]
            self.open[handle.snapshot_id] = handle
        self.bury()

    @precondition(lambda self: self.alive)
    @rule(moment=MOMENTS, lost=st.booleans())
    def work(self, moment: int, lost: bool) -> None:
        assert self.job is not None
        self.arm(moment, lost)
        self.job.work()
        self.disarm()
        self.acknowledge()
        self.bury()

    def acknowledge(self) -> None:
        for name, handle in list(self.open.items()):
            if handle.remote.done():
                if isinstance(handle.remote.exception(0), Killed):
                    continue
                info = handle.remote.result(0)
                if info is None:
                    assert name not in self.lines[0], "a snapshot of the lineage was given up"
                else:
                    self.remote_acked.add(name)
                del self.open[name]

    @precondition(lambda self: self.alive)
    @rule(saves=st.integers(1, 5), sends=st.booleans())
    def train(self, saves: int, sends: bool) -> None:
        """An undisturbed while, so that lives get long."""
        for _ in range(saves):
            self.save(0, False)
            if sends:
                self.work(0, False)

    @precondition(lambda self: self.alive)
    @rule()
    def crash(self) -> None:
        self.job_is_dead()
        self.bury()

    @precondition(lambda self: not self.alive)
    @rule(out_of_reach=st.booleans(), moment=MOMENTS, lost=st.booleans())
    def restart(self, out_of_reach: bool, moment: int, lost: bool) -> None:
        self.start(out_of_reach, moment, lost)

    @precondition(lambda self: self.alive)
    @rule(on=st.booleans())
    def outage(self, on: bool) -> None:
        assert self.job is not None
        self.job.outage(on)

    @precondition(lambda self: self.alive and len(self.lines[0]) > 1 and not self.job.remote.cut)
    @rule(back=st.integers(0, 4), moment=MOMENTS, lost=st.booleans())
    def roll_back(self, back: int, moment: int, lost: bool) -> None:
        assert self.job is not None
        line = self.lines[0]
        target = line[max(0, len(line) - 1 - back)]
        live = target in self.place.log("local").live or target in self.place.log("remote").live
        self.arm(moment, lost)
        try:
            restored = self.job.restore(snapshot=target)
        except NotFoundError:
            assert not live
        except Killed:
            self.lines.append(line[: line.index(target) + 1])
        else:
            assert restored == target
            self.lines = [line[: line.index(target) + 1]]
        self.disarm()
        self.bury()

    @precondition(lambda self: self.alive and not self.job.remote.cut)
    @rule(moment=MOMENTS, lost=st.booleans())
    def collect(self, moment: int, lost: bool) -> None:
        assert self.job is not None
        self.arm(moment, lost)
        with suppress(Killed):
            self.job.run.gc(dry_run=False)
        self.disarm()
        self.bury()

    @precondition(lambda self: not self.alive)
    @rule()
    def change_disks(self) -> None:
        """The other node goes on, with what it has: nothing, or what it had when it was here last."""
        self.place.local = self.disks[1] if self.place.local is self.disks[0] else self.disks[0]
        self.start(False)

    # ------------------------------------------------------------------------------------------ what holds at any moment

    @invariant()
    def whatever_is_live_is_whole(self) -> None:
        for tier in ("local", "remote"):
            if self.place.store(tier).stat("format.json"):
                self.place.check_tier(tier)

    @invariant()
    def what_was_acknowledged_is_kept(self) -> None:
        """I9: the newest is somewhere; what was retired had enough successors, and was in the bucket or behind something there."""
        logs = [self.place.log(tier) for tier in ("local", "remote") if self.place.store(tier).stat("format.json")]
        if not self.alive or len(self.lines) > 1:
            # What a killed process retired was judged by a line that may be another one when it is known again.
            self.retired = self.retired.union(*(log.retired for log in logs))
            return
        line = self.lines[0]
        local, remote = logs
        if line:
            assert line[-1] in local.live or line[-1] in remote.live, "the newest snapshot is gone"
        assert self.remote_acked & set(line) <= set(remote.commits)
        for state, least in ((local, 2), (remote, 3)):
            for name in (state.retired - self.retired) & set(line):
                later = line[line.index(name) + 1 :]
                assert len([one for one in later if state.known(one)]) >= least, f"{name} was retired too early"
                assert state is remote or any(remote.known(one) for one in (name, *later)), f"{name} still had to be sent"
        self.retired |= local.retired | remote.retired

    @invariant()
    def what_was_given_up_does_not_come_back(self) -> None:
        if self.alive and len(self.lines) == 1 and not self.offline:
            assert set(current_line(self.place.log("remote"))) <= set(self.lines[0])


def test_lives():
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=LIVES,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=LIVES == FEW,
            suppress_health_check=list(HealthCheck),
        ),
    )

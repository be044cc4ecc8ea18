"""One scenario from its beginning to its end, and what must hold then whatever was hit, and where.

A job is hit; whoever is left ends, soon, and names who is missing. Another job goes on: the same snapshot on all of its ranks, bit for
bit a state that was saved, none older than the newest that was reported as committed. It saves, and all of it arrives. What was stopped
wakes up, before, meanwhile or afterwards, and changes nothing of that; what was only stalled goes on with the others. At the end no byte
of any tier is damaged, and no log breaks a rule.

Where nodes had lost their disks, what the next job resumes is adopted by all of them, if none had adopted it before. And before and after
that job, one without the bucket goes on from what the logs say is whole on the disks, or says that there is nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tieredckpt as tc
from tests.crash.job import Host, Job
from tests.crash.points import ALONE, NODES, PHASES, PREPARED, RANKS, REFILLING, RESUMING, Scenario
from tests.crash.rank import Orders
from tieredckpt.plan.log_state import EMPTY, LogState

State = tuple[int, int]
"""Life and step."""

_END_S = 40.0
_MORE = 2


def prepare(place: Path) -> None:
    """Jobs that have ended in good order, to be resumed: made once, and copied."""
    for name, steps in PREPARED.items():
        made, phases = _made(place / f"prepared{name}"), PHASES[: 1 + 2 * steps]
        with Host() as host, Job(Orders(made, "prepared", 0, RANKS, host.port, phases, bucket=name != ALONE)) as job:
            _require_good_end(job)


def _made(place: Path) -> Path:
    (place / "bucket").mkdir(parents=True, mode=0o700)
    return place


def play(scenario: Scenario, root: Path) -> None:
    """In a directory of its own, beside what was prepared. AssertionError if anything is not as it must be."""
    place = root / scenario.name
    _begin(scenario, root, place)
    with Host() as host:
        hit = _job(scenario, place, host, 1)
        with hit:
            if scenario.act == "stall":
                _watch_return(hit, scenario)
            else:
                _watch_end(hit, scenario)
            if scenario.wakes == "before":
                _wake(hit, scenario)
            acceptable = acceptable_states(hit.all_reports(), scenario)
            if scenario.lost is not None:
                shutil.rmtree(place / scenario.lost)
            before = _logs(place) if scenario.refills else {}
            if scenario.refills:
                _check_without_bucket(scenario, place / "alone-1", host, acceptable)
            with _job(scenario, place, host, 2) as after:
                if scenario.wakes == "within":
                    moment = "resumed" if scenario.refills else "local"
                    _await(lambda: any(report["what"] == moment for report in after.reports(0)))
                    _wake(hit, scenario)
                after.wait(tuple(range(scenario.ranks_after)), 2 * _END_S)
            if scenario.lost is not None and None in acceptable and _is_refused(after):
                with _job(scenario, place, host, 2, fresh=True) as after:
                    after.wait(tuple(range(scenario.ranks_after)), 2 * _END_S)
            _require_good_end(after)
            last = _check_resumed(after, acceptable)
            if scenario.refills:
                _check_adopted(before, _logs(place), after)
                _check_without_bucket(scenario, place / "alone-2", host, [(2, last[1] + _MORE)])
            if scenario.wakes:
                _wake(hit, scenario)
                with _job(scenario, place, host, 3) as again:
                    _require_good_end(again)
                _check_resumed(again, [(2, last[1] + _MORE)])
    for name in NODES if scenario.alone else ("bucket", *NODES):
        check_tier(place / name, [] if name == scenario.lost else [*hit.all_reports(), *after.all_reports()])


def _begin(scenario: Scenario, root: Path, place: Path) -> None:
    """What the job that is hit finds."""
    if not scenario.resumes:
        _made(place)
        return
    shutil.copytree(root / f"prepared{scenario.prepared[0]}", place)
    if scenario.refills:
        for node in NODES:
            shutil.rmtree(place / node)


def _is_refused(job: Job) -> bool:
    """With a disk, the only snapshot has gone, and nobody knows if it was ever told of: whoever wants to begin anew has to say so."""
    codes = [[report["code"] for report in job.reports(rank) if report["what"] == "error"] for rank in range(job.orders.ranks)]
    return all(found == ["NotFoundError"] for found in codes)


def _job(scenario: Scenario, place: Path, host: Host, life: int, *, fresh: bool = False) -> Job:
    """The one that is hit, the one that goes on, and a last one that only looks."""
    orders = Orders(
        place=place,
        job="anew" if fresh else ("prepared", "hit", "after", "last")[life],
        life=life,
        ranks=scenario.ranks_after if life == 2 else RANKS,
        port=host.port,
        phases=scenario.phases if life == 1 else (REFILLING if scenario.refills else RESUMING,),
        more=_MORE if life == 2 else 0,
        lives=(RANKS, RANKS, scenario.ranks_after)[:life],
        bucket=not scenario.alone,
        fresh=fresh,
        scenario=scenario if life == 1 else None,
    )
    return Job(orders)


def _watch_return(job: Job, scenario: Scenario) -> None:
    """Who was late is back: only what was under way has failed, and the last save is committed for all. No save waits for a refill."""
    noticed = ("error", "filled") if scenario.refills else ("error",)
    _await(lambda: bool(job.shared.sprung) and any(report["what"] in noticed for report in job.all_reports()))
    assert job.shared.sprung, f"the step {scenario.step} of rank {scenario.actor} was never reached"
    job.shared.all_are_back()
    _wake(job, scenario)
    job.wait(tuple(range(RANKS)), _END_S)
    for rank in range(RANKS):
        last = scenario.last_steps[-1]
        committed = [report["step"] for report in job.reports(rank) if report["what"] == "local"]
        assert last in committed, f"rank {rank} has not gone on: {job.reports(rank)}"
    if scenario.refills:
        _require_good_end(job)


def _watch_end(job: Job, scenario: Scenario) -> None:
    """Who is left ends, and says who is missing."""
    left = tuple(rank for rank in range(RANKS) if rank not in scenario.hit)
    job.wait(left, _END_S)
    _await(lambda: bool(job.shared.sprung))  # the whole job may be hit
    assert job.shared.sprung, f"the step {scenario.step} of rank {scenario.actor} was never reached"
    if scenario.act == "kill":
        job.wait(scenario.hit, 5)
    else:
        job.await_stopped(scenario.hit)
    for rank in left:
        reports = job.reports(rank)
        assert reports, f"rank {rank} has told nothing"
        assert reports[-1]["what"] == "ended", f"rank {rank} has not come to its end"
        errors = [report["text"] for report in reports if report["what"] == "error"]
        assert errors, f"rank {rank} has noticed nothing"
        named = any(f"rank {one}" in text or f"{one}" in _listed(text) for text in errors for one in scenario.hit)
        assert named, f"rank {rank} names none of {scenario.hit}: {errors}"


def _listed(text: str) -> list[str]:
    """The numbers behind `ranks`: ranks 2, 3 have not …"""
    found: list[str] = []
    for part in text.split("ranks ")[1:]:
        for word in part.split():
            number = word.strip(",:;.[]")
            if not number.isdigit():
                break
            found.append(number)
    return found


def _wake(job: Job, scenario: Scenario) -> None:
    job.go_on(scenario.hit)
    job.wait(scenario.hit, _END_S)


def _await(what: Callable[[], bool]) -> None:
    until = time.monotonic() + _END_S
    while not what() and time.monotonic() < until:
        time.sleep(0.01)


def _require_good_end(job: Job) -> None:
    job.wait(tuple(range(job.orders.ranks)), 2 * _END_S)
    errors = [report for report in job.all_reports() if report["what"] == "error"]
    assert not errors, f"{job.orders.job}: {errors}"
    assert not any(job.ended.values()), f"{job.orders.job} has ended with {job.ended}"


def acceptable_states(reports: Sequence[dict[str, Any]], scenario: Scenario) -> list[State | None]:
    """What the next job may go on from; None: from nothing.

    With all disks in place what was reported as local counts, else what was reported as remote. A roll-back that was under way
    may count or not.
    """
    counted = ("local", "remote") if scenario.lost is None else ("remote",)
    line: list[State | None] = [(0, scenario.prepared[1])] if scenario.resumes else [None]
    floor = 0
    begun_back = False
    for report in reports:
        state = (report.get("life", -1), report.get("step", -1))
        if report["what"] == "begun" and state not in line:
            line.append(state)
        elif report["what"] in counted:
            floor = max(floor, line.index(state))
        elif report["what"] == "resumed" and state == (1, 1) and line[0] != state:
            line, floor = [state], 0
            begun_back = True
    found = line[floor:]
    if scenario.phase == "rollback" and not begun_back:
        found.append((1, 1))
    return found


def _check_resumed(job: Job, acceptable: Sequence[State | None]) -> State:
    """The state that all ranks have gone on from."""
    told = [next(report for report in job.reports(rank) if report["what"] == "resumed") for rank in range(job.orders.ranks)]
    assert not any(report.get("wrong") for report in told), told
    assert len({report.get("snapshot") for report in told}) == 1, f"not the same everywhere: {told}"
    state = (told[0]["life"], told[0]["step"]) if "life" in told[0] else None
    assert state in acceptable, f"{job.orders.job} goes on from {state}, acceptable are {acceptable}"
    return state or (0, 0)


def _logs(place: Path) -> dict[str, LogState]:
    """Of both nodes; an empty one of a node that has lost its disk."""
    logs = dict.fromkeys(NODES, EMPTY)
    for node in NODES:
        if (place / node).exists():
            with tc.Tier.open(place / node) as tier:
                logs[node] = tier.state()
    return logs


def _check_adopted(before: Mapping[str, LogState], now: Mapping[str, LogState], job: Job) -> None:
    """All nodes have what this job has resumed, if none of them knew that `before`, and what it has saved last."""
    reports = job.reports(0)
    resumed = next(report["snapshot"] for report in reports if report["what"] == "resumed")
    saved = [report["snapshot"] for report in reports if report["what"] == "local"][-1]
    if not any(log.known(resumed) for log in before.values()):
        lacking = [node for node, log in now.items() if not log.known(resumed)]
        assert not lacking, f"{resumed} could be adopted, and was not by {lacking}"
    assert saved in whole(now), f"{saved} is not whole: {now}"


def whole(logs: Mapping[str, LogState]) -> list[str]:
    """The snapshots that all nodes which are here have, and that name these nodes and no others."""
    ids = {log.opens[log.newest].node for log in logs.values() if log.newest is not None}
    first, *others = logs.values()
    return [
        name
        for name, record in first.live.items()
        if set(record.nodes) == ids and all(name in log.live and log.live[name].nodes == record.nodes for log in others)
    ]


def _check_without_bucket(scenario: Scenario, place: Path, host: Host, acceptable: Sequence[State | None]) -> None:
    """On copies of the disks: a job without the bucket goes on from what is whole there, or all of its ranks say that there is nothing."""
    place.mkdir()
    for node in NODES:
        if (place.parent / node).exists():
            shutil.copytree(place.parent / node, place / node)
            check_tier(place / node)
    found = whole(_logs(place))
    lives = (RANKS, RANKS, scenario.ranks_after)
    with Job(Orders(place, place.name, 3, RANKS, host.port, (RESUMING,), lives=lives, bucket=False)) as job:
        job.wait(tuple(range(RANKS)), 2 * _END_S)
    if not found:
        assert _is_refused(job), f"nothing is whole, and {job.all_reports()}"
        return
    _require_good_end(job)
    _check_resumed(job, acceptable)
    resumed = next(report["snapshot"] for report in job.reports(0) if report["what"] == "resumed")
    assert resumed == max(found), f"{resumed} was resumed, and {found} is whole"


def check_tier(place: Path, reports: Sequence[dict[str, Any]] = ()) -> None:
    """AssertionError for any finding of `verify`, and for a snapshot that was reported as committed here, by whomever and whenever,
    and that the log does not know."""
    with tc.Tier.open(place) as tier:
        report = tier.verify()
        assert report.ok, f"{place.name}: {[str(finding) for finding in report.findings]}"
        assert not report.other_files, f"{place.name}: {report.other_files}"
        log = tier.state()
        told = [one["snapshot"] for one in reports if one["what"] == tier.name]
        assert all(map(log.known, told)), f"{place.name}: {told} were reported, the log knows {list(log.live)}"

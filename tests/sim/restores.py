"""What a session goes on from: did it have to take more?

Beside `auditor`. Judged from the logs as they were right before each `resume`, and only where the rule leaves no doubt: what a user has
chosen, and what somebody has damaged, is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.sim.ledger import Ledger, Moment
from tests.sim.places import Place
from tests.sim.process import Story
from tieredckpt.format import keys
from tieredckpt.format.records import CommitRecord, ResumeRecord
from tieredckpt.model.ids import original_of, parse_snapshot_id


class Restores:
    """An automatic choice goes on from the furthest that it may have, and from nothing that was given up."""

    def __init__(self, story: Story, places: Mapping[str, Place]) -> None:
        self._story = story
        self._places = places
        self._remote = places["remote"]
        self._judged: set[tuple[str, str]] = set()
        """Place and digest of each `resume` that was looked at."""

    def look(self, place: Place) -> list[str]:
        found, ledger = [], place.ledger
        for seq, (_, record) in enumerate(ledger.records, 1):
            if not isinstance(record, ResumeRecord) or record.how != "auto" or (place.name, record.digest) in self._judged:
                continue
            self._judged.add((place.name, record.digest))
            if place.is_remote:
                found += self._revives(ledger, ledger.moments[seq - 1].last_resume, original_of(record.target))
                continue
            best = self._best_here(place, seq, record)
            if best is not None and not ledger.is_behind(best, original_of(record.target)):
                found.append(f"{place.name}: record {seq} resumes {record.target}, and {best} was there")
        return found

    def _revives(self, ledger: Ledger, last: ResumeRecord | None, target: str) -> list[str]:
        """What the run was set back behind is resumed by nothing automatic."""
        saved = self._story.saves.get(target)
        if last is None or saved is None or ledger.is_behind(target, original_of(last.target)) or self._was_half_way(last):
            return []
        name = parse_snapshot_id(target)
        since = name.session == last.session and name.counter >= last.next_save
        return (
            []
            if since or last.session in saved.continues
            else [f"{target} was given up, and an automatic restart goes on from it"]
        )

    def _was_half_way(self, resume: ResumeRecord) -> bool:
        """Did its session end before its own disk knew of it? Nobody was told that it had gone back, and offline nobody can know."""
        logs = [place.ledger for place in self._places.values() if not place.is_remote and resume.session in place.ledger.opens]
        return bool(logs) and not any((resume.session, resume.number) in log.resumes for log in logs)

    def _best_here(self, place: Place, seq: int, record: ResumeRecord) -> str | None:
        """The furthest snapshot on this disk that the session had to take, None if it is not known for sure."""
        before = place.ledger.moments[seq - 1]
        there = self._remote_before(record)
        if record.remote and there is None:
            return None
        alive = {original_of(name): (name, commit) for name, commit in before.live.items()}
        for name in place.ledger.line(before.tip):
            if name not in alive or name in before.failed:
                continue
            snapshot, commit = alive[name]
            if is_suspect(place, snapshot):
                return None
            if there is None or self._continues(place, there, name, commit):
                return name
        return None

    def _remote_before(self, record: ResumeRecord) -> Moment | None:
        """None where it is not known, or where a user has chosen: a roll-back that failed half way is gone on with."""
        if not record.remote:
            return None
        ledger = self._remote.ledger
        seq = ledger.resumes.get((record.session, record.number))
        if seq is None:
            return None
        _, there = ledger.records[seq - 1]
        return ledger.moments[seq - 1] if isinstance(there, ResumeRecord) and there.how == "auto" else None

    def _continues(self, place: Place, there: Moment, name: str, commit: CommitRecord) -> bool:
        """Does the local `name` go on where the bucket's line ends, with nobody in between?"""
        last = there.last_resume
        if last is None:
            return True
        if there.head is not None and not place.ledger.is_behind(there.head, name):
            return False
        target = original_of(last.target)
        mine = commit.origin == last.session and parse_snapshot_id(name).counter >= last.next_save
        if not place.ledger.is_behind(target, name) or not (mine or last.session in commit.continues):
            return False
        tip = there.tip or target
        return place.ledger.is_behind(tip, name)


def is_suspect(place: Place, snapshot: str) -> bool:
    """Was anything of it ever damaged or lost on purpose? Also where it is not known what belongs to it."""
    known = place.sizes.get(snapshot)
    return known is None or place.was_hurt((*known, keys.manifest_key(snapshot)))

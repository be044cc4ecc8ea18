"""What somebody was told or had to rely on, held against the logs: what was acknowledged is there, and nothing goes too early.

Beside `auditor`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.sim.places import Place
from tests.sim.process import Story
from tests.sim.restores import is_suspect
from tieredckpt.engine.commit import ForeignObject
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.errors import ConflictError, OutcomeUnknownError, SaveError, TieredCheckpointError
from tieredckpt.format.records import RetireRecord
from tieredckpt.model.ids import original_of, parse_snapshot_id


class Told:
    """See the module's docstring."""

    def __init__(self, story: Story, places: Mapping[str, Place]) -> None:
        self._story = story
        self._places = places
        self._given_up: set[str] = set()
        self._evictions_seen: dict[str, int] = {}

    def forget(self, place: Place) -> None:
        """Its log is read again from its beginning."""
        self._evictions_seen.pop(place.name, None)

    def acknowledgements(self) -> list[str]:
        found = []
        remote = self._places["remote"]
        for handle, first in self._story.handles:
            place = self._places[first]
            for outcome, where in ((handle.local, place), (handle.remote, remote)):
                if not outcome.done():
                    continue
                if (error := outcome.failure()) is None:
                    if outcome.result() is not None:
                        where.acknowledged.add(handle.snapshot_id)
                    continue
                if where is place and handle.snapshot_id in where.ledger.committed and _says_no(error):
                    found.append(f"I6 {where.name}: {handle.snapshot_id} was told to have failed, and is committed: {error}")
                if isinstance(error.__cause__, ForeignObject):
                    found.append(f"C24 {where.name}: {handle.snapshot_id}: its own object was taken for a foreign one: {error}")
        for place in self._places.values():
            lost = place.acknowledged - place.ledger.committed.keys()
            forgotten = place.relied_on - place.ledger.committed.keys() - place.ledger.opens.keys()
            found += [
                f"I3 {place.name}: {name} is in the bucket, and this disk has lost its record" for name in sorted(forgotten)
            ]
            found += [f"{place.name}: {name} was acknowledged and is not committed" for name in sorted(lost)]
        return found

    def given_up(self) -> list[str]:
        """Where everything is sent, a snapshot that nobody will send (its future says None) needs no sending: C49, C60.

        Something later of its line is in the bucket, or the run has left its line.
        """
        found = []
        remote = self._places["remote"].ledger
        for handle, first in self._story.handles:
            if first == "remote" or not handle.has_remote or handle.snapshot_id in self._given_up:
                continue
            if not handle.remote.done() or handle.remote.failure() is not None or handle.remote.result() is not None:
                continue
            self._given_up.add(handle.snapshot_id)
            here = self._places[first].ledger
            if handle.snapshot_id not in here.line(here.tip) or handle.snapshot_id in remote.committed:
                continue
            later = any(here.is_behind(handle.snapshot_id, name) for name in remote.committed)
            continues = remote.tip is None or here.is_behind(remote.tip, handle.snapshot_id)
            left = remote.gave_up(handle.snapshot_id, self._story.saves[handle.snapshot_id].continues)
            if continues and not (later or left):
                found.append(f"C49 {handle.snapshot_id} will not be sent, and nothing later of its line is in the bucket")
        return found

    def evicted(self) -> list[str]:
        """I9, C48: where everything is sent, what leaves a disk is in the bucket, or something later of its line is.

        Tools are told what to keep by whoever calls them.
        """
        found = []
        remote = self._places["remote"].ledger
        for place in self._places.values():
            ledger = place.ledger
            for seq in range(self._evictions_seen.get(place.name, 0), len(ledger.records)):
                record, before = ledger.records[seq][1], ledger.moments[seq]
                if place.is_remote or not isinstance(record, RetireRecord) or record.session is None:
                    continue
                for snapshot in record.snapshots:
                    name = original_of(snapshot)
                    sent = any(ledger.is_behind(name, other) for other in remote.committed)
                    wanted = name in ledger.line(before.tip) and (remote.tip is None or ledger.is_behind(remote.tip, name))
                    wanted = wanted and not remote.gave_up(name, self._story.saves[name].continues)
                    if wanted and not sent and not is_suspect(place, snapshot):
                        found.append(f"I9 {place.name}: {name} is retired, and neither it nor anything later is in the bucket")
            self._evictions_seen[place.name] = len(ledger.records)
        return found

    def evicted_copies(self, place: Place) -> list[str]:
        """What a policy keeps goes for want of room only where the bucket has another copy, whatever is sent and what is not."""
        found = []
        remote = self._places["remote"].ledger
        for seq, (_, record) in enumerate(place.ledger.records, 1):
            if isinstance(record, RetireRecord) and record.reason.startswith("the bucket has it"):
                alone = [name for name in record.snapshots if original_of(name) not in remote.committed]
                found += [
                    f"I9 record {seq} of {place.name}: {name} makes room, and the bucket has never had it" for name in alone
                ]
        return found

    def line(self, place: Place) -> list[str]:
        """I9: what was acknowledged is there, or something newer of its line is."""
        alive = {original_of(name) for name in place.ledger.live}
        for name in place.ledger.line(place.ledger.tip):
            if name in alive:
                break
            if name in place.acknowledged and name not in place.ledger.gone:
                return [f"I9 {place.name}: {name} was acknowledged, and neither it nor anything newer of its line is live"]
        return []

    def swept(self, place: Place) -> list[str]:
        """C25: what may still be committed is condemned by nobody but who has failed to save it, and knows that for sure."""
        handles = {handle.snapshot_id: (handle, first) for handle, first in self._story.handles}
        found = []
        for seq, name, session in place.ledger.swept_early:
            handle, first = handles.get(original_of(name), (None, ""))
            own = session == parse_snapshot_id(name).session and first == place.name
            if not (own and handle is not None and _has_surely_failed(handle)):
                found.append(f"C25 record {seq} of {place.name}: {name} is condemned, and may still be committed")
        return found


def _says_no(error: BaseException) -> bool:
    """Does it say that the save was surely not committed?"""
    return isinstance(error, SaveError) and not isinstance(error.__cause__, OutcomeUnknownError)


def _has_surely_failed(handle: SaveHandle) -> bool:
    """On its first tier, with an error that decides, and where nobody else's objects can lie under its id (I6)."""
    error = handle.local.failure() if handle.local.done() else None
    cause = None if error is None else error.__cause__
    decided = cause is None or (isinstance(cause, TieredCheckpointError) and not isinstance(cause, ConflictError))
    return error is not None and decided and not isinstance(cause, OutcomeUnknownError)

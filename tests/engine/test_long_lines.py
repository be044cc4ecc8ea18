"""More saves between two uploads than a record can name, and uploads that the bucket's log refuses.

A snapshot was refused for ever for a line that did not reach the bucket's head, and the uploader asked again without a pause: each
refusal counted as progress, and `close` waited without an end.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.runkit import Job, Place, Request, begun
from tieredckpt.engine.commit import Committer
from tieredckpt.engine.log import NotAppended
from tieredckpt.errors import StoreError
from tieredckpt.plan import lineage, log
from tieredckpt.plan.log import RefusalReason
from tieredckpt.plan.policies import Every


@pytest.fixture
def short_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "MAX_PREDECESSORS", 6)
    monkeypatch.setattr(log, "MAX_PREDECESSORS", 6)


class AsksWithoutEnd(BaseException):
    """An uploader that does not rest."""


def bounded(job: Job, most: int) -> None:
    """At most so many requests to the bucket."""
    asked: list[Request] = []

    def count(request: Request) -> AsksWithoutEnd | None:
        asked.append(request)
        return AsksWithoutEnd() if len(asked) > most else None

    assert job.remote is not None
    job.remote.fault = count


def after_a_long_outage(place: Place) -> Job:
    job = begun(place, 1, upload="latest")
    job.outage()
    for step in range(2, 12):
        job.save(step)
    return job


def test_a_restart_after_more_unsent_saves_than_a_record_can_name(short_records: None):
    place = Place()
    after_a_long_outage(place).die()
    job = place.job(upload="latest")
    assert (job.restore() or "").startswith("000000000011")
    job.save(100)
    job.end()
    assert place.steps("remote") == [1, 100]
    again = place.job(upload="latest")
    assert (again.restore() or "").startswith("000000000100")
    place.check()


def test_a_session_gets_its_newest_through_after_so_many(short_records: None):
    place = Place()
    job = after_a_long_outage(place)
    job.outage(False)
    bounded(job, 1000)
    job.end()
    assert place.steps("remote") == [1, 11]


def test_uploads_that_are_further_apart_than_a_record_can_name(short_records: None):
    place = Place()
    job = begun(place, 1, upload=Every(steps=10))
    bounded(job, 1000)
    for step in range(2, 13):
        job.save(step)
        job.work()
    assert place.steps("remote") == [1, 10]


def test_c146_an_upload_that_is_refused_rests_is_no_progress_and_says_why(monkeypatch: pytest.MonkeyPatch):
    place = Place()
    job = begun(place, 1)

    publish = Committer.publish

    def refused(self: Committer, *args: Any, **options: Any) -> object:
        if not self.tier.is_remote:
            return publish(self, *args, **options)
        return NotAppended(RefusalReason.OFF_LINEAGE, "not on the current lineage", self.tier.log.state)

    monkeypatch.setattr(Committer, "publish", refused)
    job.save(2)
    bounded(job, 1000)
    with pytest.raises(StoreError, match=r"does not get any further.*not on the current lineage"):
        job.run.wait_while_moving(300.0)
    assert job.run.status().lag.waiting

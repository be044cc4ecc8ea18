"""Seeded bugs: what the suites must notice when it goes missing. `python -m tests.seeded_bugs` runs them, see `__main__`."""

from __future__ import annotations

from tests.seeded_bugs import bugs_of_answers, bugs_of_collection, bugs_of_protocol, bugs_of_ranks, bugs_of_saving, bugs_on_disk

BUGS = (
    *bugs_on_disk.BUGS,
    *bugs_of_answers.BUGS,
    *bugs_of_protocol.BUGS,
    *bugs_of_saving.BUGS,
    *bugs_of_collection.BUGS,
    *bugs_of_ranks.BUGS,
)
"""By what they are about."""

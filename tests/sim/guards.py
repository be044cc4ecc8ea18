"""Guards of the library that can be taken out, and what the simulation sees then: how it is known that it looks.

`python -m tests.sim --guards [WORD]` tells how many lives each one needs; `test_sim` holds the histories that are written down here to what
they show. Where several layers protect the same thing, all of them are taken out: `plan.log.head_is_behind` alone is never needed,
because a node that goes on alone may not roll back, and stays where it is if it has heard of others (`plan.choose`).

Not here: what has not been seen to be missing. `plan.log.packs_not_damaged` stands behind savers that take no marked snapshot for
a base, and no damaged pack from one, and behind uploaders that write such packs again. That a rebase gives up what has vanished
takes two losses in one bucket. Without the room that is promised to staged saves one of them fails in the background and not at the
call, which breaks no promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest

from tieredckpt.engine import background, base, collector, landing, log, log_reader, session, uploader
from tieredckpt.errors import NotFoundError, StoreError
from tieredckpt.model.ids import make_snapshot_id, original_of
from tieredckpt.plan import choose, gc
from tieredckpt.plan.log import RULES, admit
from tieredckpt.plan.log_state import fold
from tieredckpt.store import local, readback
from tieredckpt.store.base import ObjectStore


def without_rule(kind: str, rule: str) -> Callable[[pytest.MonkeyPatch], None]:
    def remove(patch: pytest.MonkeyPatch) -> None:
        rules = tuple(one for one in getattr(RULES, kind) if one.__name__ != rule)
        assert len(rules) == len(getattr(RULES, kind)) - 1
        patch.setattr(log, "admit", partial(admit, rules=replace(RULES, **{kind: rules})))

    return remove


def evict_before_upload(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(background, "must_be_kept", lambda *_: frozenset())


def take_ours_for_foreign(patch: pytest.MonkeyPatch) -> None:
    """What is read back is never compared with what was sent."""
    patch.setattr(readback, "_read_back", lambda store, key, data, limit: _lost(store, key, limit))


def _lost(store: ObjectStore, key: str, limit: int) -> object:
    try:
        return readback.Lost(store.get(key, max_bytes=limit))
    except NotFoundError:
        return None
    except StoreError as error:
        return error


def send_no_packs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(uploader.Uploader, "_is_there", lambda *_: True)


def verify_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(landing, "check_piece", lambda *_: None)


def ignore_what_live_ones_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collector.Collector, "_packs_of_live", lambda _, state: dict.fromkeys(state.live, frozenset()))


def ignore_pins(patch: pytest.MonkeyPatch) -> None:
    """By those who choose, and by the log."""
    must_stay = gc._must_stay
    patch.setattr(gc, "_must_stay", lambda state, name, head: must_stay(replace(state, pinned={}), name, head))
    without_rule("retire", "keeps_pinned")(patch)


class _Forgetful:
    def setdefault(self, _env: object, fresh: object) -> object:
        return fresh


def forget_what_was_not_synced(patch: pytest.MonkeyPatch) -> None:
    """As soon as the directory is opened again."""
    patch.setattr(local, "_doubts", _Forgetful())


def do_not_settle(patch: pytest.MonkeyPatch) -> None:
    """A record that can be seen counts as durable."""
    patch.setattr(log_reader.LogReader, "_fold", lambda _, state, records: fold(state, records))


def sweep_early(patch: pytest.MonkeyPatch) -> None:
    """Whatever is not committed is a leftover."""
    patch.setattr(gc, "is_leftover", lambda state, snapshot: snapshot not in state.commits)


def clean_up_on_unknown(patch: pytest.MonkeyPatch) -> None:
    """The log still refuses to condemn what is committed: nothing is lost, but something is deleted that may be needed."""
    patch.setattr(background, "_is_decided", lambda _error: True)


def delete_on_unknown(patch: pytest.MonkeyPatch) -> None:
    """And nobody asks the log."""
    clean_up_on_unknown(patch)

    def abandon(self: collector.Collector, snapshot: str) -> None:
        stored = collector.list_stored(self._tier)
        for owner in [owner for owner in stored.owners if original_of(owner) == snapshot]:
            self._tier.store.delete([*stored.packs.get(owner, ()), *stored.files.get(owner, ())])

    patch.setattr(collector.Collector, "abandon", abandon)


def take_any_size(patch: pytest.MonkeyPatch) -> None:
    """An object under the key of a pack is that pack."""
    patch.setattr(base, "_is_there", lambda tier, pack: tier.store.stat(pack.key) is not None)
    patch.setattr(uploader.Uploader, "_is_there", lambda _, remote, pack, listed=None: remote.store.stat(pack.key) is not None)


def evict_the_only_copy(patch: pytest.MonkeyPatch) -> None:
    """For want of room, whatever the bucket has."""
    order = collector.eviction_order
    patch.setattr(collector, "eviction_order", lambda *args, is_copied, now: order(*args, is_copied=lambda _: True, now=now))


def go_on_from_hearsay(patch: pytest.MonkeyPatch) -> None:
    """A node goes on alone although it has heard that the run is elsewhere."""
    patch.setattr(choose, "_require_own_past", lambda _: None)


def give_ids_twice(patch: pytest.MonkeyPatch) -> None:
    """A step that is saved again by the same session gets the id that it had."""
    patch.setattr(session.Session, "next_snapshot_id", lambda self, step: make_snapshot_id(step, self.id, 1))


def delete_before_the_record(patch: pytest.MonkeyPatch) -> None:
    sweep_all = collector.Collector._sweep_all

    def sweep(self: collector.Collector, names: Sequence[tuple[str, bool]]) -> None:
        self._tier.store.delete([name for name, is_pack in names if is_pack])
        sweep_all(self, names)

    patch.setattr(collector.Collector, "_sweep_all", sweep)


def together(*removed: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Several layers of one protection."""

    def remove(patch: pytest.MonkeyPatch) -> None:
        for one in removed:
            one(patch)

    return remove


@dataclass(frozen=True, slots=True)
class Guard:
    """Taken out, something breaks that `sees` is part of.

    history  a short one that shows it, as long as the engine asks its stores what it asks them now
    kinds    of steps: among the lives with these, whatever their seeds, others show it too
    """

    name: str
    remove: Callable[[pytest.MonkeyPatch], None]
    history: str
    kinds: str
    sees: str


GUARDS: tuple[Guard, ...] = (
    Guard(
        "sessions are compared",
        without_rule("every", "newest_session"),
        "215 start.822 start.416 train.910 freeze.399 start.495 thaw.338",
        "start train start train freeze start thaw",
        "of the fenced session",
    ),
    Guard(
        "a session knows whom it takes over from",
        without_rule("open", "continues_newest"),
        "120 start.972 alone.709 beside.141",
        "start train alone beside",
        "which it does not know",
    ),
    Guard(
        "a state is committed once",
        without_rule("commit", "committed_once"),
        "582 start.654 send.532 train.553 send.154",
        "start send train train send",
        "is committed twice",
    ),
    Guard(
        "the head is kept",
        without_rule("retire", "keeps_head"),
        "7 start.704 train.355 back.423 collect.515",
        "start train train back collect",
        "I9 the head",
    ),
    Guard("pins are kept", ignore_pins, "448 start.682 train.166 pin.78", "start train pin train", "I9 the pinned"),
    Guard("packs of live snapshots are spared", ignore_what_live_ones_name, "908", "start train", "is condemned, which the live"),
    Guard("what has to be sent is kept", evict_before_upload, "28 start.646 queue.553", "start queue train", "C49"),
    Guard("ours is told from foreign", take_ours_for_foreign, "619 start.398 train.748", "start train storm", "C24"),
    Guard("packs are sent before the record", send_no_packs, "211", "start train", "has None bytes"),
    Guard(
        "pieces are verified",
        verify_nothing,
        "54 start.51 train.942 harm.830 start.160",
        "start train harm start",
        "gave something else than was saved",
    ),
    Guard(
        "a failed fsync is remembered",
        forget_what_was_not_synced,
        "867 start.827 send.279 train.915 trouble.762",
        "start send train trouble train trouble",
        "synced again after its fsync has failed",
    ),
    Guard(
        "a record is durable before anybody acts on it",
        do_not_settle,
        "560 start.77 power.474",
        "start train power",
        "this disk has lost its record",
    ),
    Guard(
        "an attempt is left alone for as long as it may be committed",
        sweep_early,
        "970 start.728 train.883 collect.253",
        "start train collect train collect",
        "may still be committed",
    ),
    Guard(
        "nothing is cleaned up on unknown",
        clean_up_on_unknown,
        "887 train.709 trouble.243",
        "start train storm trouble train",
        "may still be committed",
    ),
    Guard(
        "the log is asked before anything is deleted",
        delete_on_unknown,
        "821 start.181 train.891 storm.650",
        "start train storm",
        "and nobody has condemned it",
    ),
    Guard(
        "records go before bytes",
        delete_before_the_record,
        "839 start.59 train.204",
        "start train train",
        "and nobody has condemned it",
    ),
    Guard(
        "what was given up stays so",
        without_rule("commit", "continues_lineage"),
        "870 start.615 back.313 back.472",
        "start back back back",
        "was given up by the resume",
    ),
    Guard(
        "a pack has its size",
        take_any_size,
        "603 start.267 train.385 harm.599 train.456",
        "start train harm train",
        "was damaged, and names its",
    ),
    Guard(
        "what makes room is in the bucket",
        evict_the_only_copy,
        "270 start.287 train.437 room.516",
        "start train room train",
        "makes room, and the bucket has never had it",
    ),
    Guard("an id is given once", give_ids_twice, "179 train.916 train.328 back.967", "start train back train", "I2"),
    Guard(
        "who has heard of others asks the bucket",
        together(go_on_from_hearsay, without_rule("open", "head_is_behind")),
        "59 train.6175 beside.3745 alone.7521",
        "start train pass beside pass alone pass alone pass",
        "over the head",
    ),
)

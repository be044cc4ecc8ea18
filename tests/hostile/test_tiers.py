"""Bad tiers from end to end: every digest up to the log is right, and what a user calls must refuse what the digests cover.

Nothing may be written, deleted or looked at outside of the tier, and whoever cannot read it must not say that all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import tieredckpt as tc
from tests.format import samples
from tests.hostile import blobs
from tests.hostile.driver import DAMAGE, FAILURE, OK, Outcomes, bucket, drive, restore
from tests.hostile.forge import Forgery, Json, changed, compress, dump
from tests.hostile.manifests import CONTRADICTIONS, TREES, with_tree
from tests.hostile.mutations import mutations
from tieredckpt.errors import CorruptionError, UnsupportedVersionError
from tieredckpt.format import keys

Change = Callable[[Forgery], None]
Judge = Callable[[Outcomes], list[str]]


def try_all(cases: Iterable[tuple[str, Change]], judge: Judge, scratch: Path) -> int:
    """Drives a forged tier for each case; all that is wrong at once. Returns how many there were."""
    wrong: list[str] = []
    number = 0
    for name, change in cases:
        number += 1
        forgery = Forgery()
        change(forgery)
        before = dict(forgery.objects)
        with bucket(forgery.objects) as (url, store):
            outcomes = drive(url, scratch / "pulled")
            after = {stat.key: store.get(stat.key, max_bytes=1 << 30) for stat in store.list("")}
        problems = [*outcomes.wrong, *judge(outcomes)]
        if after != before:
            problems.append("the bucket was changed")
        wrong += [f"{name}: {problem}" for problem in problems]
    assert wrong == [], wrong
    assert list(scratch.iterdir()) == []
    return number


def refused(outcomes: Outcomes) -> list[str]:
    """By all who read the manifest of step 30."""
    said_yes = [name for name in ("verify", "diff", "show", "pull") if outcomes.codes.get(name) not in (DAMAGE, FAILURE)]
    if outcomes.codes.get("verify") != DAMAGE:
        said_yes.append("verify")
    return [f"{name} said that all is well" for name in said_yes] + ([] if outcomes.refused else ["it was loaded"])


def damaged(outcomes: Outcomes) -> list[str]:
    """Found by `verify`, and not loaded."""
    found = [] if outcomes.codes.get("verify") == DAMAGE else ["verify found nothing"]
    return found + ([] if outcomes.refused else ["it was loaded"])


def found_by_verify(outcomes: Outcomes) -> list[str]:
    return [] if outcomes.codes.get("verify") == DAMAGE else ["verify found nothing"]


def no_log(outcomes: Outcomes) -> list[str]:
    """A log that cannot be read decides nothing: every command says so."""
    return [f"{name} ended with {code}" for name, code in outcomes.codes.items() if code not in (DAMAGE, FAILURE)]


def manifest_of(text: bytes) -> Change:
    return lambda forgery: forgery.put_manifest(30, text)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def test_the_golden_tier_itself_is_driven_without_a_word(scratch: Path) -> None:
    with bucket(Forgery().objects) as (url, _):
        outcomes = drive(url, scratch / "pulled")
        restore(outcomes, scratch / "node", url)
    assert set(outcomes.codes.values()) == {OK, FAILURE}  # 20 and 30 differ
    assert outcomes.errors == {"load": None, "restore": None}
    assert outcomes.wrong == []


def test_a_forgery_that_changes_nothing_is_good(scratch: Path) -> None:
    """The digests are made right: or the refusals below would be theirs."""
    forgery = Forgery()
    forgery.change_manifest(30, lambda manifest: manifest.update(library="another"))
    forgery.change_record("commit", lambda record: record.update(tags=["forged"]))
    with bucket(forgery.objects) as (url, _):
        assert drive(url, scratch / "pulled").codes["verify"] == OK


def test_manifests_that_contradict_themselves_or_their_log(scratch: Path) -> None:
    """C142, and a manifest of another run under a digest that is right."""
    manifest = Forgery().manifest(30)
    cases = ((name, manifest_of(dump(changed(manifest, change)))) for name, change in CONTRADICTIONS.items())
    assert try_all(cases, refused, scratch) > 80


def test_manifests_with_a_field_dropped_and_some_trees(scratch: Path) -> None:
    manifest = Forgery().manifest(30)
    cases = [(name, manifest_of(text)) for name, text in mutations(manifest) if name.endswith("dropped") and "." not in name]
    cases += [(name, manifest_of(with_tree(manifest, tree))) for name, tree in list(TREES.items())[::6]]
    assert try_all(cases, refused, scratch) > 30


def test_frames_of_manifests(scratch: Path) -> None:
    text = dump(Forgery().manifest(30))
    cases = (
        (name, lambda f, stored=stored: f.put_stored_manifest(30, stored))
        for name, stored in list(blobs.bad_frames(len(text)))[::2]
    )
    assert try_all(cases, refused, scratch) > 10


def test_i1_a_frame_of_a_piece_that_holds_other_bytes_of_the_same_number(scratch: Path) -> None:
    """Its crc is right, and the frame is good: only the digest of the raw bytes says that they are others."""
    stored = blobs.frame(b"\1" * 65536)
    try_all([("other bytes", lambda forgery: forgery.replace_piece(30, stored, bytes(65536)))], damaged, scratch)


def test_manifests_exchanged_and_mixed(scratch: Path) -> None:
    """Each is a good manifest, and not the one that its record is about."""
    good = Forgery()

    def exchange(forgery: Forgery) -> None:
        for step, other in ((20, 30), (30, 20)):
            forgery.put_stored_manifest(step, good.objects[keys.manifest_key(good.snapshot(other))])

    def exchange_without_digests(forgery: Forgery) -> None:
        one, other = (keys.manifest_key(forgery.snapshot(step)) for step in (20, 30))
        forgery.objects[one], forgery.objects[other] = forgery.objects[other], forgery.objects[one]

    def pieces_of_the_other(forgery: Forgery) -> None:
        older = forgery.manifest(20)
        forgery.change_manifest(30, lambda manifest: manifest.update(pieces=older["pieces"], packs=older["packs"]))
        forgery.objects.pop(older["packs"][0]["key"])

    def same_size(forgery: Forgery) -> None:
        stored = bytearray(forgery.objects[keys.manifest_key(forgery.snapshot(30))])
        stored[len(stored) // 2] ^= 1
        forgery.objects[keys.manifest_key(forgery.snapshot(30))] = bytes(stored)

    changes = {function.__name__: function for function in (exchange, exchange_without_digests, same_size)}
    try_all(changes.items(), refused, scratch)
    try_all([("pieces of the other", pieces_of_the_other)], damaged, scratch)


def test_records_with_a_field_changed(scratch: Path) -> None:
    """The last record of some kinds: what is above every decision."""

    def cases() -> Iterator[tuple[str, Change]]:
        for kind in ("commit", "sweep"):
            record = next(record for record in reversed(Forgery().records()) if record["kind"] == kind)
            key = keys.record_key(record["seq"])
            for name, data in list(mutations(record))[:: 12 if kind == "commit" else 20]:
                yield f"{kind}: {name}", lambda forgery, key=key, data=data: forgery.objects.update({key: data})

    assert try_all(cases(), no_log, scratch) > 30


def test_logs_with_holes_and_exchanges(scratch: Path) -> None:
    def swap(forgery: Forgery) -> None:
        one, other = keys.record_key(7), keys.record_key(8)
        forgery.objects[one], forgery.objects[other] = forgery.objects[other], forgery.objects[one]

    def far(seq: int) -> Change:
        return lambda forgery: forgery.objects.update({keys.record_key(seq): dump({**forgery.records()[-1], "seq": seq})})

    cases: dict[str, Change] = {
        "two records exchanged": swap,
        "the first record gone": lambda f: f.objects.pop(keys.record_key(1)) and None,
        "a record in the middle gone": lambda f: f.objects.pop(keys.record_key(5)) and None,
        "a record twice": lambda f: f.objects.update({keys.record_key(12): f.objects[keys.record_key(11)]}),
        "an empty record": lambda f: f.objects.update({keys.record_key(12): b""}),
        "a record of 2 MiB": lambda f: f.objects.update({keys.record_key(12): bytes(2 << 20)}),
        "a record far away": far(1000),
        "a record of the last number of all": far(2**53 - 1),
    }
    try_all(cases.items(), no_log, scratch)


def test_histories_that_no_log_admits(scratch: Path) -> None:
    """Each record is good by itself. What is in a log is law, so readers go by it; `verify` says that nobody may have written it."""
    commit = Forgery().commit(30)
    snapshot, run = commit["snapshot"], samples

    def append(**fields: Json) -> Change:
        return lambda f: f.append({**commit, **fields})

    other = f"000000000031-{commit['session']}-000002"
    cases: dict[str, Change] = {
        "its own predecessor": append(snapshot=other, step=31, predecessors=[other]),
        "a circle": append(snapshot=other, step=31, predecessors=[snapshot, other, snapshot]),
        "a predecessor that nobody knows": append(snapshot=other, step=31, predecessors=[run.OLDER]),
        "a rebase of what is there": append(snapshot=f"{snapshot}-{run.ULID}", rebase_of=snapshot),
        "of a session that never opened": append(session=run.SESSION, snapshot=other, step=31, predecessors=[snapshot]),
        "a resume of what is retired": lambda f: f.append(_resume(f, target=f.records()[2]["snapshot"])),
        "the head retired": lambda f: f.append(_tool("retire", snapshots=[snapshot])),
        "everything retired": lambda f: f.append(_tool("retire", snapshots=[snapshot, f.snapshot(20)])),
        "retired and never there": lambda f: f.append(_tool("retire", snapshots=[run.OLDER])),
        "a live pack condemned": lambda f: f.append(_tool("sweep", packs=[f.manifest(30)["packs"][0]["key"]], snapshots=[])),
        "a live snapshot condemned": lambda f: f.append(_tool("sweep", packs=[], snapshots=[snapshot])),
        "pinned and never there": lambda f: f.append({**_tool("pin"), "snapshot": run.OLDER}),
        "a session that opens twice": lambda f: f.append(next(r for r in f.records() if r["kind"] == "open")),
    }
    assert try_all(cases.items(), found_by_verify, scratch) == len(cases)
    said_before: dict[str, Change] = {
        "committed twice": append(),
        "a resume of what was never here": lambda f: f.append(_resume(f, target=run.OLDER)),
        "unpinned and never there": lambda f: f.append({**_tool("unpin"), "snapshot": run.OLDER}),
    }
    try_all(said_before.items(), lambda _: [], scratch)


def _tool(kind: str, **fields: Json) -> Json:
    record = next(record for record in Forgery().records() if record["kind"] == kind)
    return {**record, **fields}


def _resume(forgery: Forgery, target: str) -> Json:
    return {**next(r for r in reversed(forgery.records()) if r["kind"] == "resume"), "target": target, "number": 1}


def test_packs_under_a_digest_that_is_right(scratch: Path) -> None:
    """A restore reads by the manifest, so not every one of these stops it; `verify` finds each."""
    forgery = Forgery()
    pack = forgery.objects[forgery.manifest(30)["packs"][0]["key"]]
    wanted = [case for case in blobs.bad_packs(pack) if "." not in case[0].split()[0]]
    cases = [(name, lambda f, data=data: f.replace_pack(30, 0, data)) for name, data in wanted[::2]]
    cases = [case for case in cases if not _is_behind_its_manifest(case[1])]
    assert try_all(cases, found_by_verify, scratch) > 30


def _is_behind_its_manifest(change: Change) -> bool:
    """A pack too short for the manifest's pieces: that the manifest is refused for is tested above."""
    forgery = Forgery()
    change(forgery)
    manifest = forgery.manifest(30)
    return any(piece[4] + piece[5] > manifest["packs"][piece[3]]["nbytes"] for piece in manifest["pieces"])


def test_compressed_pieces_under_checksums_that_are_right(scratch: Path) -> None:
    """Frames that hold other than their box: the digest of the raw bytes is that of what they would give."""
    cases = [
        (name, lambda f, stored=stored: f.replace_piece(30, stored, bytes(65536)))
        for name, stored in blobs.bad_frames(65536)
        if 0 < len(stored) <= 4096
    ]
    assert try_all(cases, damaged, scratch) > 15


def test_a_frame_of_another_size_under_every_digest(scratch: Path) -> None:
    """As long as the good one, so that the pack's header is right too; only the box says that it is too small."""
    good = next(piece for piece in Forgery().manifest(30)["pieces"] if piece[8] == "zstd")[5]
    raw = bytes(good - 16)
    stored = blobs.claiming(len(raw), (len(raw) << 3 | 1).to_bytes(3, "little") + raw)
    assert len(stored) == good
    try_all([("a short frame", lambda forgery: forgery.replace_piece(30, stored, raw))], damaged, scratch)


def test_what_says_which_run_this_is(scratch: Path) -> None:
    repository = Forgery().objects[keys.FORMAT_KEY]
    bad = {
        "empty": b"",
        "a web page": b"<!doctype html><html>",
        "2 MiB": bytes(2 << 20),
        "twice": repository * 2,
        "null": b"null",
    }
    cases = [(name, lambda f, data=data: f.objects.update({keys.FORMAT_KEY: data})) for name, data in bad.items()]
    try_all(cases, no_log_or_no_tier, scratch)
    newer = {**Forgery().objects, keys.FORMAT_KEY: repository.replace(b'"version":1', b'"version":2')}
    with bucket(newer) as (url, _), pytest.raises(UnsupportedVersionError, match="2"):
        tc.Tier.open(url)


def no_log_or_no_tier(outcomes: Outcomes) -> list[str]:
    return [f"{name} ended with {code}" for name, code in outcomes.codes.items() if code == OK]


def test_a_restore_touches_nothing_when_it_is_refused(scratch: Path) -> None:
    """I13, with one bad input of each kind: the target is bit for bit what it was."""
    manifest = Forgery().manifest(30)
    cases: dict[str, Change] = {
        "a contradiction": manifest_of(dump(changed(manifest, CONTRADICTIONS["boxes exchanged"]))),
        "another run": manifest_of(dump(changed(manifest, CONTRADICTIONS["another run"]))),
        "a tree": manifest_of(with_tree(manifest, TREES["a key of 5000 tuples"])),
        "a bomb": lambda f: f.put_stored_manifest(30, blobs.claiming(2**30, blobs.run_of_zeros(8192))),
        "a foreign manifest": lambda f: f.put_stored_manifest(30, f.objects[keys.manifest_key(f.snapshot(20))]),
        "a damaged pack": lambda f: f.objects.update({manifest["packs"][1]["key"]: bytes(manifest["packs"][1]["nbytes"])}),
        "a record": lambda f: f.objects.update({keys.record_key(11): b"{}"}),
        "a hole": lambda f: f.objects.pop(keys.record_key(3)) and None,
        "no run": lambda f: f.objects.update({keys.FORMAT_KEY: compress(b"x")}),
    }
    for name, change in cases.items():
        forgery = Forgery()
        change(forgery)
        with bucket(forgery.objects) as (url, _):
            outcomes = Outcomes()
            restore(outcomes, scratch / "node", url)
        assert outcomes.wrong == [], name
        assert outcomes.errors["restore"] is not None, name


def test_a_manifest_of_another_run_is_no_fresh_start(scratch: Path) -> None:
    """The newest one is, and the older one is not: the choice goes back to that, and says why."""
    forgery = Forgery()
    forgery.change_manifest(30, CONTRADICTIONS["another run"])
    with bucket(forgery.objects) as (url, _), tc.Tier.open(url) as tier:
        with pytest.raises(CorruptionError, match=samples.RUN):
            tier.load(step=30)
        with pytest.raises(CorruptionError, match=samples.RUN):
            tier.manifest(forgery.snapshot(30))
        assert tier.load(step=20) is not None

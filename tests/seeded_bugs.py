"""Seeded bugs: guards taken out of a copy of the tree, one at a time; the tests named beside each must turn red. `make seeded-bugs`.

A test suite proves something only if it fails when it should. Each bug here is a real one (most have destroyed somebody's
checkpoints), written as an exact replacement in one file. The unchanged copy must be green first. *Red* means that pytest ran and a
test failed, exit status 1: a collection error or a test that is not there is a broken list and not a red test. A bug that
survives is a missing test; one whose tests were all skipped here (power cuts need root) is neither. `tests/test_seeded_bugs.py`
holds the list to the code, cheaply.

    python -m tests.seeded_bugs [WORD ...]      only the bugs with one of the words in their names
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
AT_A_TIME = 2
_LONGEST_RUN_S = 900
_TOO_LONG = -1
"""In place of pytest's exit status, which is never negative."""

RED = "red"
SKIPPED = "skipped"


@dataclass(frozen=True)
class SeededBug:
    """`old`, which is found exactly once in `file`, becomes `new`. `tests`: pytest node ids, quick ones."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


DURABLE = "tieredckpt/store/durable.py"
WRITE_ORDER = "tests/store/test_durable.py::test_c10_written_synced_linked_directory_synced_then_acknowledged"
RUN_POWER_CUT = "tests/faults/test_power_cut.py::test_c10_a_run_goes_on_after_every_power_cut_with_all_that_was_acknowledged"
SHARED = "tests/faults/test_disk_shared.py"
STORE_POWER_CUT = "tests/faults/test_power_cut.py::test_c10_what_a_store_acknowledged_is_there_after_a_power_cut"

BUGS = (
    # ---------------------------------------------------------------------------------------------- the disk
    SeededBug(
        "no file fsync",
        DURABLE,
        "            os.fsync(fd)  # once: see the module's docstring\n",
        "",
        (STORE_POWER_CUT, WRITE_ORDER),
    ),
    SeededBug(
        "no directory fsync",
        DURABLE,
        "                os.fsync(final_fd)\n",
        "                pass\n",
        (RUN_POWER_CUT, WRITE_ORDER),
    ),
    SeededBug(
        "no fsync of a new directory's parent",
        "tieredckpt/store/safe_path.py",
        "                os.fsync(parent_fd)\n",
        "                pass\n",
        (WRITE_ORDER,),
    ),
    SeededBug(
        "acknowledged before the directory fsync",
        DURABLE,
        "            try:\n                os.fsync(final_fd)\n",
        "            return True\n            try:\n                os.fsync(final_fd)\n",
        (STORE_POWER_CUT, WRITE_ORDER),
    ),
    SeededBug(
        "directory synced before the link",
        DURABLE,
        "            if not _link(temporary, fd, final_fd, name):\n                return False\n            try:\n"
        "                os.fsync(final_fd)\n",
        "            try:\n                os.fsync(final_fd)\n                if not _link(temporary, fd, final_fd, name):\n"
        "                    return False\n",
        (WRITE_ORDER,),
    ),
    SeededBug(
        "fsync tried again",
        DURABLE,
        "            os.fsync(fd)  # once: see the module's docstring\n",
        "            try:\n                os.fsync(fd)\n            except OSError:\n                os.fsync(fd)\n",
        ("tests/store/test_durable.py::test_the_first_fsync_error_ends_the_attempt_and_the_file",),
    ),
    SeededBug(
        "short write ignored",
        DURABLE,
        "        _drop(queue, written)\n",
        "        del queue[-len(batch) :]\n",
        ("tests/store/test_durable.py::test_c17_short_writes_are_continued",),
    ),
    SeededBug(
        "found object not synced before it counts",
        "tieredckpt/store/local.py",
        "                    return None\n            os.fsync(fd)\n",
        "                    return None\n",
        ("tests/store/test_local.py::test_settle_syncs_what_others_wrote_once_and_our_own_never", STORE_POWER_CUT),
    ),
    SeededBug(
        "quarantine not synced",
        "tieredckpt/store/local.py",
        "                    os.fsync(quarantine_fd)\n                    os.fsync(fd)\n",
        "",
        (STORE_POWER_CUT,),
    ),
    SeededBug(
        "found packs not synced before the bucket commits",
        "tieredckpt/engine/uploader.py",
        "        remote.store.settle(packs)\n",
        "        pass\n",
        (f"{SHARED}::test_c10_a_pack_whose_name_could_not_be_synced_is_durable_before_the_bucket_commits",),
    ),
    SeededBug(
        "found packs not synced before they are adopted",
        "tieredckpt/engine/refill.py",
        "            self.local.store.settle(",
        "            list(",
        ("tests/faults/test_disk_sweep.py::test_c10_a_pack_that_a_killed_process_left_is_durable_before_it_is_adopted",),
    ),
    SeededBug(
        "no room to sync a name taken for a refusal",
        "tieredckpt/store/readback.py",
        "    except (StoreError, CapacityError) as error:  # it is there",
        "    except StoreError as error:  # it is there",
        (f"{SHARED}::test_c25_a_commit_that_is_visible_and_could_not_be_synced_is_unknown_and_not_refused",),
    ),
    SeededBug(
        "a log that was set aside is gone on with",
        "tieredckpt/engine/log_reader.py",
        "        if state.seq and self._may_be_set_aside:\n",
        "        if state.seq < 0:\n",
        (f"{SHARED}::test_i7_a_zombie_whose_log_was_set_aside_commits_nowhere_and_is_told",),
    ),
    SeededBug(
        "an object in a directory that was moved away",
        "tieredckpt/store/local.py",
        "            if created and self._has_moved(key, directories):\n",
        "            if created and not directories:\n",
        (f"{SHARED}::test_a_directory_that_another_process_moves_away_takes_no_acknowledged_object_along",),
    ),
    SeededBug(
        "path joined unchecked",
        "tieredckpt/store/base.py",
        "    return len(text) <= MAX_KEY_CHARS and _KEY.fullmatch(text) is not None\n",
        "    return bool(text)\n",
        ("tests/format/test_keys.py", "tests/store/test_conformance.py"),
    ),
    SeededBug(
        "symbolic links followed",
        "tieredckpt/store/local.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC",
        "os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC",
        ("tests/store/test_local.py::test_c142_a_linked_object_is_never_read_or_replaced",),
    ),
    # ---------------------------------------------------------------------------------------------- answers of the bucket
    SeededBug(
        "read-back removed",
        "tieredckpt/store/readback.py",
        "                return Won()\n        except",
        '                return Won()\n            return Lost(b"")\n        except',
        ("tests/store/test_readback.py",),
    ),
    SeededBug(
        "write id ignored on 412",
        "tieredckpt/store/readback.py",
        "    return Won() if found == data else Lost(found)\n",
        "    return Lost(found)\n",
        ("tests/store/test_readback.py", "tests/engine/test_log.py"),
    ),
    SeededBug(
        "a foreign object taken for ours",
        "tieredckpt/store/readback.py",
        "    return Won() if found == data else Lost(found)\n",
        "    return Won()\n",
        ("tests/store/test_readback.py", "tests/engine/test_log.py"),
    ),
    SeededBug(
        "409 taken for 412",
        "tieredckpt/store/s3.py",
        "_EXISTS = frozenset({412, 304})",
        "_EXISTS = frozenset({412, 304, 409})",
        ("tests/store/test_s3.py",),
    ),
    SeededBug(
        "cleanup on unknown",
        "tieredckpt/store/readback.py",
        "            raise _unknown(store, key, undecided) from undecided\n",
        "            store.delete([key])\n            raise _unknown(store, key, undecided) from undecided\n",
        ("tests/engine/test_faults_conditional.py::test_c25_an_unknown_commit_is_reported_and_found_committed_by_the_next_save",),
    ),
    SeededBug(
        "list error taken for empty",
        "tieredckpt/engine/log_reader.py",
        "        last = self._last_listed(state.seq)\n",
        "        try:\n            last = self._last_listed(state.seq)\n        except StoreError:\n            return state\n",
        ("tests/engine/test_log.py::test_failed_list_is_not_an_empty_log", "tests/engine/test_faults_outage.py"),
    ),
    SeededBug(
        "bucket out of reach taken for a new one",
        "tieredckpt/engine/tier.py",
        "a limit of its own\n    except NotFoundError:\n",
        "a limit of its own\n    except (NotFoundError, StoreError):\n",
        ("tests/engine/test_open_out_of_reach.py",),
    ),
    SeededBug(
        "credentials in repr",
        "tieredckpt/store/secret.py",
        '        return "***"\n',
        "        return repr(self._text)\n",
        ("tests/store/test_url.py::test_c145_a_secret_never_shows",),
    ),
    # ---------------------------------------------------------------------------------------------- the protocol
    SeededBug(
        "record before the last pack",
        "tieredckpt/engine/packing.py",
        "        self.store.put(key, [layout.header, *_stored_parts(group, arena)])\n",
        "        self.writing.submit(self.store.put, key, [layout.header, *_stored_parts(group, arena)])\n",
        ("tests/engine/test_packing.py",),
    ),
    SeededBug(
        "remote record although a pack was not sent",
        "tieredckpt/engine/uploader.py",
        "        if failures:\n            first, lost",
        "        if not failures and failures:\n            first, lost",
        ("tests/engine/test_faults_outage.py", "tests/engine/test_bytes_upload.py"),
    ),
    SeededBug(
        "record before the manifest",
        "tieredckpt/engine/commit.py",
        "        self._put_once(keys.manifest_key(prepared.snapshot), prepared.stored)\n",
        "        self.tier.log.append(draft, lambda _s, _r: Facts(packs_of_record=prepared.pack_keys, packs_durable=prepared.pack_keys))\n"
        "        self._put_once(keys.manifest_key(prepared.snapshot), prepared.stored)\n",
        ("tests/engine/test_faults_conditional.py", "tests/engine/test_collection.py"),
    ),
    SeededBug(
        "session not checked at commit",
        "tieredckpt/plan/log.py",
        "    every: tuple[Rule[Record], ...] = (newest_session,)\n",
        "    every: tuple[Rule[Record], ...] = ()\n",
        ("tests/plan/test_log_rules.py",),
    ),
    SeededBug(
        "newest by name sort",
        "tieredckpt/plan/log_state.py",
        "    return next((found for name in ancestry.line(tip) if (found := committed_as.get(name)) in live), None)\n",
        "    return max(live)\n",
        ("tests/plan/test_log_state.py",),
    ),
    SeededBug(
        "queue entry dropped before commit",
        "tieredckpt/engine/uploader.py",
        "        record = local_state.live[waiting[0]]\n",
        '        record = local_state.live[waiting[0]]\n        self.unsendable[record.snapshot] = "taken"\n',
        ("tests/engine/test_faults_outage.py", "tests/engine/test_uploads.py"),
    ),
    SeededBug(
        "stale staged buffer written",
        "tieredckpt/engine/saver.py",
        "        writer = PackWriter(tier.store, self.settings, self.hashing, self.writing)\n",
        "        writer = PackWriter(tier.store, self.settings, self.hashing, self.writing)\n        job.arena.release()\n",
        ("tests/test_checkpointer_capture.py::test_c134_staging_memory_is_not_reused_before_its_save_is_durable",),
    ),
    SeededBug(
        "what an earlier save left in a slot is written",
        "tieredckpt/pytorch/stage.py",
        "        _zero_rests(layout, memory)\n\n",
        "\n",
        ("tests/pytorch/test_stage.py",),
    ),
    # ---------------------------------------------------------------------------------------------- restore
    SeededBug(
        "digest not checked on restore",
        "tieredckpt/engine/pack_check.py",
        '    if verify == "digest" and _digest_of(piece.codec, piece.digest, stored) != piece.digest:\n',
        '    if verify == "never" and _digest_of(piece.codec, piece.digest, stored) != piece.digest:\n',
        ("tests/engine/test_bytes_live_state.py::test_i13_a_forged_piece_with_a_matching_crc_is_found_by_its_digest",),
    ),
    SeededBug(
        "local tier trusted unverified",
        "tieredckpt/engine/landing.py",
        "                whole = _read_verified(tier.store, key, run, arena, self.verify)\n",
        "                if whole := tier is self.local:\n"
        "                    tier.store.read_into(key, run.start, arena[run.slot : run.slot + run.nbytes])\n"
        "                else:\n"
        "                    whole = _read_verified(tier.store, key, run, arena, self.verify)\n",
        ("tests/engine/test_bytes_tiers.py::test_damage_on_the_local_tier_is_made_good_from_the_remote_one",),
    ),
    # ---------------------------------------------------------------------------------------------- collection
    SeededBug(
        "log record deleted by GC",
        "tieredckpt/engine/collector.py",
        "    failures = store.delete(sample) if sample else ()\n",
        "    failures = store.delete([*sample, keys.record_key(1)]) if sample else ()\n",
        ("tests/engine/test_collection.py",),
    ),
    SeededBug(
        "sweep of a pack that a live snapshot names",
        "tieredckpt/plan/log.py",
        "(sweeps_something, sweep_is_bounded, spares_live_ids, spares_live_packs)",
        "(sweeps_something, sweep_is_bounded, spares_live_ids)",
        ("tests/plan/test_log_rules.py",),
    ),
    SeededBug(
        "live packs wanted for a sweep",
        "tieredckpt/plan/gc.py",
        "        if key not in named_by_live and key not in state.condemned_packs\n",
        "        if key not in state.condemned_packs\n",
        ("tests/plan/test_gc.py",),
    ),
    SeededBug(
        "base not checked at commit",
        "tieredckpt/plan/log.py",
        "        packs_not_condemned,\n",
        "",
        ("tests/engine/test_incremental.py",),
    ),
    SeededBug(
        "pins ignored by retention",
        "tieredckpt/plan/gc.py",
        "    if name in state.pinned:\n",
        "    if name in state.pinned and state.hold:\n",
        ("tests/plan/test_gc.py",),
    ),
    SeededBug(
        "pins ignored by the log",
        "tieredckpt/plan/log.py",
        "(retires_live, keeps_head, keeps_newest, keeps_pinned, not_after_damage)",
        "(retires_live, keeps_head, keeps_newest, not_after_damage)",
        ("tests/plan/test_log_rules.py",),
    ),
    SeededBug(
        "bytes first, record last",
        "tieredckpt/engine/collector.py",
        "            self._refresh_for_session()\n            for start in range(0, len(plan.retire), _RETIRE_AT_ONCE):\n",
        "            self._tier.store.delete([item.subject for item in plan.sweep_packs])\n"
        "            self._refresh_for_session()\n            for start in range(0, len(plan.retire), _RETIRE_AT_ONCE):\n",
        ("tests/engine/test_collection.py",),
    ),
)


class Tree:
    """A copy of the working tree that bugs are put into, one at a time, and taken out of again."""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name)
        where = self._run([sys.executable, "-c", "import tieredckpt, tests; print(tieredckpt.__file__, *tests.__path__)"])
        paths = where.stdout.split()
        if len(paths) != 2 or not all(Path(path).is_relative_to(directory) for path in paths):
            raise RuntimeError(f"not the copy is imported, but {where.stdout or where.stderr}")

    def test(self, tests: Sequence[str]) -> tuple[int, str]:
        """pytest's exit status, and the test that failed or the last line.

        In one process: with several, pytest would call a collection error a failure.
        """
        try:
            done = self._run([sys.executable, "-m", "pytest", "-n", "0", "-x", "--tb=no", "--no-header", *tests])
        except subprocess.TimeoutExpired:
            return _TOO_LONG, f"the tests took longer than {_LONGEST_RUN_S} s"
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return done.returncode, (failed or lines or [""])[-1]

    def test_with(self, bug: SeededBug) -> tuple[int, str]:
        path = self._root / bug.file
        text = path.read_text()
        path.write_text(planted(bug, text))
        try:
            return self.test(bug.tests)
        finally:
            path.write_text(text)

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """In the copy, with the copy imported. No byte code: a bug may have the size and the second of what it replaces."""
        env = {**os.environ, "PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            command, cwd=self._root, env=env, capture_output=True, text=True, check=False, timeout=_LONGEST_RUN_S
        )


def planted(bug: SeededBug, text: str) -> str:
    """The file's text with the bug. ValueError unless the place is found exactly once."""
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: its place is found {text.count(bug.old)} times in {bug.file}")
    return text.replace(bug.old, bug.new)


def main(words: Sequence[str]) -> int:
    """0 if every bug turned its tests red."""
    bugs = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="seeded-bugs-") as directory:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(AT_A_TIME):
            (place := Path(directory, str(number))).mkdir()
            trees.put(Tree(place))
        if not _unchanged_is_green(trees, bugs):
            return 1
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            verdicts = list(pool.map(lambda bug: _verdict(trees, bug), bugs))
    print(
        f"{verdicts.count(RED)} of {len(bugs)} seeded bugs turned the tests red, {verdicts.count(SKIPPED)} could not be tried here"
    )
    return 0 if set(verdicts) <= {RED, SKIPPED} else 1


def _unchanged_is_green(trees: SimpleQueue[Tree], bugs: Sequence[SeededBug]) -> bool:
    """Without a bug all of the tests pass. Each tree runs every other file, so that both cores work."""
    tests = sorted({test for bug in bugs for test in bug.tests})
    shares = [share for number in range(AT_A_TIME) if (share := tests[number::AT_A_TIME])]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        results = list(pool.map(lambda share: _with_a_tree(trees, lambda tree: tree.test(share)), shares))
    for status, line in results:
        if status != 0:
            print(f"the unchanged tree is not green (pytest exit status {status}): {line}")
    return all(status == 0 for status, _ in results)


def _verdict(trees: SimpleQueue[Tree], bug: SeededBug) -> str:
    began = time.monotonic()
    status, line = _with_a_tree(trees, lambda tree: tree.test_with(bug))
    if status == 0:
        verdict = SKIPPED if "skipped" in line and "passed" not in line else "SURVIVED"
    else:
        verdict = RED if status == 1 else f"DID NOT RUN ({status})"
    print(f"{bug.name:48} {verdict:12} {time.monotonic() - began:5.1f} s  {line.split(' - ')[0][:150]}", flush=True)
    return verdict


def _with_a_tree(trees: SimpleQueue[Tree], act: Callable[[Tree], tuple[int, str]]) -> tuple[int, str]:
    tree = trees.get()
    try:
        return act(tree)
    finally:
        trees.put(tree)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What makes bytes durable on the local tier, and what it means that they are not."""

from __future__ import annotations

from tests.seeded_bugs.bug import LIVES, Known, SeededBug, nodes

DURABLE = "tieredckpt/store/durable.py"
LOCAL = "tieredckpt/store/local.py"
WRITE_ORDER = "tests/store/test_durable.py::test_c10_written_synced_linked_directory_synced_then_acknowledged"
RUN_POWER_CUT = "tests/faults/test_power_cut.py::test_c10_a_run_goes_on_after_every_power_cut_with_all_that_was_acknowledged"
SHARED = "tests/faults/test_disk_shared.py"
STORE_POWER_CUT = "tests/faults/test_power_cut.py::test_c10_what_a_store_acknowledged_is_there_after_a_power_cut"

BUGS = (
    SeededBug(
        "no file fsync",
        DURABLE,
        "            os.fsync(fd)  # once: see the module's docstring\n",
        "",
        (nodes(STORE_POWER_CUT, WRITE_ORDER), LIVES),
        Known.NO_FILE_FSYNC,
    ),
    SeededBug(
        "no directory fsync",
        DURABLE,
        "                os.fsync(final_fd)\n",
        "                pass\n",
        (nodes(RUN_POWER_CUT, WRITE_ORDER), LIVES),
        Known.NO_DIRECTORY_FSYNC,
    ),
    SeededBug(
        "no fsync of a new directory's parent",
        "tieredckpt/store/safe_path.py",
        "                os.fsync(parent_fd)\n",
        "                pass\n",
        (nodes(WRITE_ORDER), LIVES),
    ),
    SeededBug(
        "acknowledged before the directory fsync",
        DURABLE,
        "            try:\n                os.fsync(final_fd)\n",
        "            return True\n            try:\n                os.fsync(final_fd)\n",
        (nodes(STORE_POWER_CUT, WRITE_ORDER), LIVES),
        Known.ACKNOWLEDGED_EARLY,
    ),
    SeededBug(
        "directory synced before the link",
        DURABLE,
        "            if not _link(temporary, fd, final_fd, name):\n                return False\n            try:\n"
        "                os.fsync(final_fd)\n",
        "            try:\n                os.fsync(final_fd)\n                if not _link(temporary, fd, final_fd, name):\n"
        "                    return False\n",
        (nodes(WRITE_ORDER), LIVES),
    ),
    SeededBug(
        "fsync tried again",
        DURABLE,
        "            os.fsync(fd)  # once: see the module's docstring\n",
        "            try:\n                os.fsync(fd)\n            except OSError:\n                os.fsync(fd)\n",
        (nodes("tests/store/test_durable.py::test_the_first_fsync_error_ends_the_attempt_and_the_file"), LIVES),
        Known.FSYNC_AGAIN,
    ),
    SeededBug(
        "short write ignored",
        DURABLE,
        "        _drop(queue, written)\n",
        "        del queue[-len(batch) :]\n",
        (nodes("tests/store/test_durable.py::test_c17_short_writes_are_continued"), LIVES),
        Known.SHORT_WRITE,
    ),
    SeededBug(
        "found object not synced before it counts",
        "tieredckpt/store/local.py",
        "            try:\n                os.fsync(fd)\n            except OSError as error:\n                with self._lock:\n",
        "            try:\n                pass\n            except OSError as error:\n                with self._lock:\n",
        (nodes("tests/store/test_local.py::test_settle_syncs_what_others_wrote_once_and_our_own_never", STORE_POWER_CUT),),
        blind="not within 150 seeds",
    ),
    SeededBug(
        "quarantine not synced",
        "tieredckpt/store/local.py",
        "                    os.fsync(quarantine_fd)\n                    os.fsync(fd)\n",
        "",
        (nodes(STORE_POWER_CUT),),
        blind="not within 150 seeds",
    ),
    SeededBug(
        "found packs not synced before the bucket commits",
        "tieredckpt/engine/uploader.py",
        "        remote.store.settle(packs)\n",
        "        pass\n",
        (nodes(f"{SHARED}::test_c10_a_pack_whose_name_could_not_be_synced_is_durable_before_the_bucket_commits"),),
        blind="not within 150 seeds",
    ),
    SeededBug(
        "found packs not synced before they are adopted",
        "tieredckpt/engine/refill.py",
        "            local.store.settle(",
        "            list(",
        (nodes("tests/faults/test_disk_sweep.py::test_c10_a_pack_that_a_killed_process_left_is_durable_before_it_is_adopted"),),
        blind="not within 150 seeds",
    ),
    SeededBug(
        "no room to sync a name taken for a refusal",
        "tieredckpt/store/readback.py",
        "    except (StoreError, CapacityError) as error:  # it is there",
        "    except StoreError as error:  # it is there",
        (nodes(f"{SHARED}::test_c25_a_commit_that_is_visible_and_could_not_be_synced_is_unknown_and_not_refused"),),
        blind="not within 150 seeds",
    ),
    SeededBug(
        "a log that was set aside is gone on with",
        "tieredckpt/engine/log_reader.py",
        "        if state.seq and self._may_be_set_aside:\n",
        "        if state.seq < 0:\n",
        (nodes(f"{SHARED}::test_i7_a_zombie_whose_log_was_set_aside_commits_nowhere_and_is_told"),),
        blind="not within 150 seeds",
    ),
    SeededBug(
        "an object in a directory that was moved away",
        "tieredckpt/store/local.py",
        "            if created and self._has_moved(key, directories):\n",
        "            if created and not directories:\n",
        (nodes(f"{SHARED}::test_a_directory_that_another_process_moves_away_takes_no_acknowledged_object_along"), LIVES),
    ),
    SeededBug(
        "path joined unchecked",
        "tieredckpt/store/base.py",
        "    return len(text) <= MAX_KEY_CHARS and _KEY.fullmatch(text) is not None\n",
        "    return bool(text)\n",
        (nodes("tests/format/test_keys.py", "tests/store/test_conformance.py"),),
        Known.PATH_UNCHECKED,
        blind="nobody asks for a strange key there",
    ),
    SeededBug(
        "symbolic links followed",
        "tieredckpt/store/local.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC",
        "os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC",
        (nodes("tests/store/test_local.py::test_c142_a_linked_object_is_never_read_or_replaced"),),
        blind="nobody lays links there",
    ),
    SeededBug(
        "a failed fsync is forgotten when the store is opened again",
        LOCAL,
        "        self._doubt = _doubts.setdefault(env.process, {}).setdefault(self._path, _Doubt())\n",
        "        self._doubt = _Doubt()\n",
        (nodes("tests/store/test_local.py"), LIVES),
    ),
    SeededBug(
        "records of others not synced before they count",
        "tieredckpt/engine/log_reader.py",
        "        self._store.settle([keys.record_key(record.seq) for record in records])\n",
        "",
        (nodes("tests/engine/test_log_reading.py::test_foreign_records_are_settled_before_they_count"), LIVES),
    ),
)

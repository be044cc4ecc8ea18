"""The ways of the bytes: staged, packed, committed, sent, and restored."""

from __future__ import annotations

from tests.seeded_bugs.bug import LIVES, Known, SeededBug, nodes

BUGS = (
    SeededBug(
        "record before the last pack",
        "tieredckpt/engine/packing.py",
        "        self.store.put(key, [layout.header, *_stored_parts(group, arena)])\n",
        "        self.writing.submit(self.store.put, key, [layout.header, *_stored_parts(group, arena)])\n",
        (nodes("tests/engine/test_packing.py"), LIVES),
        Known.RECORD_BEFORE_PACK,
    ),
    SeededBug(
        "remote record although a pack was not sent",
        "tieredckpt/engine/uploader.py",
        "        failures = [error for job in jobs if (error := job.exception()) is not None]\n",
        "        jobs = [job for job in jobs if job.exception() is None]\n        failures: list[Exception] = []\n",
        (nodes("tests/engine/test_faults_outage.py", "tests/engine/test_bytes_upload.py"), LIVES),
    ),
    SeededBug(
        "record before the manifest",
        "tieredckpt/engine/commit.py",
        "        self._put_once(keys.manifest_key(prepared.snapshot), prepared.stored)\n",
        "        self.tier.log.append(draft, lambda _s, _r: Facts(packs_of_record=prepared.pack_keys, packs_durable=prepared.pack_keys))\n"
        "        self._put_once(keys.manifest_key(prepared.snapshot), prepared.stored)\n",
        (nodes("tests/engine/test_faults_conditional.py", "tests/engine/test_collection.py"), LIVES),
    ),
    SeededBug(
        "queue entry dropped before commit",
        "tieredckpt/engine/uploader.py",
        "        record = self._next(remote, waiting, local_state)\n        if record is None:\n"
        "            self._waiting(local_state, remote_state)\n            return False\n",
        "        record = self._next(remote, waiting, local_state)\n        if record is None:\n"
        "            self._waiting(local_state, remote_state)\n            return False\n"
        '        self.unsendable[record.snapshot] = "taken"\n',
        (nodes("tests/engine/test_faults_outage.py", "tests/engine/test_uploads.py"), LIVES),
        Known.QUEUE_DROPPED,
    ),
    SeededBug(
        "stale staged buffer written",
        "tieredckpt/engine/saver.py",
        "        writer = PackWriter(tier.store, self.settings, self.hashing, self.writing)\n",
        "        writer = PackWriter(tier.store, self.settings, self.hashing, self.writing)\n        job.arena.release()\n",
        (nodes("tests/test_checkpointer_capture.py::test_c134_staging_memory_is_not_reused_before_its_save_is_durable"), LIVES),
        Known.STALE_BUFFER,
    ),
    SeededBug(
        "what an earlier save left in a slot is written",
        "tieredckpt/pytorch/stage.py",
        "        _zero_rests(layout, memory)\n\n",
        "\n",
        (nodes("tests/pytorch/test_stage.py"),),
        blind="there is no torch there",
    ),
    SeededBug(
        "digest not checked on restore",
        "tieredckpt/engine/pack_check.py",
        '    if verify == "digest" and _digest_of(piece.codec, piece.digest, stored) != piece.digest:\n',
        '    if verify == "never" and _digest_of(piece.codec, piece.digest, stored) != piece.digest:\n',
        (nodes("tests/engine/test_bytes_live_state.py::test_i13_a_forged_piece_with_a_matching_crc_is_found_by_its_digest"),),
        Known.NO_DIGEST,
        blind="nobody forges a checksum there",
    ),
    SeededBug(
        "local tier trusted unverified",
        "tieredckpt/engine/landing.py",
        "                whole = _read_verified(tier.store, key, run, place, self.verify)\n",
        "                if whole := tier is self.local:\n"
        "                    tier.store.read_into(key, run.start, place.memory[run.slot : run.slot + run.nbytes])\n"
        "                else:\n"
        "                    whole = _read_verified(tier.store, key, run, place, self.verify)\n",
        (nodes("tests/engine/test_bytes_tiers.py::test_damage_on_the_local_tier_is_made_good_from_the_remote_one"), LIVES),
        Known.LOCAL_TRUSTED,
    ),
    SeededBug(
        "packs taken for sent that were not looked for",
        "tieredckpt/engine/uploader.py",
        "strict=True) if not is_there]\n",
        "strict=True) if not is_there and pack.snapshot == there.snapshot]\n",
        (nodes("tests/engine/test_rebase.py", "tests/engine/test_rebase_here.py", "tests/engine/test_chain_damage.py"), LIVES),
    ),
    SeededBug(
        "damage is sent on to the bucket",
        "tieredckpt/engine/uploader.py",
        "            check_pack(pack, pieces.get(pack.key, []), data)  # never send damage on\n",
        "",
        (nodes("tests/engine/test_bytes_upload.py"),),
        blind="not within 75 seeds",
    ),
    SeededBug(
        "a save goes on from what was not loaded",
        "tieredckpt/engine/session.py",
        "        loaded, self.loaded = self.loaded, False\n",
        "        loaded = self.loaded\n",
        (nodes("tests/engine/test_restore_choice.py::test_nothing_is_saved_as_a_descendant_of_what_was_never_loaded"),),
        blind="not within 75 seeds",
    ),
)

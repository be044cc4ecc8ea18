"""Uploads of what several nodes have saved: each sends its part, whoever finds the last receipt commits.

The failures: a snapshot that is visible before all its shards are (C29, C37), one whose parts come from two attempts (C30), an upload that
needs a node which is gone, and one that never comes and holds up all others (C33).
"""

from __future__ import annotations

import pytest

from tests.engine.nodeskit import RANKS, Nodes
from tests.engine.runkit import Killed, names
from tieredckpt.engine.parts import part_of, writers_with_receipts
from tieredckpt.errors import StoreError
from tieredckpt.format import keys
from tieredckpt.format.objects import decode_receipt
from tieredckpt.format.records import SweepRecord


def sent_packs(run: Nodes) -> set[int]:
    """The writers whose packs are in the bucket."""
    return {keys.parse_pack_key(key).writer for key in names(run.bucket, keys.DATA_PREFIX)}  # type: ignore[union-attr]


def test_a_node_has_the_packs_and_receipts_of_its_own_ranks_alone() -> None:
    run = Nodes()
    manifest = run.save(1)
    for node in run.nodes:
        part = part_of(node.tier.store, manifest)
        assert part.writers == set(node.ranks)
        assert part.packs == {pack.key for pack in manifest.packs if keys.parse_pack_key(pack.key).writer in node.ranks}
        assert list(node.state.live) == [manifest.snapshot]


@pytest.mark.parametrize("first", [0, 1])
def test_whoever_finds_the_last_receipt_commits(first: int) -> None:
    run = Nodes()
    manifest = run.save(1)
    run.upload(first)
    assert not run.remote().live, "half of a snapshot is not a snapshot"
    assert sent_packs(run) == set(run.nodes[first].ranks)
    run.upload(1 - first)
    assert list(run.remote().live) == [manifest.snapshot]
    assert run.remote_value(manifest) == run.values[manifest.snapshot]


@pytest.mark.parametrize("first", [0, 1])
def test_a_node_that_is_lost_after_its_receipts_is_not_missed(first: int) -> None:
    """Nor is one that dies after the last receipt and before the record: the other one keeps looking."""
    run = Nodes()
    manifest = run.save(1)
    run.upload(first)
    manifest_key = keys.manifest_key(manifest.snapshot)
    run.nodes[1 - first].wire.fault = lambda request: Killed() if request.keys == (manifest_key,) else None
    with pytest.raises(Killed):
        run.upload(1 - first)
    assert not run.remote().live
    run.upload(first)
    assert list(run.remote().live) == [manifest.snapshot]
    assert run.remote_value(manifest) == run.values[manifest.snapshot]


def test_receipts_in_the_bucket_name_the_node_that_wrote() -> None:
    run = Nodes()
    manifest = run.save(1)
    run.upload(0)
    run.upload(1)
    for node in run.nodes:
        for rank in node.ranks:
            stored = run.bucket.get(keys.receipt_key(manifest.snapshot, rank), max_bytes=1 << 20)
            receipt = decode_receipt(stored)
            assert receipt.node == node.tier.node
            assert [pack.key for pack in receipt.packs] == [
                pack.key for pack in manifest.packs if keys.parse_pack_key(pack.key).writer == rank
            ]


def test_a_save_that_is_on_one_node_only_is_never_committed_and_holds_up_nothing() -> None:
    run = Nodes()
    void = run.save(1, on=[0])
    whole = run.save(2)
    run.upload(0)
    run.upload(1)
    run.upload(0)
    assert list(run.remote().live) == [whole.snapshot]
    assert not run.remote().known(void.snapshot)
    assert writers_with_receipts(run.bucket, void) == {0, 1}


def test_both_nodes_commit_at_the_same_time() -> None:
    """Both have seen all receipts before either has committed: one record, and both go on (I5)."""
    run = Nodes()
    manifest = run.save(1)
    run.upload(0)
    run.nodes[1].uploader.step()
    for number in (0, 1):
        run.upload(number)
    assert [record.snapshot for record in run.remote().live.values()] == [manifest.snapshot]
    later = run.save(2)
    run.upload(1)
    run.upload(0)
    assert list(run.remote().live) == [manifest.snapshot, later.snapshot]


def test_a_chain_over_nodes_sends_each_pack_once() -> None:
    run = Nodes()
    base = run.save(1)
    run.upload(0)
    run.upload(1)
    before = names(run.bucket, keys.DATA_PREFIX)
    child = run.save(2, base=base, same=[0, 2])
    run.upload(1)
    run.upload(0)
    assert list(run.remote().live) == [base.snapshot, child.snapshot]
    added = names(run.bucket, keys.DATA_PREFIX) - before
    assert {keys.parse_pack_key(key).writer for key in added} == {1, 3}  # type: ignore[union-attr]
    assert run.remote_value(child) == run.values[child.snapshot]


def test_packs_of_a_base_are_sent_by_the_node_that_has_them() -> None:
    """The base was superseded and never sent (`upload="latest"`)."""
    run = Nodes(policy="latest")
    base = run.save(1)
    child = run.save(2, base=base, same=[0, 2])
    run.upload(0)
    assert sent_packs(run) == {0, 1}
    run.upload(1)
    assert list(run.remote().live) == [child.snapshot]
    assert run.remote_value(child) == run.values[child.snapshot]


def test_a_condemned_pack_of_a_base_is_told_once_and_the_next_save_is_sent() -> None:
    run = Nodes()
    base = run.save(1)
    child = run.save(2, base=base, same=[0, 2])
    run.upload(0)  # opens the session there, sends parts
    doomed = next(pack.key for pack in base.packs if keys.parse_pack_key(pack.key).writer == 0)  # type: ignore[union-attr]
    tier_log = run.nodes[0].uploader._link.connect().log
    tier_log.append(SweepRecord(packs=(doomed,), snapshots=()))
    whole = run.save(3)
    for number in (1, 0, 1, 0):
        run.upload(number)
    assert list(run.remote().live) == [whole.snapshot]
    for node in run.nodes:
        assert {error.step for error in node.refused} == {1, 2}, [str(error) for error in node.refused]
    assert not run.remote().known(child.snapshot)


def test_an_outage_in_the_middle_of_a_part_ends_well() -> None:
    run = Nodes()
    manifest = run.save(1)
    run.nodes[0].wire.cut = True
    with pytest.raises(StoreError):
        run.upload(0)
    run.upload(1)
    assert not run.remote().live
    run.nodes[0].wire.cut = False
    run.upload(0)
    assert list(run.remote().live) == [manifest.snapshot]
    assert writers_with_receipts(run.bucket, manifest) == set(RANKS)

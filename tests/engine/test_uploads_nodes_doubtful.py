"""What a node sends of a save that has failed, and of one of an earlier session, when the others never send their part."""

from __future__ import annotations

from tests.engine.nodeskit import Nodes
from tieredckpt.engine.worker import IDLE_S


def test_nobody_waits_for_a_save_that_has_failed_and_it_is_sent_last() -> None:
    run = Nodes()
    run.save(1)
    failed = run.save(2, on=[0])
    uploader = run.nodes[0].uploader
    uploader.doubtful.add(failed.snapshot)
    whole = run.save(3)
    uploader.step()
    assert failed.snapshot not in uploader.lag.waiting
    assert whole.snapshot in uploader.lag.waiting
    assert uploader.queue(run.nodes[0].state, run.remote())[-1] == failed.snapshot
    for number in (0, 1, 0):
        run.upload(number)
    assert [record.step for record in run.remote().live.values()] == [1, 3]
    assert uploader.lag.waiting == ()


def test_of_the_latest_alone_a_save_that_has_failed_does_not_take_the_place() -> None:
    run = Nodes(policy="latest")
    run.save(1)
    failed = run.save(2, on=[0])
    run.nodes[0].uploader.doubtful.add(failed.snapshot)
    for number in (0, 1, 0):
        run.upload(number)
    assert [record.step for record in run.remote().live.values()] == [1]


def test_one_that_lies_behind_what_the_bucket_has_and_lacks_a_part_is_not_waited_for() -> None:
    run = Nodes()
    run.save(1)
    part = run.save(2, on=[0])
    run.save(3)
    uploader = run.nodes[0].uploader
    run.upload(0)
    assert part.snapshot in uploader.lag.waiting
    run.upload(1)
    run.upload(0)
    assert uploader.lag.waiting == ()
    assert part.snapshot in uploader.queue(run.nodes[0].state, run.remote())


def test_other_nodes_are_looked_for_soon_and_then_less_and_less() -> None:
    run = Nodes()
    uploader = run.nodes[0].uploader
    assert uploader.rest_s() == IDLE_S
    run.save(1)
    run.upload(0)
    pauses = [uploader.rest_s() for _ in range(20)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 1.0
    assert pauses[0] < pauses[-1] < IDLE_S
    run.save(2)
    run.upload(0)
    assert uploader.rest_s() == pauses[0]
    run.upload(1)
    run.upload(0)
    assert uploader.rest_s() == IDLE_S

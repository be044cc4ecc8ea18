"""What many ranks have to agree upon."""

from __future__ import annotations

from tests.seeded_bugs.bug import Known, SeededBug, nodes

BLIND = "simulated runs have one rank"

BUGS = (
    SeededBug(
        "ranks restore different snapshots",
        "tieredckpt/engine/joint_restore.py",
        "        manifest, stored = self._manifest(choice.chosen)\n",
        "        manifest, stored = self._manifest(choice.chosen)\n"
        "        state = EMPTY if self.local is None else self.local.log.refresh()\n"
        "        if self.local is not None and state.head is not None:\n"
        "            manifest, stored = read_manifest(self.local.store, state.live[state.head], self.local.run)\n",
        (nodes("tests/joint/test_nodes_loss.py"),),
        Known.RANKS_DIFFER,
        blind=BLIND,
    ),
    SeededBug(
        "what some nodes have is taken for whole",
        "tieredckpt/plan/nodes.py",
        "    return all(one is not None and one.manifest_digest == record.manifest_digest for one in found)\n",
        "    return any(one is not None and one.manifest_digest == record.manifest_digest for one in found)\n",
        (nodes("tests/plan/test_nodes.py", "tests/joint/test_nodes_loss.py"),),
        blind=BLIND,
    ),
    SeededBug(
        "a node adopts its part of a snapshot as if it were all of it",
        "tieredckpt/engine/joint_refill.py",
        "            nodes=tuple(self.session.ranks.leaders),\n",
        "            nodes=(local.node,),\n",
        (nodes("tests/joint/test_rehydrate_nodes.py"),),
        blind=BLIND,
    ),
    SeededBug(
        "replicas are not compared",
        "tieredckpt/engine/joint_save.py",
        "        compare_replicas(joined.leaves, plan.held, plan.assignment, digests)\n",
        "",
        (nodes("tests/joint/test_per_rank_job.py"),),
        blind=BLIND,
    ),
    SeededBug(
        "a rank that is not heard of is taken for one that agrees",
        "tieredckpt/engine/council.py",
        "    if deadline.expired:\n        text =",
        "    if False:\n        text =",
        (nodes("tests/engine/test_council.py"),),
        blind=BLIND,
    ),
    SeededBug(
        "commits before all ranks have written",
        "tieredckpt/engine/parts.py",
        "    return frozenset(manifest.writers) - writers_with_receipts(store, manifest)\n",
        "    return frozenset()\n",
        (nodes("tests/engine/test_uploads_many_nodes.py"),),
        blind=BLIND,
    ),
)

"""`tieredckpt show`: what one snapshot consists of, from its manifest. Reads no tensor data."""

from __future__ import annotations

import click
import msgspec

from tieredckpt.cli.options import S3Options, find_snapshot, json_option, open_tier, s3_options, snapshot_json
from tieredckpt.cli.output import count, line, print_json, size, table
from tieredckpt.engine.handle import SnapshotInfo
from tieredckpt.format.manifest import Manifest
from tieredckpt.model.leaf import Leaf

_SUMMARY = ("library", "version", "run", "rebase_of", "world", "consistency", "components", "versions", "environment")
"""Fields of the manifest that are printed as they are."""


@click.command("show")
@click.argument("tier", metavar="PATH|URL")
@click.argument("which", metavar="[ID|STEP|latest]", default="latest")
@s3_options
@json_option
def command(tier: str, which: str, s3: S3Options, as_json: bool) -> int:
    """Show what a snapshot consists of.

    Its components (with kind, and the lowest level of restore that includes them), every leaf with dtype, shape and bytes, the topology
    and the environment that saved it. Without ID or STEP: the latest.

    \b
    tieredckpt show /nvme/run-1
    tieredckpt show s3://bucket/run-1 12000 --json | jq '.leaves[] | select(.dtype == "bfloat16") | .path'
    """
    with open_tier(tier, s3) as opened:
        info = find_snapshot(opened, which)
        manifest = opened.manifest(info.snapshot_id)
    if as_json:
        print_json(_document(info, manifest))
    else:
        _print(info, manifest)
    return 0


def _document(info: SnapshotInfo, manifest: Manifest) -> dict[str, object]:
    fields = {name: msgspec.to_builtins(getattr(manifest, name)) for name in _SUMMARY}
    packs = [{"key": pack.key, "bytes": pack.nbytes, "snapshot": pack.snapshot} for pack in manifest.packs]
    leaves = [_leaf(leaf, manifest) for leaf in manifest.leaves]
    return {"snapshot": snapshot_json(info), **fields, "leaves": leaves, "pieces": len(manifest.pieces), "packs": packs}


def _leaf(leaf: Leaf, manifest: Manifest) -> dict[str, object]:
    """`bytes`: of the whole leaf; an alias has no bytes of its own. `rank`: the only one that has it."""
    return {
        "path": leaf.path,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "bytes": leaf.nbytes,
        "kind": leaf.kind,
        "requires_grad": leaf.requires_grad,
        "alias_of": _alias(leaf, manifest) or None,
        "rank": leaf.rank if leaf.rank >= 0 else None,
    }


def _alias(leaf: Leaf, manifest: Manifest) -> str:
    return manifest.leaves[leaf.alias_of].path if leaf.alias_of >= 0 else ""


def _name(leaf: Leaf) -> str:
    return leaf.path if leaf.rank < 0 else f"{leaf.path} (rank {leaf.rank})"


def _print(info: SnapshotInfo, manifest: Manifest) -> None:
    said = {"pinned": info.pinned, "suspect": info.suspect, "unfenced": info.unfenced}
    marks = [mark for mark, holds in said.items() if holds]
    facts = {
        "snapshot": info.snapshot_id,
        "step": str(info.step),
        "saved": info.created_at,
        "lineage": "current" if info.current else "other",
        "predecessor": info.predecessor,
        "marks": ", ".join(marks),
        "tags": ", ".join(info.tags),
        "metrics": ", ".join(f"{name}={value:g}" for name, value in info.metrics.items()),
        "world": f"{count(manifest.world.ranks, 'rank')}, {count(len(manifest.world.nodes), 'node')}",
        "stored": f"{size(info.bytes_total)} in {count(len(manifest.pieces), 'piece')} and {count(len(manifest.packs), 'pack')}",
        "components": ", ".join(f"{part.name} ({part.kind}, {part.level})" for part in manifest.components),
        "consistency": ", ".join(f"{name}={value}" for name, value in manifest.consistency.items()),
        "versions": ", ".join(f"{name}={value}" for name, value in manifest.versions.items()),
        "environment": ", ".join(f"{name}={value}" for name, value in manifest.environment.items()),
        "library": manifest.library,
    }
    for name, value in facts.items():
        if value:
            line(f"{name + ':':<13} {value}")
    line()
    rows = [
        (_name(leaf), leaf.dtype, str(list(leaf.shape)), size(leaf.nbytes), _alias(leaf, manifest)) for leaf in manifest.leaves
    ]
    table(("LEAF", "DTYPE", "SHAPE", "BYTES", "SAME AS"), rows, right=("BYTES",))

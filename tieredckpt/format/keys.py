"""Every key of both tiers, in one place: how it is made and how it is recognised.

Keys are made from numbers and checked ids only, so none can leave the root. Functions that recognise a listed key give None for
any other key: what is not ours is ignored, and never deleted. One prefix more, for what nobody reads back, belongs to `store.probe`,
which knows no checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass

from tieredckpt.errors import FormatError
from tieredckpt.model.fields import MAX_INT
from tieredckpt.model.ids import MAX_RANK, SNAPSHOT_PATTERN, SnapshotId, parse_snapshot_id

FORMAT_KEY = "format.json"
NODE_KEY = "node.json"
"""Local tier only."""
LATEST_KEY = "latest.json"
"""A hint for people; nothing reads it back."""

LOG_PREFIX = "log/"
LOG_INDEX_PREFIX = "log-index/"
SNAPSHOTS_PREFIX = "snapshots/"
DATA_PREFIX = "data/"

MAX_PACK_NUMBER = 10**6 - 1
"""Packs of one writer in one snapshot: 64 TB of 64 MiB packs."""

_PACK = re.compile(rf"data/([0-9a-f]{{2}})/({SNAPSHOT_PATTERN})\.([0-9]{{5}})-(0|[1-9][0-9]{{0,5}})\.safetensors")
_RECORD = re.compile(r"log/([0-9]{20})\.json")
_INDEX = re.compile(r"log-index/([0-9]{20})\.json")
_MANIFEST = re.compile(rf"snapshots/({SNAPSHOT_PATTERN})/manifest\.json\.zst")
_RECEIPT = re.compile(rf"snapshots/({SNAPSHOT_PATTERN})/receipts/([0-9]{{5}})\.json")
_UPLOAD = re.compile(rf"snapshots/({SNAPSHOT_PATTERN})/upload\.json")
_SNAPSHOT_OBJECT = re.compile(rf"snapshots/({SNAPSHOT_PATTERN})/.+")


@dataclass(frozen=True, slots=True)
class PackName:
    """What a pack's key says: pack number `n` of `writer` in `snapshot`."""

    snapshot: SnapshotId
    writer: int
    n: int


def record_key(seq: int) -> str:
    return f"{LOG_PREFIX}{_seq(seq)}.json"


def parse_record_key(key: str) -> int | None:
    return _parse_seq(_RECORD.fullmatch(key))


def index_key(seq: int) -> str:
    return f"{LOG_INDEX_PREFIX}{_seq(seq)}.json"


def parse_index_key(key: str) -> int | None:
    return _parse_seq(_INDEX.fullmatch(key))


def snapshot_prefix(snapshot: str) -> str:
    """Of everything that is stored about one snapshot, except its packs."""
    parse_snapshot_id(snapshot)
    return f"{SNAPSHOTS_PREFIX}{snapshot}/"


def manifest_key(snapshot: str) -> str:
    return f"{snapshot_prefix(snapshot)}manifest.json.zst"


def parse_manifest_key(key: str) -> SnapshotId | None:
    match = _MANIFEST.fullmatch(key)
    return SnapshotId(match[1]) if match else None


def upload_key(snapshot: str) -> str:
    return f"{snapshot_prefix(snapshot)}upload.json"


def parse_upload_key(key: str) -> SnapshotId | None:
    match = _UPLOAD.fullmatch(key)
    return SnapshotId(match[1]) if match else None


def receipts_prefix(snapshot: str) -> str:
    return f"{snapshot_prefix(snapshot)}receipts/"


def receipt_key(snapshot: str, writer: int) -> str:
    return f"{receipts_prefix(snapshot)}{_writer(writer)}.json"


def parse_receipt_key(key: str) -> tuple[SnapshotId, int] | None:
    """The snapshot and the writer."""
    match = _RECEIPT.fullmatch(key)
    return (SnapshotId(match[1]), int(match[2])) if match else None


def parse_snapshot_of(key: str) -> SnapshotId | None:
    """The snapshot that any key below `SNAPSHOTS_PREFIX` belongs to."""
    match = _SNAPSHOT_OBJECT.fullmatch(key)
    return SnapshotId(match[1]) if match else None


@functools.lru_cache(maxsize=4096, typed=True)
def writer_prefix(writer: int) -> str:
    """Where a writer's packs lie: 256 ranges, the same from save to save, so that a store can spread them."""
    return f"{DATA_PREFIX}{hashlib.sha256(_writer(writer).encode()).hexdigest()[:2]}/"


def pack_key(snapshot: str, writer: int, n: int) -> str:
    parse_snapshot_id(snapshot)
    if type(n) is not int or not 0 <= n <= MAX_PACK_NUMBER:
        raise FormatError(f"a pack number is an int from 0 to {MAX_PACK_NUMBER}, got {n!r}")
    return f"{writer_prefix(writer)}{snapshot}.{_writer(writer)}-{n}.safetensors"


def parse_pack_key(key: str) -> PackName | None:
    """None also for a pack in a directory that is not its writer's: each pack has one key."""
    match = _PACK.fullmatch(key)
    if match is None:
        return None
    name = PackName(SnapshotId(match[2]), int(match[3]), int(match[4]))
    return name if key.startswith(writer_prefix(name.writer)) else None


def _seq(seq: int) -> str:
    if type(seq) is not int or not 1 <= seq <= MAX_INT:
        raise FormatError(f"a log position is an int from 1, got {seq!r}")
    return f"{seq:020d}"


def _parse_seq(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    seq = int(match[1])
    return seq if 1 <= seq <= MAX_INT else None


def _writer(writer: int) -> str:
    if type(writer) is not int or not 0 <= writer <= MAX_RANK:
        raise FormatError(f"a writer is a rank from 0 to {MAX_RANK}, got {writer!r}")
    return f"{writer:05d}"

"""The index: a log's state as bytes, so that a reader need not begin at the first record.

Between `LogState` and the object `log-index/<seq>.json`. An accelerator and nothing else: any index may be deleted or torn at any
time, and one is believed only if it digests itself, and if the log holds the record that it ends at. It is the state, not the
records: what was retired or condemned long ago costs its names only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from tieredckpt.errors import CorruptionError, FormatError
from tieredckpt.format import canonical
from tieredckpt.format.records import CommitRecord, OpenRecord, ResumeRecord, check_record
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.fields import Count, PredecessorText, Sha256Text, SnapshotText, Text, Ulid
from tieredckpt.model.ids import original_of
from tieredckpt.plan.ancestry import Ancestry, Node, learn
from tieredckpt.plan.log_state import LogState, find_head

MAX_INDEX_BYTES = 256 << 20

_FORMAT = "tieredckpt-log-index"
_Path = Annotated[tuple[PredecessorText, ...], Meta(min_length=1)]


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`record`: digest of the record `seq`; `digest`: of the index's canonical bytes with an empty `digest`.

    `tree` holds paths, oldest first: each name's predecessor is the one before it, and the first one has none or is in an earlier
    path. Everything else as in `LogState`; sets are sorted, so that equal states have equal bytes.
    """

    format: str = _FORMAT
    version: int = canonical.VERSION
    digest: str = ""
    seq: Count
    record: Sha256Text
    opens: tuple[OpenRecord, ...]
    newest: Ulid | None
    resumes: tuple[ResumeRecord, ...]
    last_resume: Ulid | None
    commits: tuple[tuple[SnapshotText, Count], ...]
    live: tuple[CommitRecord, ...]
    retired: tuple[SnapshotText, ...]
    pinned: dict[str, Text]
    failed: tuple[SnapshotText, ...]
    damaged_packs: tuple[str, ...]
    condemned_packs: tuple[str, ...]
    condemned_snapshots: tuple[SnapshotText, ...]
    hold: bool
    tip: PredecessorText | None
    tree: tuple[_Path, ...]


def encode_index(state: LogState) -> bytes:
    """The bytes of the index of a log that is not empty."""
    index = _Index(
        seq=state.seq,
        record=state.digest,
        opens=tuple(state.opens.values()),
        newest=state.newest,
        resumes=tuple(state.resumes.values()),
        last_resume=None if state.last_resume is None else state.last_resume.session,
        commits=tuple(state.commits.items()),
        live=tuple(state.live.values()),
        retired=tuple(sorted(state.retired)),
        pinned=dict(sorted(state.pinned.items())),
        failed=tuple(sorted(state.failed)),
        damaged_packs=tuple(sorted(state.damaged_packs)),
        condemned_packs=tuple(sorted(state.condemned_packs)),
        condemned_snapshots=tuple(sorted(state.condemned_snapshots)),
        hold=state.hold,
        tip=state.tip,
        tree=tuple(_paths(state.ancestry)),
    )
    return canonical.dump(msgspec.structs.replace(index, digest=_digest(index)))


def decode_index(data: bytes, seq: int) -> LogState:
    """The state that the index at `seq` holds. FormatError or CorruptionError: ignore it, and read the records.

    The caller still has to compare `state.digest` with the record that the log holds at `seq`.
    """
    what = f"log index {seq}"
    canonical.check_version(data, _FORMAT, max_bytes=MAX_INDEX_BYTES, what=what)
    index = canonical.decode(data, _Index, max_bytes=MAX_INDEX_BYTES, what=what)
    if index.digest != _digest(index):
        raise CorruptionError(f"{what}: its content does not match its digest")
    if index.seq != seq:
        raise CorruptionError(f"{what}: holds the index of record {index.seq}")
    return _state(index, what)


def _state(index: _Index, what: str) -> LogState:
    opens = {record.session: record for record in index.opens}
    resumes = {record.session: record for record in index.resumes}
    if index.last_resume is not None and index.last_resume not in resumes:
        raise FormatError(f"{what}: the last resume is not among the resumes")
    if index.newest not in opens or not opens.keys() >= resumes.keys():
        raise FormatError(f"{what}: the newest session, or one that has resumed, has never opened")
    for record in (*index.opens, *index.resumes, *index.live):
        check_record(record, what)
    commits = dict(index.commits)
    if any(record.snapshot not in commits for record in index.live):
        raise FormatError(f"{what}: a snapshot is live that was never committed")
    committed_as = {original_of(snapshot): snapshot for snapshot in sorted(commits, key=commits.__getitem__)}
    live = {record.snapshot: record for record in index.live}
    ancestry = _ancestry(index)
    return LogState(
        seq=index.seq,
        digest=index.record,
        opens=opens,
        newest=index.newest,
        resumes=resumes,
        last_resume=None if index.last_resume is None else resumes[index.last_resume],
        commits=commits,
        committed_as=committed_as,
        live=live,
        retired=frozenset(index.retired),
        pinned=index.pinned,
        failed=frozenset(index.failed),
        damaged_packs=frozenset(index.damaged_packs),
        condemned_packs=frozenset(index.condemned_packs),
        condemned_snapshots=frozenset(index.condemned_snapshots),
        hold=index.hold,
        tip=index.tip,
        head=find_head(index.tip, ancestry, committed_as, live),
        ancestry=ancestry,
    )


def _paths(ancestry: Ancestry) -> Iterator[tuple[str, ...]]:
    """The tree cut into paths, in the order in which its nodes were learned: most nodes follow their predecessor directly."""
    path: list[str] = []
    for name, predecessor in ancestry.pairs():
        if not path or path[-1] != predecessor:
            if path:
                yield tuple(path)
            path = [] if predecessor is None else [predecessor]
        path.append(name)
    if path:
        yield tuple(path)


def _ancestry(index: _Index) -> Ancestry:
    nodes: dict[str, Node] = {}
    for path in index.tree:
        learn(nodes, path[::-1])
    return Ancestry(nodes)


def _digest(index: _Index) -> str:
    return sha256_digest(canonical.dump(msgspec.structs.replace(index, digest="")))

"""The small files of a tier: `format.json`, `node.json`, receipts and upload manifests. All canonical JSON, all capped.

`format.json` is read first: it says which version everything else has.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from tieredckpt.errors import CorruptionError, FormatError
from tieredckpt.format import canonical, keys
from tieredckpt.format.manifest import Manifest, PackEntry
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.fields import (
    Count,
    DigestText,
    Label,
    Rank,
    Sha256Text,
    SnapshotText,
    Ulid,
    UlidOrEmpty,
    UtcText,
    check_utc,
)

MAX_SMALL_BYTES = 64 << 10
"""Of `format.json` and `node.json`."""
MAX_LIST_BYTES = 512 << 20
"""Of a receipt and of an upload manifest."""
MAX_PACKS = 2_000_000


class RepositoryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`format.json`: what this root is, and whose run it holds. Two tiers of one run have the same `run`.

    digest  sha256 of the file's canonical bytes with an empty `digest`, as in a record; empty in a value
    """

    format: Literal["tieredckpt"] = "tieredckpt"
    version: Literal[1] = 1
    run: Ulid
    created_at: UtcText
    digest: Sha256Text | Literal[""] = ""


class NodeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`node.json`: the identity of a local root. `name` is what the user calls it; `digest` as in `format.json`."""

    id: Ulid
    name: Label = ""
    created_at: UtcText
    digest: Sha256Text | Literal[""] = ""


class StoredPack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pack that is durable on a tier. `digest`: see `format.packs.pack_digest`."""

    key: str
    nbytes: Count
    digest: DigestText


Packs = Annotated[tuple[StoredPack, ...], Meta(max_length=MAX_PACKS)]


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a writer reports when its packs of a snapshot are durable. `node`: the local root it saves to; "" without one."""

    snapshot: SnapshotText
    writer: Rank
    node: UlidOrEmpty = ""
    packs: Packs = ()


class UploadManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The remote tier's list of a snapshot's packs, sorted by key: the same bytes whoever writes it."""

    snapshot: SnapshotText
    manifest_digest: Sha256Text
    packs: Packs = ()


def receipt_of(manifest: Manifest, writer: int, node: str) -> Receipt:
    """What `writer`, saving to the local root `node`, has to report of this snapshot."""
    own = [pack for pack in _own_packs(manifest) if (name := keys.parse_pack_key(pack.key)) and name.writer == writer]
    return Receipt(snapshot=manifest.snapshot, writer=writer, node=node, packs=tuple(map(_stored, own)))


def upload_manifest_of(manifest: Manifest, manifest_digest: str) -> UploadManifest:
    """The one upload manifest that this snapshot can have. `manifest_digest`: of the manifest's stored bytes."""
    own = sorted(_own_packs(manifest), key=lambda pack: pack.key)
    return UploadManifest(snapshot=manifest.snapshot, manifest_digest=manifest_digest, packs=tuple(map(_stored, own)))


def _own_packs(manifest: Manifest) -> list[PackEntry]:
    return [pack for pack in manifest.packs if pack.snapshot == manifest.snapshot]


def _stored(pack: PackEntry) -> StoredPack:
    return StoredPack(key=pack.key, nbytes=pack.nbytes, digest=pack.digest)


def encode_repository(value: RepositoryFile) -> bytes:
    return canonical.encode(_sealed(value), what=keys.FORMAT_KEY)


def decode_repository(data: bytes) -> RepositoryFile:
    """UnsupportedVersionError, which names the version, for a root that a newer library made."""
    canonical.check_version(data, "tieredckpt", max_bytes=MAX_SMALL_BYTES, what=keys.FORMAT_KEY)
    return _opened(canonical.decode(data, RepositoryFile, max_bytes=MAX_SMALL_BYTES, what=keys.FORMAT_KEY), keys.FORMAT_KEY)


def encode_node(value: NodeFile) -> bytes:
    return canonical.encode(_sealed(value), what=keys.NODE_KEY)


def decode_node(data: bytes) -> NodeFile:
    return _opened(canonical.decode(data, NodeFile, max_bytes=MAX_SMALL_BYTES, what=keys.NODE_KEY), keys.NODE_KEY)


_File = TypeVar("_File", RepositoryFile, NodeFile)


def _sealed(value: _File) -> _File:
    unsealed = msgspec.structs.replace(value, digest="")
    return msgspec.structs.replace(unsealed, digest=sha256_digest(canonical.dump(unsealed)))


def _opened(stored: _File, key: str) -> _File:
    """Nothing else in a tier repeats what these files say: without a digest, one flipped letter would be another run or node."""
    value = msgspec.structs.replace(stored, digest="")
    if _sealed(value) != stored:
        raise CorruptionError(f"{key}: its content does not match its digest", key=key)
    check_utc(value.created_at, key)
    return value


def encode_receipt(value: Receipt) -> bytes:
    _check_packs(value.packs, value.snapshot, "receipt", writer=value.writer)
    return canonical.encode(value, what="receipt")


def decode_receipt(data: bytes) -> Receipt:
    value = canonical.decode(data, Receipt, max_bytes=MAX_LIST_BYTES, what="receipt")
    _check_packs(value.packs, value.snapshot, "receipt", writer=value.writer)
    return value


def encode_upload(value: UploadManifest) -> bytes:
    """Sorts the packs, so that the bytes do not depend on who found them in which order."""
    ordered = msgspec.structs.replace(value, packs=tuple(sorted(value.packs, key=lambda pack: pack.key)))
    _check_packs(ordered.packs, ordered.snapshot, "upload manifest")
    return canonical.encode(ordered, what="upload manifest")


def decode_upload(data: bytes) -> UploadManifest:
    value = canonical.decode(data, UploadManifest, max_bytes=MAX_LIST_BYTES, what="upload manifest")
    _check_packs(value.packs, value.snapshot, "upload manifest")
    return value


def _check_packs(packs: tuple[StoredPack, ...], snapshot: str, what: str, *, writer: int | None = None) -> None:
    """Keys are pack keys of the snapshot (and writer), each once, in order."""
    previous = ""
    for pack in packs:
        name = keys.parse_pack_key(pack.key)
        if name is None or name.snapshot != snapshot or writer not in (None, name.writer):
            raise FormatError(f"{what} of {snapshot}: {pack.key[:160]!r} is not the key of a pack of its own")
        if writer is None and pack.key <= previous:
            raise FormatError(f"{what} of {snapshot}: its packs are not in order of their keys, or one is there twice")
        previous = pack.key

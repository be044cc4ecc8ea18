"""An attacker who may write the bucket: any document of a tier replaced, and every digest up to the log made right again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zstandard

from tests.golden import files_of
from tieredckpt.format import keys
from tieredckpt.format.packs import header_bytes, pack_digest
from tieredckpt.model.digest import crc64, digest

Json = Any
"""A document as `json` has it: a test may put anything into it."""


def dump(document: Json) -> bytes:
    """Canonical where the document is: what is not (NaN, half surrogates, huge integers) is written as Python would."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def seal(document: Json) -> Json:
    """With the digest that a record, `format.json` or `node.json` should have."""
    if not isinstance(document, dict) or "digest" not in document:
        return document
    unsealed = {**document, "digest": ""}
    return {**document, "digest": f"sha256:{hashlib.sha256(dump(unsealed)).hexdigest()}"}


def compress(text: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(text)


def decompress(stored: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(stored)


@dataclass(slots=True)
class Forgery:
    """The objects of one golden tier, to be changed; every method leaves all digests consistent."""

    objects: dict[str, bytes] = field(default_factory=lambda: files_of("remote"))

    def records(self) -> list[Json]:
        return [json.loads(data) for key, data in sorted(self.objects.items()) if key.startswith(keys.LOG_PREFIX)]

    def commit(self, step: int) -> Json:
        return next(record for record in self.records() if record["kind"] == "commit" and record["step"] == step)

    def snapshot(self, step: int) -> str:
        return str(self.commit(step)["snapshot"])

    def manifest(self, step: int) -> Json:
        return json.loads(decompress(self.objects[keys.manifest_key(self.snapshot(step))]))

    def put_record(self, record: Json) -> None:
        """At the place of its number, or behind the last one if it has none that is a key."""
        seq = record.get("seq") if isinstance(record, dict) else None
        key = keys.record_key(seq if type(seq) is int and 0 < seq < 2**53 else len(self.records()) + 1)
        self.objects[key] = dump(seal(record))

    def append(self, record: Json) -> None:
        self.put_record({**record, "seq": len(self.records()) + 1})

    def change_record(self, kind: str, change: Callable[[Json], Json | None]) -> None:
        """The last record of a kind."""
        record = next(record for record in reversed(self.records()) if record["kind"] == kind)
        key = keys.record_key(record["seq"])
        self.objects[key] = dump(seal(changed(record, change)))

    def put_manifest(self, step: int, text: bytes) -> None:
        self.put_stored_manifest(step, compress(text))

    def put_stored_manifest(self, step: int, stored: bytes) -> None:
        commit = self.commit(step)
        self.objects[keys.manifest_key(commit["snapshot"])] = stored
        sha256 = f"sha256:{hashlib.sha256(stored).hexdigest()}"
        self.put_record({**commit, "manifest_digest": sha256, "manifest_bytes": len(stored)})
        upload = keys.upload_key(commit["snapshot"])
        self.objects[upload] = dump({**json.loads(self.objects[upload]), "manifest_digest": sha256})

    def change_manifest(self, step: int, change: Callable[[Json], Json | None]) -> None:
        self.put_manifest(step, dump(changed(self.manifest(step), change)))

    def replace_pack(self, step: int, number: int, data: bytes) -> None:
        """Other bytes, with the digest that they would have if their header were good."""
        manifest = self.manifest(step)
        pack = manifest["packs"][number]
        self.objects[pack["key"]] = data
        pack["nbytes"] = len(data)
        pieces = sorted((piece for piece in manifest["pieces"] if piece[3] == number), key=lambda piece: int(piece[4]))
        header = data[: min(4096, len(data))]
        pack["digest"] = pack_digest(header, [piece[7] for piece in pieces], "blake3")
        self._put_packs(step, manifest)

    def replace_piece(self, step: int, stored: bytes, raw: bytes) -> None:
        """The compressed piece of a snapshot: other stored bytes, with the checksums of these and the digest of `raw`.

        The header of its pack is left as it is: a restore does not read it.
        """
        manifest = self.manifest(step)
        piece = next(piece for piece in manifest["pieces"] if piece[8] == "zstd")
        pack = manifest["packs"][piece[3]]
        data = bytearray(self.objects[pack["key"]])
        data[piece[4] : piece[4] + len(stored)] = stored
        self.objects[pack["key"]] = bytes(data)
        piece[5:8] = [len(stored), crc64(stored), digest("blake3", raw)]
        pieces = sorted((other for other in manifest["pieces"] if other[3] == piece[3]), key=lambda other: int(other[4]))
        pack["digest"] = pack_digest(data[: header_bytes(data)], [other[7] for other in pieces], "blake3")
        self._put_packs(step, manifest)

    def _put_packs(self, step: int, manifest: Json) -> None:
        """A manifest whose own packs are others: the lists of them follow."""
        self.put_manifest(step, dump(manifest))
        snapshot = self.snapshot(step)
        own = [pack for pack in manifest["packs"] if pack["snapshot"] == snapshot]
        packs = [{name: pack[name] for name in ("digest", "key", "nbytes")} for pack in own]
        for key in (keys.receipt_key(snapshot, 0), keys.upload_key(snapshot)):
            self.objects[key] = dump({**json.loads(self.objects[key]), "packs": packs})
        total = sum(pack["nbytes"] for pack in own)
        self.put_record({**self.commit(step), "bytes_new": total})


def changed(document: Json, change: Callable[[Json], Json | None]) -> Json:
    """`change` works in place, or returns another document."""
    copy = json.loads(json.dumps(document))
    result = change(copy)
    return copy if result is None else result

"""What a bucket says of itself: lifecycle rules, versioning, and whether it verifies checksums. Asked by the probe.

The failure it exists for: a rule that somebody set for the whole bucket ("delete after 90 days") and that removes records of a log.
A create-if-absent name fences only while it exists, and a gap in a log is a hard error, so such a rule is found on the first day and
not on the ninety-first.

Nothing here is needed to save, so no answer is an error: most users may not ask for a bucket's configuration, and many servers do
not know these requests. Then the question stays open.
"""

from __future__ import annotations

import base64
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import ClientError

from tieredckpt.model.digest import crc64
from tieredckpt.settings import MIB
from tieredckpt.store.base import Findings
from tieredckpt.store.s3_errors import NO_ANSWER, status_of

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import LifecycleRuleOutputTypeDef

_T = TypeVar("_T")

_LARGEST_RECORD_BYTES = MIB
_ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Storage classes whose objects cannot be read before somebody asks for them and waits for hours."""
_PARTS = ("format.json", "log/", "snapshots/", "data/")
"""What must stay, below the root: all of it."""
_LOG_LOST = "a log that loses a record cannot be read, and keeps two jobs apart no longer"
_DATA_LOST = "snapshots will be lost while the log says that they are there"
_FOUND_LATE = "so damage on the way to it is found only when a pack is read"
_BODY = b"tieredckpt probe: does this store verify checksums?\n"


class _Answer(enum.Enum):
    TAKEN = "taken"
    REFUSED = "refused"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket to be asked. `root`: prefix of the run in it, empty or ending with a slash."""

    client: S3Client
    name: str
    root: str

    def findings(self, scratch: str) -> Findings:
        """What is known of it. Puts, and deletes, two small objects below `scratch` (a prefix below the root)."""
        return Findings(
            notes=(*self._about_versions(), *self._about_checksums(f"{self.root}{scratch}")),
            dangers=self._about_rules(),
        )

    def _about_rules(self) -> tuple[str, ...]:
        answer = _asked(lambda: self.client.get_bucket_lifecycle_configuration(Bucket=self.name))
        return () if answer is None else dangers_of(answer.get("Rules", ()), self.root)

    def _about_versions(self) -> tuple[str, ...]:
        answer = _asked(lambda: self.client.get_bucket_versioning(Bucket=self.name))
        if answer is None or answer.get("Status") != "Enabled":
            return ()
        return (
            "the bucket keeps versions: what retention deletes is still stored and paid for. Add a lifecycle rule that expires "
            "noncurrent versions, and never delete anything below log/ by hand",
        )

    def _about_checksums(self, scratch: str) -> tuple[str, ...]:
        """Does it verify the crc64nvme that packs are sent with, and give it and metadata back?"""
        good, bad = f"{scratch}checked", f"{scratch}damaged"
        right, wrong = bytes.fromhex(crc64(_BODY)), bytes(8)
        taken = self._put(good, right)
        refused = self._put(bad, wrong)
        head = _asked(lambda: self.client.head_object(Bucket=self.name, Key=good, ChecksumMode="ENABLED"))
        for name in (good, bad):
            self._delete(name)
        if taken is _Answer.REFUSED:
            return (f"it refuses crc64nvme checksums, {_FOUND_LATE}",)
        if _Answer.NONE in (taken, refused) or head is None:
            return ()
        notes = []
        if refused is _Answer.TAKEN:
            notes.append(f"it stores objects whose crc64nvme checksum is wrong, {_FOUND_LATE}")
        elif head.get("ChecksumCRC64NVME") != _text(right):
            notes.append("it verifies crc64nvme checksums and does not give them back")
        if head.get("Metadata", {}).get("probe") != "yes":
            notes.append("it does not keep the metadata of objects")
        return tuple(notes)

    def _put(self, name: str, checksum: bytes) -> _Answer:
        """How it takes an object with this checksum."""
        try:
            self.client.put_object(
                Bucket=self.name, Key=name, Body=_BODY, ChecksumCRC64NVME=_text(checksum), Metadata={"probe": "yes"}
            )
        except ClientError as error:
            return _Answer.REFUSED if status_of(error) < 500 or status_of(error) == 501 else _Answer.NONE
        except NO_ANSWER:
            return _Answer.NONE
        return _Answer.TAKEN

    def _delete(self, name: str) -> None:
        _asked(lambda: self.client.delete_object(Bucket=self.name, Key=name))


def dangers_of(rules: Sequence[LifecycleRuleOutputTypeDef], root: str) -> tuple[str, ...]:
    """What the lifecycle rules of a bucket will do to a run below `root`, one sentence for each rule that does anything."""
    found = []
    for rule in rules:
        does = _does(rule)
        touched = [part for part in _PARTS if does and _covers(rule, root + part, log=part == "log/")]
        if touched:
            lost = _LOG_LOST if "log/" in touched else _DATA_LOST
            where = ", ".join(root + part for part in touched)
            found.append(f"lifecycle rule {rule.get('ID', '')!r} {does} {where}: {lost}. Exclude this prefix from the rule")
    return tuple(found)


def _does(rule: LifecycleRuleOutputTypeDef) -> str:
    """What an enabled rule does to current objects; "" for nothing that matters here."""
    if rule.get("Status") != "Enabled":
        return ""
    expiration = rule.get("Expiration", {})
    if "Days" in expiration or "Date" in expiration:
        when = f"after {expiration['Days']} days" if "Days" in expiration else "from a date on"
        return f"deletes {when}"
    archives = [move["StorageClass"] for move in rule.get("Transitions", ()) if move.get("StorageClass") in _ARCHIVES]
    return f"moves to {archives[0]}, from where nothing can be read at once," if archives else ""


def _covers(rule: LifecycleRuleOutputTypeDef, where: str, *, log: bool) -> bool:
    """Does the rule take objects below `where`? Ours carry no tags; records are small."""
    conditions: Mapping[str, object] = rule.get("Filter", {})
    together = conditions.get("And", conditions)
    assert isinstance(together, Mapping)
    if together.get("Tag") or together.get("Tags"):
        return False
    if log and int(str(together.get("ObjectSizeGreaterThan", 0))) >= _LARGEST_RECORD_BYTES:
        return False
    prefix = str(together.get("Prefix") or rule.get("Prefix") or "")
    return where.startswith(prefix) or prefix.startswith(where)


def _asked(ask: Callable[[], _T]) -> _T | None:
    """The answer; None where the store gives none, whatever the reason."""
    try:
        return ask()
    except (ClientError, *NO_ANSWER):
        return None


def _text(checksum: bytes) -> str:
    return base64.b64encode(checksum).decode()

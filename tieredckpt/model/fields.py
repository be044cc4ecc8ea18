"""The types of stored fields: integers, texts and ids with their bounds, as msgspec checks them while it decodes.

A struct that is built from these types is its own validator: what decodes is within bounds. Integers stay within ±(2^53 - 1),
so that every JSON reader gets them exactly.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from msgspec import Meta

from tieredckpt.errors import FormatError
from tieredckpt.model.digest import CRC_CHARS, DIGEST_CHARS, DIGEST_PATTERN, SHA256_PATTERN
from tieredckpt.model.ids import MAX_RANK, MAX_STEP, ROOT_PATTERN, SNAPSHOT_PATTERN, ULID_PATTERN

MAX_INT = 2**53 - 1
MAX_NAMES = 10_000
"""Most ids or keys in one field of a record."""

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Position = Annotated[int, Meta(ge=1, le=MAX_INT)]
IndexOrNone = Annotated[int, Meta(ge=-1, le=MAX_INT)]
"""An index, or -1 for none."""
SafeInt = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
Rank = Annotated[int, Meta(ge=0, le=MAX_RANK)]

Ulid = Annotated[str, Meta(pattern=rf"^{ULID_PATTERN}\Z")]
UlidOrEmpty = Annotated[str, Meta(pattern=rf"^(?:{ULID_PATTERN})?\Z")]
SnapshotText = Annotated[str, Meta(pattern=rf"^{SNAPSHOT_PATTERN}\Z")]
PredecessorText = Annotated[str, Meta(pattern=rf"^(?:{SNAPSHOT_PATTERN}|{ROOT_PATTERN})\Z")]
"""A snapshot id or a lineage root."""
WriteId = Annotated[str, Meta(pattern=r"^[0-9A-Za-z_-]{1,64}\Z")]
DigestText = Annotated[str, Meta(pattern=rf"^{DIGEST_PATTERN}\Z")]
Sha256Text = Annotated[str, Meta(pattern=rf"^{SHA256_PATTERN}\Z")]
DigestSized = Annotated[str, Meta(min_length=DIGEST_CHARS, max_length=DIGEST_CHARS)]
CrcSized = Annotated[str, Meta(min_length=CRC_CHARS, max_length=CRC_CHARS)]
"""As long as a digest or a checksum. Those of pieces are looked at together, by `digest_texts`."""
UtcText = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-9]{2}:[0-9]{2}\.[0-9]{6}Z\Z")]
"""UTC, ISO 8601 with microseconds and `Z`; see `utc_text`. A label: it decides nothing. `check_utc` knows the calendar."""

Label = Annotated[str, Meta(max_length=255)]
Text = Annotated[str, Meta(max_length=4096)]
SpecialFloat = Annotated[str, Meta(pattern=r"^(?:nan|inf|-inf)\Z")]
"""What JSON has no number for."""


def check_utc(text: str, what: str) -> None:
    """FormatError for a `UtcText` that is no time: no 30th of February, no 61st second."""
    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        raise FormatError(f"{what}: there is no time {text}") from error


def utc_text(wall_time_s: float) -> str:
    """Seconds since 1970 as a `UtcText`."""
    return datetime.fromtimestamp(wall_time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

"""Very many digests and checksums, looked at together: are they spelled as such?

Beside `digest`, which needs no numpy. Of the million pieces of a manifest a pattern for each text costs as much as all else that
decoding does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tieredckpt.model.digest import CRC_CHARS, DIGEST_CHARS

_TAGS = [np.frombuffer(tag, np.uint8) for tag in (b"blake3:", b"sha256:")]
_TAG_CHARS = len(_TAGS[0])
_IS_HEX = np.isin(np.arange(256), list(b"0123456789abcdef"))


def are_digests(texts: Sequence[str]) -> bool:
    """Are all of these texts, each of `DIGEST_CHARS` characters, tagged digests?"""
    rows = _characters(texts, DIGEST_CHARS)
    if rows is None:
        return False
    tags, digits = rows[:, :_TAG_CHARS], rows[:, _TAG_CHARS:]
    is_tag = np.logical_or.reduce([(tags == tag).all(axis=1) for tag in _TAGS])
    return bool(is_tag.all() and _IS_HEX[digits].all())


def are_crcs(texts: Sequence[str]) -> bool:
    """Are all of these texts, each of `CRC_CHARS` characters, checksums?"""
    rows = _characters(texts, CRC_CHARS)
    return rows is not None and bool(_IS_HEX[rows].all())


def _characters(texts: Sequence[str], chars: int) -> npt.NDArray[np.uint8] | None:
    """One row of `chars` bytes for each text; None if they have others than ASCII."""
    joined = "".join(texts)
    return np.frombuffer(joined.encode(), np.uint8).reshape(-1, chars) if joined.isascii() else None

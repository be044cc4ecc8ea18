"""Canonical JSON: the one byte form of every stored value.

Between msgspec and the modules that know what is stored. Keys are sorted by code point, there are no spaces, every field is
written, integers stay within ±(2^53 - 1), floats are the shortest text that reads back as the same number. Because a value has
one form only, digests of stored bytes are digests of values: so `decode` refuses what it would not write itself. This covers,
at once, duplicate keys, spaces, missing fields, escapes and numbers in another spelling.

No error of msgspec, of recursion or of Unicode leaves this module: what is wrong with bytes is a `FormatError` that names them.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tieredckpt.errors import FormatError, UnsupportedVersionError

VERSION = 1
"""Of the stored format. Files that are read first carry it; a larger one is refused by name."""

_T = TypeVar("_T")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder(order="sorted")


def encode(value: _Struct, *, what: str = "value") -> bytes:
    """The canonical bytes of `value`. FormatError for what `decode` would refuse (a NaN, too large an integer)."""
    data = dump(value, what=what)
    _load_canonical(data, type(value), what)
    return data


def dump(value: object, *, what: str = "value") -> bytes:
    """As `encode`, for values whose content is known to be within bounds: nothing is read back."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise FormatError(f"{what}: cannot be written as JSON: {error}") from error


def decode(data: bytes, type_: type[_T], *, max_bytes: int, what: str) -> _T:
    """The value of canonical bytes. FormatError for anything else, and for more than `max_bytes`.

    `type_` bounds nesting, counts and numbers. It must be concrete: a `msgspec.Raw` inside is not looked into.
    """
    if len(data) > max_bytes:
        raise FormatError(f"{what}: {len(data)} bytes, more than the {max_bytes} allowed")
    return _load_canonical(data, type_, what)


def check_version(data: bytes, format_name: str, *, max_bytes: int, what: str) -> None:
    """Look at `format` and `version` only: FormatError for something else, UnsupportedVersionError for a newer version."""
    if len(data) > max_bytes:
        raise FormatError(f"{what}: {len(data)} bytes, more than the {max_bytes} allowed")
    header = load(data, _Header, what=what)
    if header.format != format_name:
        raise FormatError(f'{what}: "format" is {header.format[:40]!r}, not {format_name!r}')
    if header.version > VERSION:
        raise UnsupportedVersionError(
            f"{what}: format version {header.version}; this library reads version {VERSION}: upgrade tieredckpt"
        )
    if header.version != VERSION:
        raise FormatError(f"{what}: there is no format version {header.version}")


def load(data: bytes, type_: type[_T], *, what: str) -> _T:
    """The value of JSON that need not be canonical; FormatError if it is not of `type_`."""
    try:
        return msgspec.json.decode(data, type=type_)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise FormatError(f"{what}: {error}") from error


class _Header(msgspec.Struct, frozen=True):
    format: str
    version: int


def _load_canonical(data: bytes, type_: type[_T], what: str) -> _T:
    value = load(data, type_, what=what)
    if dump(value, what=what) != data:
        raise FormatError(f"{what}: not canonical JSON (keys out of order or repeated, missing fields, spaces, other spellings)")
    return value

"""Secrets, in the one type that never shows them.

Hazard owner. The failure it exists for: a configuration object printed in a debug log, an error or a manifest, with the key of
the bucket in it (C145). Nothing else in the library holds a secret as a plain string for longer than one call.
"""

from __future__ import annotations

from typing import NoReturn


class Secret:
    """A string that shows as `***` everywhere. `reveal()` is called where a client is built, and nowhere else."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret is not serialised")

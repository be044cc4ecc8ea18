"""Path patterns: which parts of a tree a call names (`keys=`, `allow=`).

A pattern names a path when it is equal to it, when it is a parent of it, or when it matches as a shell pattern, where `*` also
crosses `/`. Equality comes first because paths may hold brackets, which a shell pattern reads as a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from tieredckpt.errors import UsageError


class Patterns:
    """Some patterns, and which of them have named something."""

    def __init__(self, patterns: Sequence[str], what: str) -> None:
        is_sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not is_sequence or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise UsageError(f'{what} takes a sequence of path patterns such as ("model/*",), got {patterns!r}')
        self._patterns = tuple(patterns)
        self._what = what
        self._used: set[str] = set()

    def __len__(self) -> int:
        return len(self._patterns)

    def name(self, path: str) -> bool:
        """Does a pattern name `path`, or a parent of it?"""
        found = [p for p in self._patterns if path == p or path.startswith(p + "/") or fnmatchcase(path, p)]
        self._used.update(found)
        return bool(found)

    def name_whole(self, path: str) -> bool:
        """Does a pattern name `path` and all that is below? For an object that can only be loaded as a whole."""
        return self.name(path) or self.name(path + "/*")

    def check_used(self) -> None:
        """UsageError for patterns that named nothing: a slip of the pen must not restore less than was meant."""
        unused = [pattern for pattern in self._patterns if pattern not in self._used]
        if unused:
            raise UsageError(f"{self._what}: nothing in the state or the snapshot is named by {', '.join(map(repr, unused))}")

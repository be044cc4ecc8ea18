"""Key order from servers that list by directory.

S3 lists keys in the order of their bytes. Servers that keep keys in directories (SeaweedFS, measured) list a directory where its
bare name would stand: `a/c` before `a-b`, although `-` sorts before `/`. The failure it exists for: a reader that takes the order
for granted and stops early, or asks for what comes after a key and is not given all of it.

Both orders differ only among names of which one is the beginning of the other. So it is enough to sort such a group, and to start
far enough in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tieredckpt.errors import StoreError
from tieredckpt.store.base import ObjectStat

_ORDERS_DIFFER = re.compile(r"[-./]")


def in_key_order(items: Iterable[ObjectStat], prefix: str) -> Iterator[ObjectStat]:
    """The same items in key order; holds back those whose first segments below `prefix` begin alike, and nothing more."""
    group: list[ObjectStat] = []
    name = last = ""
    for item in items:
        segment = item.key[len(prefix) :].partition("/")[0]
        if group and not segment.startswith(name):
            group.sort(key=_key)
            last = group[-1].key
            yield from group
            group = []
        if item.key <= last:
            raise StoreError(f"the store lists {prefix} in no known order: {item.key} after {last}", retryable=False)
        if not group:
            name = segment
        group.append(item)
    yield from sorted(group, key=_key)


def start_before(prefix: str, after: str) -> str | None:
    """Where a list may start so that no key > `after` is missing in either order; None for its beginning."""
    rest = after.removeprefix(prefix)
    if rest == after and prefix:
        return None
    start = _ORDERS_DIFFER.split(rest, maxsplit=1)[0][:-1]  # a directory whose very name is the start would be left out
    return prefix + start if start else None


def _key(item: ObjectStat) -> str:
    return item.key

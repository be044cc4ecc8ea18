"""What to store instead of a value that has no exact stored form."""

from __future__ import annotations

import datetime
import enum
import os
from collections import defaultdict
from collections.abc import Set
from dataclasses import is_dataclass

import numpy as np


def advice(value: object) -> str:
    """A clause that names the type of `value` and says what to store instead."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"is a {kind}, which could not be given back exactly: {_instead(value)}"


def _instead(value: object) -> str:
    if isinstance(value, enum.Enum):
        return "store its .value or .name"
    if isinstance(value, type) or callable(value):
        return "code is never stored; store a name, and look it up after restoring"
    if is_dataclass(value):
        return "store dataclasses.asdict(x), or give it state_dict and load_state_dict"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "store tuple(x) or x._asdict()"
    if isinstance(value, os.PathLike):
        return "store str(x)"
    if isinstance(value, datetime.date | datetime.time):
        return "store x.isoformat()"
    if isinstance(value, datetime.timedelta):
        return "store x.total_seconds()"
    if isinstance(value, Set | range):
        return "store a sorted list"
    if isinstance(value, defaultdict):
        return "its factory is code; store dict(x)"
    if isinstance(value, bytearray | memoryview):
        return "store bytes(x)"
    if isinstance(value, complex):
        return "store numpy.complex128(x)"
    if isinstance(value, np.generic):
        return "store x.item(), or a numpy type of a fixed width"
    for base in (str, bytes, int, float, dict, list, tuple):
        if isinstance(value, base):
            return f"it is a subclass of {base.__name__}; store {base.__name__}(x)"
    return "give it state_dict and load_state_dict, or store plain values, tensors and arrays"

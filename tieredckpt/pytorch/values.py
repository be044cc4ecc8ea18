"""Between torch's values and the neutral ones of `model.tree`: dtypes, sizes, devices.

The codec knows no torch, so that a snapshot can be listed, verified and compared without it. Names are torch's own, without the
prefix. Names that come from a snapshot are looked up among torch's dtypes only: nothing stored selects an attribute of a module.
"""

from __future__ import annotations

import numpy as np
import torch

from tieredckpt.errors import FormatError
from tieredckpt.model.leaf import DTYPE_BYTES
from tieredckpt.model.tree import TorchDevice, TorchDtype, TorchSize

_ALL_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}

DTYPES: dict[str, torch.dtype] = {name: _ALL_DTYPES[name] for name in DTYPE_BYTES if name in _ALL_DTYPES}
"""Stored name → dtype, for every dtype that can be stored and that this torch has."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""Stored name → dtype, for every dtype of an array that can be stored."""


def to_neutral(value: object) -> object:
    """The tagged value of a torch dtype, size or device; anything else as it is."""
    match value:
        case torch.dtype():
            return TorchDtype(str(value).removeprefix("torch."))
        case torch.Size():
            return TorchSize(tuple(value))
        case torch.device():
            return TorchDevice(str(value))
        case _:
            return value


def from_neutral(value: object) -> object:
    """The inverse of `to_neutral`. FormatError for a dtype or device that this torch does not have."""
    match value:
        case TorchDtype():
            if value.name not in _ALL_DTYPES:
                raise FormatError(f"this version of torch has no dtype {value.name!r}; the snapshot was written with another one")
            return _ALL_DTYPES[value.name]
        case TorchSize():
            return torch.Size(value.dims)
        case TorchDevice():
            return _device(value.text)
        case _:
            return value


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise FormatError(f"this version of torch knows no device {text!r}") from error

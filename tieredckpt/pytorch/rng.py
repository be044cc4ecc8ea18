"""The state of every random number generator: Python, NumPy's global one, torch on the CPU and on each CUDA device.

Rules. Stored as bytes and plain numbers, never as tensors, so that no mapping of devices or dtypes can touch them. Restored last,
because loading other components may draw numbers. torch's CPU state holds `torch.initial_seed()`, from which data loaders derive
the seeds of their workers.

CUDA. Where CUDA has not been used when the state is captured, no CUDA generator is stored (asking for one would start CUDA on
every device); that is exact, because nothing was drawn. Otherwise there must be as many devices when the state is restored. Where
another number is allowed by name, no CUDA generator is touched: with other devices no stream would continue as it was.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

import numpy as np
import torch

from tieredckpt.errors import InternalError

_MT_WORDS = 624


def capture_rng() -> dict[str, object]:
    """A neutral tree of the states of all generators, now."""
    version, internal, gauss = random.getstate()
    return {
        "python": {"version": version, "words": _words(internal[:-1]), "position": internal[-1], "gauss": gauss},
        "numpy": _encode_numpy(np.random.get_state(legacy=False)),
        "torch": _to_bytes(torch.get_rng_state()),
        "cuda": [_to_bytes(state) for state in _cuda_states()],
    }


def rng_differences(stored: object) -> Iterator[tuple[str, str]]:
    """Why `stored` cannot be given to the generators of this process: name of the generator, sentence."""
    if not isinstance(stored, dict) or not {"python", "numpy", "torch", "cuda"} <= stored.keys():
        yield "", "the stored states of the random number generators are incomplete"
        return
    if not _python_fits(stored["python"]):
        yield "python", "the stored state is not one of this Python's generator"
    here = _encode_numpy(np.random.get_state(legacy=False))
    if not _same_form(stored["numpy"], here):
        yield "numpy", f"the stored state does not fit the global generator here, {here['bit_generator']}"
    if not isinstance(stored["torch"], bytes) or len(stored["torch"]) != torch.get_rng_state().numel():
        yield "torch", "the stored state is not one of this torch's CPU generator"
    yield from _cuda_differences(stored["cuda"])


def restore_rng(stored: object, skip: Collection[str] = ()) -> None:
    """Give the generators their stored states, except those named in `skip`: `rng_differences` has found the others to fit."""
    match stored:
        case {"python": dict(python), "numpy": dict(numpy), "torch": bytes(cpu), "cuda": list(cuda)}:
            if "python" not in skip:
                random.setstate((python["version"], (*_numbers(python["words"]), python["position"]), python["gauss"]))
            if "numpy" not in skip:
                np.random.set_state(_decode_numpy(numpy))
            if "torch" not in skip:
                torch.set_rng_state(_from_bytes(cpu))
            for device, state in enumerate(cuda if "cuda" not in skip else ()):
                torch.cuda.set_rng_state(_from_bytes(state), device)
        case _:
            raise InternalError("random number generators: their stored states were not checked before")


def cuda_in_use() -> bool:
    """Has this process used CUDA? Asks without starting it."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _words(numbers: tuple[int, ...]) -> bytes:
    return np.array(numbers, dtype="<u4").tobytes()


def _numbers(words: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(words, dtype="<u4").tolist())


def _python_fits(stored: object) -> bool:
    if not isinstance(stored, dict) or stored.keys() != {"version", "words", "position", "gauss"}:
        return False
    words, position = stored["words"], stored["position"]
    return (
        stored["version"] == random.getstate()[0]
        and isinstance(words, bytes)
        and len(words) == 4 * _MT_WORDS
        and type(position) is int
        and 0 <= position <= _MT_WORDS
        and (stored["gauss"] is None or type(stored["gauss"]) is float)
    )


def _encode_numpy(state: object) -> dict[str, object]:
    """NumPy's nested dict of numbers, names and integer arrays, without the arrays."""
    assert isinstance(state, dict)
    return {key: _encode_item(value) for key, value in state.items()}


def _encode_item(value: object) -> object:
    match value:
        case dict():
            return {key: _encode_item(item) for key, item in value.items()}
        case np.ndarray():
            native = value.dtype.newbyteorder("<")
            return {"dtype": value.dtype.name, "bytes": value.astype(native).tobytes()}
        case np.generic():
            return value.item()
        case _:
            return value


def _decode_numpy(stored: dict[str, object]) -> dict[str, object]:
    return {key: _decode_item(value) for key, value in stored.items()}


def _decode_item(value: object) -> object:
    match value:
        case {"dtype": str(dtype), "bytes": bytes(data)}:
            array = np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"))
            return array.astype(array.dtype.newbyteorder("="))
        case dict():
            return {key: _decode_item(item) for key, item in value.items()}
        case _:
            return value


def _same_form(stored: object, here: object) -> bool:
    """Same names, same generator, arrays of the same dtype and size; the numbers themselves may differ."""
    match stored, here:
        case dict(), dict():
            return stored.keys() == here.keys() and all(_same_form(stored[key], here[key]) for key in here)
        case bytes(), bytes():
            return len(stored) == len(here)
        case str(), str():
            return stored == here
        case _:
            return type(stored) is type(here)


def _cuda_states() -> list[torch.Tensor]:
    return [] if not cuda_in_use() else [torch.cuda.get_rng_state(device) for device in range(torch.cuda.device_count())]


def _cuda_differences(stored: object) -> Iterator[tuple[str, str]]:
    if not isinstance(stored, list) or not all(isinstance(state, bytes) for state in stored):
        yield "cuda", "the stored states of the CUDA generators are not bytes"
        return
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (stored and len(stored) != here) or (not stored and cuda_in_use()):
        yield (
            "cuda",
            f"generators of {len(stored)} CUDA devices are stored, here are {here}; allowed, all of them would stay as they are",
        )
    if stored and here and len(stored[0]) != torch.cuda.get_rng_state(0).numel():
        yield "cuda", "the stored state is not one of this torch's CUDA generator"


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _from_bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)

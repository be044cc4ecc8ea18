"""Every dtype in every layout comes back bit for bit, into the same memory (C101, C110)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.pytorch.rig import SMALL, same_bits, store
from tieredckpt.model.leaf import DTYPE_BYTES
from tieredckpt.pytorch.values import DTYPES, NUMPY_DTYPES
from tieredckpt.settings import Settings

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "0-d": lambda t: t.reshape(-1)[3],
    "one element": lambda t: t.reshape(-1)[3:4],
    "empty": lambda t: t[:0],
    "transposed": lambda t: t.permute(3, 1, 0, 2),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "expanded": lambda t: t[:1].expand(5, *t.shape[1:]),
    "strided": lambda t: t[:, ::2, 1:, ::3],
    "long row": lambda t: t.reshape(1, -1),
}


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits: NaN payloads, infinities, subnormals, -0.0. Booleans are 0 or 1."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).to(torch.bool)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def test_every_dtype_of_the_format_is_known() -> None:
    assert set(DTYPE_BYTES) == set(DTYPES)
    assert all(dtype.itemsize == DTYPE_BYTES[name] for name, dtype in DTYPES.items())
    assert all(dtype.itemsize == DTYPE_BYTES[name] for name, dtype in NUMPY_DTYPES.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DTYPES)
def test_tensor(name: str, layout: str) -> None:
    value = LAYOUTS[layout](random_bits(DTYPES[name], (4, 6, 10, 70)))
    expected = value.clone(memory_format=torch.contiguous_format)
    stored = store({"x": value}, SMALL)
    target = {"x": torch.zeros(value.shape, dtype=value.dtype)}
    memory = target["x"].data_ptr()
    restored = stored.restore(target)
    assert same_bits(restored["x"], expected)
    assert restored["x"] is target["x"]
    assert target["x"].data_ptr() == memory
    whole = stored.whole()["x"]
    assert same_bits(whole, expected)
    assert whole.is_contiguous()


@pytest.mark.parametrize("layout", ["transposed", "channels last", "strided"])
def test_target_of_any_layout(layout: str) -> None:
    value = LAYOUTS[layout](torch.randn(4, 6, 10, 70)).clone(memory_format=torch.contiguous_format)
    base = torch.zeros(4, 6, 10, 70)
    target = LAYOUTS[layout](base)
    store({"x": value}).restore({"x": target})
    assert torch.equal(target, value)


def test_channels_last_parameter_keeps_its_layout() -> None:
    module = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    fresh = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    store(module).restore(fresh)
    assert same_bits(fresh.weight, module.weight)
    assert fresh.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("order", ["C", "F", "reversed", "strided"])
@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_array(name: str, order: str) -> None:
    raw = np.random.default_rng(0).integers(
        0, 2 if name == "bool" else 256, (40, 50, NUMPY_DTYPES[name].itemsize), dtype=np.uint8
    )
    plain = raw.view(NUMPY_DTYPES[name]).reshape(40, 50)
    value = {"C": plain, "F": np.asfortranarray(plain), "reversed": plain[::-1, ::-1], "strided": plain[::3, 1:]}[order]
    stored = store({"x": value})
    target = {"x": np.zeros_like(value)}
    array = target["x"]
    stored.restore(target)
    assert target["x"] is array
    assert array.tobytes() == value.tobytes()
    whole = stored.whole()["x"]
    assert (whole.dtype, whole.tobytes()) == (value.dtype, value.tobytes())


def test_array_in_foreign_byte_order_is_stored_native() -> None:
    value = np.arange(3000, dtype=np.float64).astype(">f8")
    stored = store({"x": value})
    assert stored.manifest.leaves[0].dtype == "float64"
    assert np.array_equal(stored.whole()["x"], value)
    target = {"x": np.zeros(3000, dtype=">f8")}
    stored.restore(target)
    assert np.array_equal(target["x"], value)


def test_memory_map_and_read_only_array(tmp_path: object) -> None:
    path = f"{tmp_path}/values.npy"
    np.save(path, np.arange(5000))
    stored = store({"map": np.load(path, mmap_mode="r"), "frozen": np.frombuffer(b"12345678", np.int64)})
    assert np.array_equal(stored.whole()["map"], np.arange(5000))
    assert stored.whole()["frozen"].tobytes() == b"12345678"


def test_pending_conjugation_and_negation_are_resolved() -> None:
    z = torch.randn(300, dtype=torch.complex64)
    assert z.conj().is_conj()
    assert z.conj().imag.is_neg()
    whole = store({"conj": z.conj(), "neg": z.conj().imag}).whole()
    assert torch.equal(whole["conj"], torch.complex(z.real, -z.imag))
    assert torch.equal(whole["neg"], -z.imag)


def test_whole_keeps_requires_grad() -> None:
    module = torch.nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    leaf = torch.ones(2, requires_grad=True)
    whole = store({"m": module, "x": leaf, "y": torch.ones(3)}).whole()
    assert whole["m"]["weight"].requires_grad
    assert not whole["m"]["bias"].requires_grad
    assert whole["x"].requires_grad
    assert not whole["y"].requires_grad


def test_pieces_as_large_as_leaves() -> None:
    state = {"a": torch.randn(1000, 33), "b": torch.randn(7), "c": torch.randn(300, 300).t()}
    whole = store(state, Settings()).whole()
    assert all(same_bits(whole[key], state[key]) for key in state)

"""Small states stand for large ones here."""

from __future__ import annotations

import pytest

from tieredckpt.engine import packing


@pytest.fixture(autouse=True)
def small_pieces_are_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SMALLEST_COMPRESSED_BYTES", 0)

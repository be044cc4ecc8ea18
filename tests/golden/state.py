"""The state that the golden files hold, by formulas: the same bits with every version of torch and numpy."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
import torch


def state_of(step: int) -> dict[str, object]:
    """What the job had after `step` steps. Only `weight`, `exp_avg`, `step` and plain values change from step to step."""
    weight = (torch.arange(65 * 256, dtype=torch.float32) // 512 + step).reshape(65, 256)
    buffers = OrderedDict(mask=torch.arange(50) % 3 == 0, none=torch.empty(0, 3))
    return {
        "model": {"weight": weight, "tied": weight, "bias": torch.arange(40).to(torch.bfloat16) / 7, "buffers": buffers},
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.full((40, 40), step / 1024)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "params": [0]}],
        },
        "counts": np.arange(30, dtype=np.int64).reshape(5, 6) * 1001,
        "phase": np.exp(2j * np.pi * np.array([0.0, 0.25, 0.5])).round(6).astype(np.complex128),
        "plain": {
            "step": step,
            "best": (float("inf"), -0.0, 2**70, -(2**53)),
            "seen": Counter({"a/b": 2, "ü\n": 1}),
            b"\x00raw": [b"\xff\x00", np.float32(0.1), np.uint64(2**64 - 1)],
            (1, "x", None): torch.bfloat16,
            "size": torch.Size([2, 3]),
            "device": torch.device("cpu"),
        },
    }

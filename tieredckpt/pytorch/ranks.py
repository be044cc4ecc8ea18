"""How many ranks this job has."""

from __future__ import annotations

import torch.distributed


def world_size() -> int:
    """Of the default process group; 1 where there is none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1

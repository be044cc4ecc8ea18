"""The smallest complete use: a job that continues where it was when it is started again.

    python examples/quickstart.py        trains 100 steps, saving every 25
    python examples/quickstart.py 200    continues from step 100

Everything is below ./quickstart: `node` stands for the local disk, `bucket` for the bucket. With a real one, write
`s3://bucket/run42` instead of the file URL. Delete `node` and start again: it is restored from the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import tieredckpt as tc

total = int(sys.argv[1]) if len(sys.argv) > 1 else 100
local, remote = Path("quickstart/node").absolute(), Path("quickstart/bucket").absolute().as_uri()

model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)


def train_one() -> float:
    inputs = torch.randn(32, 8)
    loss = (model(inputs).squeeze(1) - inputs.sum(dim=1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return float(loss.item())


state = tc.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)  # the generators of every library are included
with tc.Checkpointer(str(local), remote, state=state, every=tc.Every(steps=25)) as ckpt:
    restored = ckpt.restore()
    print("a new run" if restored.fresh else f"continuing from step {restored.step}, read from {dict(restored.sources)}")
    for step in range(restored.step, total):  # 0 when the run is new
        loss = train_one()
        if ckpt.maybe_save(step + 1):  # step = completed optimizer steps, everywhere
            print(f"step {step + 1}: saved, loss {loss:.4f}")

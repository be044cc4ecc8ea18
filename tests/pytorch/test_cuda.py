"""State on CUDA devices. What needs a device is skipped, visibly, where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.pytorch.rig import same_bits, store
from tieredckpt.pytorch.train_state import TrainState
from tieredckpt.settings import Settings

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: staging from and loading into one is not run here"
)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_round_trip(layout: str) -> None:
    base = torch.randn(300, 400, device="cuda")
    value = {"contiguous": base, "transposed": base.t(), "strided": base[::2, 1:]}[layout]
    target = {"x": torch.zeros(value.shape, device="cuda")}
    store({"x": value}).restore(target)
    assert same_bits(target["x"], value)


def test_c127_copies_come_after_the_work_of_the_callers_stream_and_before_what_follows() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        value = torch.ones(1 << 26, device="cuda")
        torch.cuda._sleep(50_000_000)
        value.mul_(3)
        stored = store({"x": value}, Settings())
        value.zero_()
    torch.cuda.synchronize()
    assert torch.equal(stored.whole()["x"], torch.full((1 << 26,), 3.0))


@pytest.mark.parametrize("old", [{"fused": True}, {"capturable": True}, {}], ids=str)
@pytest.mark.parametrize("new", [{"fused": True}, {"capturable": True}, {}], ids=str)
def test_c90_steps_are_where_the_optimizer_needs_them(old: dict[str, bool], new: dict[str, bool]) -> None:
    model, fresh = nn.Linear(4, 4).cuda(), nn.Linear(4, 4).cuda()
    optimizer, optimizer2 = torch.optim.AdamW(model.parameters(), **old), torch.optim.AdamW(fresh.parameters(), **new)
    for _ in range(3):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
    store(TrainState(model=model, optimizer=optimizer)).restore(TrainState(model=fresh, optimizer=optimizer2))
    for net, opt in ((model, optimizer), (fresh, optimizer2)):
        net.zero_grad()
        net(torch.ones(2, 4, device="cuda")).sum().backward()
        opt.step()
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_saved_on_cuda_restored_on_the_cpu() -> None:
    model, fresh = nn.Linear(4, 4).cuda(), nn.Linear(4, 4)
    optimizer, optimizer2 = torch.optim.AdamW(model.parameters(), fused=True), torch.optim.AdamW(fresh.parameters())
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    store({"m": model, "o": optimizer}).restore({"m": fresh, "o": optimizer2})
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    moment = optimizer2.state[fresh.weight]["exp_avg"]
    assert moment.device.type == "cpu"
    assert same_bits(moment, optimizer.state[model.weight]["exp_avg"])

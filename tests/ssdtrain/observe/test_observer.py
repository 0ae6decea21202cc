"""What an observed step takes: its operators, and nobody's launches."""

from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.observe.observer import HOLD_MS
from ssdtrain.transfer.device import CpuDevice

LAUNCH_S = 0.0003


class Launched(nn.Module):
    """Its host takes its time before each operator."""

    def __init__(self, virtual_time: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self._time = virtual_time

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            self._time.sleep(LAUNCH_S)
            x = part(x).tanh()
        return x.sum()


def test_no_mark_counts_the_time_for_which_the_device_is_held(
    virtual_time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[Note: held marks]: there is a hold for each, which takes a second here."""
    holds: list[float] = []

    def hold(self: CpuDevice, ms: float) -> None:
        holds.append(ms)
        virtual_time.sleep(1.0)

    monkeypatch.setattr(CpuDevice, "hold", hold)
    net = Launched(virtual_time)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ssdtrain.offload(
        net, max_overhead=0.01, target="host", min_bytes=1
    ) as session:
        for _ in range(8):
            net(torch.linspace(-1, 1, 32).view(4, 8)).backward()
            optimizer.step()
        profile = session.profile
    assert profile is not None
    assert holds.count(HOLD_MS) >= len(profile.marks) > 8
    assert sum(mark.ms for mark in profile.marks) < 1000.0

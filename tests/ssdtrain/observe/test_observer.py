"""What an observed step takes: its operators, and nobody's launches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.observe.hosttime import BESIDE, HostMeter
from ssdtrain.observe.observer import HOLD_MS, Recording
from ssdtrain.plan.profile import HostCosts
from ssdtrain.rebuild.clock import Clock
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


def recorded(device: CpuDevice, meter: HostMeter) -> Recording:
    """A step with one lane."""
    ledger: Any = SimpleNamespace(
        clock=Clock(device.torch_device),
        start_level=lambda: None,
        live_bytes=0,
        held_bytes=0,
    )
    recording = Recording(device, ledger, str, int, meter)
    course: Any = None
    recording.lane(course, "model/0")
    return recording


def test_a_rebuild_costs_the_host_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what its inputs take that the step has moved, nor the looks of the observer,
    which wait here, and a factor is rebuilt by the way: 0.25 and 0.5 ms, of 21."""
    now, device = [0], CpuDevice()
    meter = HostMeter(now=lambda: now[0])
    recording = recorded(device, meter)

    def passes(us: int) -> None:
        now[0] += 1000 * us

    monkeypatch.setattr(CpuDevice, "reset_peak", lambda self: passes(4000))
    monkeypatch.setattr(CpuDevice, "memory", lambda self: passes(4000))

    def unpack(handle: Any) -> None:
        passes(5000)  # its inputs
        for number, us in ((0, 250), (1, 500)):
            recording.rebuilds()
            passes(us)
            recording.rebuilt(0, number)

    try:
        meter.around(lambda tensor: None, unpack)[1](None)
    finally:
        device.close()
    assert meter.spent_ns == 21_750_000
    assert meter.rebuild_ms(0, [0]) == pytest.approx(BESIDE * 0.25)
    assert meter.rebuild_ms(0, [0, 1, 2]) == pytest.approx(BESIDE * 0.375)
    assert meter.rebuild_ms(0, [2]) == 0.0


def test_a_rebuild_costs_the_host_no_rerun() -> None:
    """Whoever asks for it first waits for the region that makes what it reads: 5 ms
    here, of 6."""
    now, device = [0], CpuDevice()
    meter = HostMeter(now=lambda: now[0])
    recording = recorded(device, meter)
    recording.region(0, 0, "layer")

    def unpack(handle: Any) -> None:
        recording.runs_again()
        now[0] += 5_000_000
        recording.ran_again(0, 0)
        now[0] += 1_000_000

    try:
        meter.around(lambda tensor: None, unpack)[1](None)
    finally:
        device.close()
    assert meter.costs(HostCosts()).keep.use_ms == pytest.approx(BESIDE)
    assert meter.spent_ns == 6_000_000

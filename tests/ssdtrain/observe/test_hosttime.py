"""Host time of the hooks, with a clock that the test turns."""

from typing import Any

import pytest
import torch

from ssdtrain.observe.hostprobe import (
    host_costs,
)
from ssdtrain.observe.hosttime import (
    DEVICE_PERIOD,
    HostMeter,
)
from ssdtrain.transfer.device import CpuDevice, CpuEvent
from tests.ssdtrain.virtual_time import VirtualTime


class Turned:
    """A clock in ns."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def pass_us(self, us: int) -> None:
        self.ns += 1000 * us


def test_a_failing_hook_ends_its_call() -> None:
    meter = HostMeter(now=Turned())

    def fail(_: Any) -> Any:
        raise RuntimeError("no")

    timed, _ = meter.around(fail, fail)
    for count in (1, 2):
        with pytest.raises(RuntimeError, match="no"):
            timed("tensor")
        assert meter.num_calls == count


def test_the_probe_runs_a_compiled_plan() -> None:
    """Real tables on a real device: each way of each place has a price."""
    costs = host_costs(torch.device("cpu"))
    for cost in (costs.keep, costs.host, costs.ssd, costs.rebuild):
        assert cost.pack_ms > 0.0 and cost.use_ms > 0.0
    assert costs.host.load_ms > 0.0 and costs.ssd.load_ms > 0.0
    assert costs.rebuild.load_ms == 0.0


def test_the_device_in_the_hooks_is_told_by_module() -> None:
    """A moment before and one behind a call; the rest of the step is not theirs, nor
    what the moments take, and calls between are taken to be alike."""
    now = Turned()

    def moment() -> int:
        now.pass_us(5)
        return now.ns

    meter = HostMeter(now=now, moment=moment)
    pack, _ = meter.around(lambda tensor: now.pass_us(30), lambda handle: None)
    for _ in range(2 * DEVICE_PERIOD):
        pack("tensor")
        now.pass_us(500)
    assert meter.device_spans is not None
    assert len(meter.device_spans.spans) == 2
    found = meter.device_spans.by_module(lambda start, end: (end - start) / 1e6)
    assert found == {"": pytest.approx(2 * DEVICE_PERIOD * 0.03)}


def test_the_device_in_rebuilds_is_not_the_hosts() -> None:
    """One call in so many is timed: a re-run among them would count as often. Steps of
    1.7B and 4B models with as many re-runs as layers were told to wait for the host for
    0 and 60 ms, by chance."""
    now, num_rebuilds = Turned(), 0

    def pack(tensor: object) -> None:
        nonlocal num_rebuilds
        is_long = tensor == "region"
        num_rebuilds += is_long
        now.pass_us(4000 if is_long else 3)

    meter = HostMeter(now=now, moment=lambda: now.ns, num_rebuilds=lambda: num_rebuilds)
    timed, _ = meter.around(pack, lambda handle: None)
    for number in range(1, 1 + 4 * DEVICE_PERIOD):
        timed("region" if number == 2 * DEVICE_PERIOD else "tensor")
    assert meter.device_spans is not None
    found = meter.device_spans.by_module(lambda start, end: (end - start) / 1e6)
    assert found == {"": pytest.approx(3 * DEVICE_PERIOD * 0.003)}


class Late(CpuEvent):
    """The end of a copy that takes 20 ms."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__(done=True)
        self._clock = clock

    def synchronize(self) -> None:
        self._clock.sleep(0.02)
        super().synchronize()


def test_waits_are_reported_by_cause(virtual_time: VirtualTime) -> None:
    device = CpuDevice()
    try:
        device.wait(Late(virtual_time), outwards=True)
        device.wait(Late(virtual_time))
        with device.stall():
            virtual_time.sleep(0.01)
        found = device.cut_stalls()()
        assert found.out_ms == pytest.approx(20.0, abs=0.1)
        assert found.ms == pytest.approx(50.0, abs=0.1)
        assert device.cut_stalls()() == (0.0, 0.0)
    finally:
        device.close()

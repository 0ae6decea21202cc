"""Host time of the hooks, with a clock that the test turns."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from ssdtrain.cache.handles import KeptHandle, KeptItemHandle, ParameterHandle
from ssdtrain.cache.moved import MovedHandle
from ssdtrain.cache.record import Handle, RebuiltView
from ssdtrain.observe import hostprobe
from ssdtrain.observe.hostprobe import (
    host_costs,
    measured_chain,
)
from ssdtrain.observe.hosttime import (
    DEVICE_PERIOD,
    HostMeter,
)
from ssdtrain.plan.placement import Placement
from ssdtrain.transfer.copies import PinnedBuffer
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


class AtOnce:
    """Copies without threads: what is left is what the hooks call."""

    def __init__(self) -> None:
        self._ended = CpuEvent()
        self._ended.reach()

    def out(self, place: PinnedBuffer, source: Tensor) -> None:
        place.memory.copy_(source)
        place.copied = self._ended

    def back(self, places: Sequence[PinnedBuffer]) -> list[Tensor]:
        return [place.memory.clone() for place in places]

    def arrive(self, place: PinnedBuffer) -> None:
        """It has."""

    def quiesce(self) -> None:
        """Nothing is under way."""


def _kind(handle: Any) -> type:
    return type(handle.source) if type(handle) is Handle else type(handle)


class CallMeter(HostMeter):
    """Counts functions of Python that a hook calls in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, type], list[int]] = defaultdict(list)

    def around(self, pack: Any, unpack: Any) -> Any:
        def packed(tensor: Tensor) -> Any:
            handle, num = self._counted(pack, tensor)
            self.calls["pack", _kind(handle)].append(num)
            return handle

        def unpacked(handle: Any) -> Tensor:
            tensor, num = self._counted(unpack, handle)
            self.calls["use", _kind(handle)].append(num)
            return tensor

        return packed, unpacked

    def _counted(self, hook: Any, argument: Any) -> Any:
        num = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal num
            num += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            found = hook(argument)
        finally:
            sys.setprofile(before)
        return found, num


def test_calls_for_a_tensor_of_a_settled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the host a tenth of a microsecond and more. These are the figures of
    today; whoever needs one more looks for one less first."""
    at_once = lambda device, fall_back, loads_in_pieces: AtOnce()  # noqa: E731
    monkeypatch.setattr("ssdtrain.cache.cache.copies_of", at_once)
    monkeypatch.setattr(hostprobe, "PLACES", (Placement.KEEP, Placement.OFFLOAD))
    meter = CallMeter()
    measured_chain(torch.device("cpu"), meter)
    found = {what: statistics.median(each) for what, each in meter.calls.items()}
    assert found["pack", KeptHandle] == found["use", KeptHandle] == 1
    assert found["pack", ParameterHandle] == found["use", ParameterHandle] == 1
    # A tensor that stays, and by which another one is released or buried, as most are
    # here; a CPU's wait for a copy takes four calls of it.
    assert found["pack", KeptItemHandle] <= 25
    assert found["use", KeptItemHandle] <= 16
    assert found["pack", MovedHandle] <= 18
    assert found["use", MovedHandle] <= 29, "with the load of a batch of one"
    monkeypatch.setattr(hostprobe, "PLACES", (Placement.KEEP, Placement.RECOMPUTE))
    meter = CallMeter()
    measured_chain(torch.device("cpu"), meter)
    found = {what: statistics.median(each) for what, each in meter.calls.items()}
    # Of these a CPU's settings take seven each way.
    assert found["pack", RebuiltView] <= 45
    assert found["use", RebuiltView] <= 47, "with its input's"
    assert found["pack", MovedHandle] <= 18, "what a recipe reads"

"""Of several steps in which all regions ran again, which one is believed."""

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache.bypass import Bypass
from ssdtrain.cache.regions import Choice
from ssdtrain.observe.largest import LargestBatch
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.regionsteps import (
    RegionStep,
    fastest,
)
from ssdtrain.plan.calibrate import PlainTimes
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.scaled import FIXED_SHARE, Growth
from ssdtrain.rebuild.clock import Span
from ssdtrain.transfer.device import Stalled

RERUN_MS, STALL_MS, HOST_MS = 74.5, 0.4, 33.0


class Timer(Bypass):
    """Of a step that took so long."""

    def __init__(self, step_ms: float) -> None:
        self._step_ms = step_ms

    def ms_between(self, start: float, end: float) -> float:
        """Moments are ms."""
        return end - start

    def times(self, start: object, end: object) -> PlainTimes:
        """Half of the step is forward."""
        half = self._step_ms / 2
        return PlainTimes(self._step_ms, forward_ms=half, host_forward_ms=HOST_MS)


def steps(*found: tuple[float, int]) -> Iterable[RegionStep]:
    """Steps that took so many ms and saved so many bytes."""
    for step_ms, num_bytes in found:
        yield RegionStep(
            timer=Timer(step_ms),
            start=None,
            end=None,
            spans=lambda: [Span("region", "0", 0, RERUN_MS)],
            stalls=lambda: Stalled(STALL_MS, STALL_MS),
            meter=None,
            num_bytes=num_bytes,
        )


@pytest.mark.parametrize(
    ("num_bytes", "expected_ms"), [(8192, 440.0), (8200, 440.0), (4000, 230.0)]
)
def test_a_step_of_a_smaller_batch_is_none_that_was_faster(
    num_bytes: int, expected_ms: float
) -> None:
    """The nearest to the observed step's bytes count, the fastest of those alike."""
    measured = list(steps((450.0, 8190), (230.0, 4096), (440.0, 8192)))
    assert fastest(measured, num_bytes).times().step.step_ms == expected_ms


FIXED_S, ROW_S = 0.008, 0.001


class Part(nn.Module):
    """A region whose forward takes 8 ms, and one more for each row."""

    def __init__(self, virtual_time: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        # A function: what changes inside an object would be a side effect.
        clock = weakref.proxy(virtual_time)  # its lock is one of threads
        self._work = lambda rows: clock.sleep(FIXED_S + ROW_S * rows)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 8) to the same."""
        self._work(len(x))
        return self.inner(x).tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("rows", "is_told"), [([8, 24, 16, 4], True), ([8], False)])
def test_a_session_learns_how_its_steps_grow(
    virtual_time: Any, monkeypatch: pytest.MonkeyPatch, rows: list[int], is_told: bool
) -> None:
    """Of 8 ms and one for each row, half do not grow where the observed step has 8."""
    monkeypatch.setattr("ssdtrain.api._first_regions", lambda *settings: Choice.ALL)
    monkeypatch.setattr(MemoryGoal, "fits_plain", lambda own, profile: False)
    shares: list[float] = []
    growth_of = LargestBatch.growth_of

    def asked(own: LargestBatch, seen: Profile, fixed_share: float) -> Growth:
        shares.append(fixed_share)
        return growth_of(own, seen, fixed_share)

    monkeypatch.setattr(LargestBatch, "growth_of", asked)
    torch.manual_seed(0)
    net = nn.Sequential(*(Part(virtual_time) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ssdtrain.offload(
        net, target="host", min_bytes=1, memory_budget_bytes=1 << 30
    ) as session:
        for step in range(8):
            # The second one is observed.
            num = rows[(step - 1) % len(rows)]
            net(torch.ones(num, 8, requires_grad=True)).sum().backward()
            optimizer.step()
        assert session.plan is not None
    if is_told:
        assert shares[-1] == pytest.approx(0.5, abs=0.05)
    else:
        assert shares[-1] == FIXED_SHARE

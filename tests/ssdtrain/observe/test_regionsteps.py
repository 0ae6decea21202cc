"""Of several steps in which all regions ran again, which one is believed."""

import math
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
    Backwards,
    RegionStep,
    Reruns,
    fastest,
    least_host_ms,
)
from ssdtrain.plan.calibrate import PlainTimes
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.scaled import FIXED_SHARE, Growth, StepTime
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


def test_a_step_that_was_disturbed_is_not_believed() -> None:
    """A 1.7B model on an H200, whose keep step takes 337 ms: the longest of these three
    alone was believed, 423 ms."""
    measured = list(steps((448.4, 8192), (435.8, 8192), (498.4, 8192)))
    plain = fastest(measured, 8192).times().plain()
    assert plain.step_ms == pytest.approx(435.8 - RERUN_MS - STALL_MS)
    assert plain.forward_ms == pytest.approx(435.8 / 2 - STALL_MS)
    assert plain.step_ms < 1.08 * 336.6


def test_the_host_behind_the_last_rerun_is_told() -> None:
    now = [0]
    reruns = Reruns(lambda: now[0], lambda: now[0])
    course: Any = None
    reruns.lane(course, "model/0")
    assert reruns.host_behind_ms() is None, "none has run"
    for number in (1, 0):
        reruns.runs_again()
        now[0] += 3_000_000
        reruns.ran_again(0, number)
        now[0] += 4_000_000
    assert reruns.host_behind_ms() == 4.0
    reruns.ran_again(3, 0)  # a lane of a step before
    assert reruns.ended == now[0] - 4_000_000


def test_the_device_behind_the_last_rerun_is_told_of_batches_alike() -> None:
    """What lies behind backward does not grow with the batch."""
    reruns = Reruns(lambda: 30.0)
    course: Any = None  # only its kind is asked for
    reruns.lane(course, "model/0")
    (step,) = steps((500.0, 8192))
    step = step._replace(end=42.0, reruns=reruns)
    assert step.behind_ms(8192, Growth()) == math.inf, "none has run"
    reruns.ran_again(0, 0)
    assert step.behind_ms(8192, Growth()) == 12.0
    assert step.behind_ms(8200, Growth()) == 12.0
    assert step.behind_ms(4000, Growth()) == math.inf


@pytest.mark.parametrize(
    ("num_bytes", "expected_ms"), [(8192, 440.0), (8200, 440.0), (4000, 230.0)]
)
def test_a_step_of_a_smaller_batch_is_none_that_was_faster(
    num_bytes: int, expected_ms: float
) -> None:
    """The nearest to the observed step's bytes count, the fastest of those alike."""
    measured = list(steps((450.0, 8190), (230.0, 4096), (440.0, 8192)))
    assert fastest(measured, num_bytes).times().step.step_ms == expected_ms


def test_a_longer_steps_times_are_shortened_to_the_observed_ones() -> None:
    """Three steps behind an observed one of 2379 tokens, on an H200: the plain step of
    2379 takes 117 ms, and that of 5365 was believed for it, 227."""
    step = fastest(list(steps((374.0, 14034), (340.0, 13592), (330.0, 12183))), 5826)
    whole = step.times().plain()
    plain = step.plain(5826, Growth())
    assert whole.step_ms > 2 * 117
    longer = Growth().times_longer(12183 / 5826)
    assert plain.step_ms == pytest.approx(whole.step_ms / longer)
    assert plain.step_ms == pytest.approx(117, rel=0.25)
    factor = step.factor(5826, Growth())
    assert plain.forward_ms == pytest.approx(whole.forward_ms * factor)
    # The host launches as much.
    assert plain.host_forward_ms == whole.host_forward_ms == HOST_MS
    # What is nearly as long is as it is.
    assert step.plain(12200, Growth()) == whole
    assert step.factor(12200, Growth()) == 1.0


def test_a_rerun_takes_the_host_what_it_takes_at_least() -> None:
    """Of steps, as the device may block it; of the lanes of one step, the longest."""
    now, course = [0], Any
    found = []
    for times_ms in ([3, 9, 4], [5, 2, 2]):
        host = Reruns(lambda: None, lambda: now[0])
        host.lane(course, "model/0")  # type: ignore[arg-type]
        host.lane(course, "model/0")  # type: ignore[arg-type]
        for (lane, number), ms in zip([(0, 0), (0, 1), (1, 0)], times_ms, strict=True):
            host.runs_again()
            now[0] += ms * 1_000_000
            host.ran_again(lane, number)
        host.ran_again(2, 0)  # a lane of another step
        found.append(host.spent_ns)
    assert least_host_ms(found, ("model/0", 0)) == 4.0
    assert least_host_ms(found, ("model/0", 1)) == 2.0
    assert least_host_ms(found, ("model/0", 2)) == 0.0


def test_backwards_tell_how_times_grow() -> None:
    """Half of each step is its forward; of the rest, waits and what is behind backward
    do not count."""
    measured = list(steps((500.0, 4000), (900.0, 8000)))
    assert measured[0].backward(tail_ms=50.0) == StepTime(4000, 250.0 - 50.0)
    backwards = Backwards()
    assert backwards.fixed_share(4000) == FIXED_SHARE
    for step in measured:
        backwards.note(step.backward(tail_ms=50.0))
    # 200 ms and 400: all of it grows.
    assert backwards.fixed_share(4000) == 0.0
    for step in steps((700.0, 4000), (900.0, 8000)):
        backwards.note(step.backward(tail_ms=50.0))
    assert 0.0 < backwards.fixed_share(8000) < backwards.fixed_share(4000)
    backwards.clear()
    assert backwards.fixed_share(4000) == FIXED_SHARE


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

"""Steps that need more than their plan said: see [Note: measured peaks]."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ssdtrain.observe.peaks import RetryWatch
from ssdtrain.plan.goal import DEVICE_RESERVE
from ssdtrain.transfer.device import CpuDevice, MemoryLevel
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.test_device_memory import SETTINGS, Run
from tests.ssdtrain.observe.parts import Device

pytestmark = pytest.mark.usefixtures("virtual_time")
MOST_STEPS = 200


def greedy_from(model: nn.Sequential, num_bytes: int) -> Any:
    """Let the last block's result hold memory that nobody saved, up to its backward."""

    def hold(module: nn.Module, args: Any, result: Tensor) -> None:
        held = torch.empty(num_bytes, dtype=torch.uint8)
        result.register_hook(lambda slope: slope if held.numel() else None)

    return model[-1].register_forward_hook(hold)


@pytest.mark.parametrize("resets", [True, False], ids=["resets", "leaves"])
def test_a_step_beyond_the_limit_is_planned_anew(
    monkeypatch: pytest.MonkeyPatch, resets: bool
) -> None:
    """Also where the user starts the allocator's maximum again at each step's end, and
    where a higher one of before hides the step's own."""

    def run_of(**settings: Any) -> Run:
        run = Run(monkeypatch, **settings)
        run.resets = resets
        return run

    whole = Run(monkeypatch).steps(2).highest[-1]
    limit = int(0.8 * whole)
    run = run_of(device_memory=limit, **SETTINGS).steps(4)
    assert run.session is not None and run.session.plan is not None
    before = run.session.plan
    handle = greedy_from(run.model, int(0.06 * limit))
    run.steps(8)
    handle.remove()
    after = run.session.plan
    run.session.close()
    assert after is not None and after.prediction and before.prediction
    assert after.prediction.peak_bytes < before.prediction.peak_bytes
    assert not resets or run.highest[-1] <= limit
    assert same_bits(run.seen, Run(monkeypatch).steps(12).seen)


def test_a_plan_with_retries_is_followed_by_one_that_leaves_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Run(monkeypatch).steps(2).highest[-1]
    limit = int(1.04 * whole)
    run = Run(monkeypatch, device_memory=limit, **SETTINGS)
    meter: Any = run.meter
    retries = [0]

    def level(device: CpuDevice) -> MemoryLevel:
        return MemoryLevel(meter.now_bytes, 0, meter.peak_bytes, 0, 0, retries[0])

    monkeypatch.setattr(CpuDevice, "memory", level)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: limit)
    run.steps(8)
    assert run.session is not None and run.session.plan is not None
    before = run.session.plan
    while (after := run.session.plan) is before:
        assert len(run.highest) < MOST_STEPS
        retries[0] += 1
        run.steps(1)
    run.session.close()
    assert after is not None and after.prediction and before.prediction
    assert after.prediction.peak_bytes < before.prediction.peak_bytes
    base_bytes = run.session.profile.base_bytes if run.session.profile else 0
    assert base_bytes + after.prediction.peak_bytes <= (1 - 2 * DEVICE_RESERVE) * limit
    assert same_bits(run.seen, Run(monkeypatch).steps(len(run.highest)).seen)


@pytest.mark.parametrize(
    ("retries", "grows", "is_short"),
    [
        ([0, 0, 1], False, True),
        ([0, 0, 1], True, False),
        ([0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5], True, False),
        ([0, 0, 0, *range(1, 12)], True, True),
        ([7, 9, 11, 13, 15, 17], True, True),
        ([7, 7, 0], False, False),
        ([7, 0, 1], False, True),
    ],
    ids=["whole", "once", "seldom", "begins", "always", "zeroed", "zeroed before"],
)
def test_segments_that_grow_may_need_a_retry_now_and_then(
    retries: list[int], grows: bool, is_short: bool
) -> None:
    """Only where most steps do is there too little room."""
    device = Device()
    watch = RetryWatch(device)  # type: ignore[arg-type]
    watch.planned()
    found = []
    for number in [0, 0, *retries]:  # the first two steps do not count
        device.level = MemoryLevel(0, 0, 0, 0, num_retries=number)
        found.append(watch.step(grows=grows))
    assert found[-1] == is_short and not any(found[:-1])


def test_where_retries_go_on_a_plan_leaves_what_the_observed_step_had_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Run(monkeypatch).steps(2).highest[-1]
    limit, share = int(1.04 * whole), 0.14
    run = Run(monkeypatch, device_memory=limit, **SETTINGS)
    meter: Any = run.meter
    retries = [0]

    def level(device: CpuDevice) -> MemoryLevel:
        peak = meter.peak_bytes
        reserved = peak + int(share * limit)
        return MemoryLevel(meter.now_bytes, 0, peak, reserved, 0, retries[0])

    monkeypatch.setattr(CpuDevice, "memory", level)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: limit)
    run.steps(4)
    session = run.session
    assert session is not None
    first, second, third = [
        limit * (1 - DEVICE_RESERVE - each) for each in (0, DEVICE_RESERVE, share)
    ]
    used: list[int] = []
    while not used or used[-1] > third:
        plan, profile = session.plan, session.profile
        assert plan is not None and plan.prediction and profile is not None
        used.append(profile.base_bytes + plan.prediction.peak_bytes)
        while used[-1] > third and session.plan is plan:
            assert len(run.highest) < MOST_STEPS
            retries[0] += 1
            run.steps(1)
    session.close()
    assert used[0] <= first
    # By steps: most plans need not leave as much as the third.
    assert all(each <= second for each in used[1:]) and used[1] > third

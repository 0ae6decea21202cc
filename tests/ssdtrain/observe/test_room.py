"""[Note: torn blocks]: what the allocator's blocks leave no room for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.observe.room import Room
from ssdtrain.plan.goal import DEVICE_RESERVE, Goal
from ssdtrain.transfer.device import TRIMMED_SHARE, CpuDevice, MemoryLevel
from tests.ssdtrain.cache.metered import Meter
from tests.ssdtrain.cache.test_device_memory import SETTINGS, Run
from tests.ssdtrain.plan.profiles import drawn

pytestmark = pytest.mark.usefixtures("virtual_time")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for every time that a device was trimmed."""
    found: list[int] = []
    monkeypatch.setattr(CpuDevice, "trim", lambda device: found.append(len(found)))
    return found


def test_the_cache_is_emptied_before_an_optimizers_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each one that has no state yet, and not again where it never has any."""
    trimmed, room = counted(monkeypatch), Room(CpuDevice())
    net = nn.Linear(4, 4)
    adam = torch.optim.Adam(net.parameters())
    plain = torch.optim.SGD(net.parameters())
    for expected in (2, 2):
        room.before_step(adam, (), {})
        room.before_step(plain, (), {})
        assert len(trimmed) == expected
    older = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    older.step()
    room.before_step(older, (), {})
    assert len(trimmed) == 2


def test_a_session_trims_before_the_first_step_and_with_each_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trimmed = counted(monkeypatch)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in "abc"))
    adam = torch.optim.Adam(net.parameters())
    marks = []
    with ssdtrain.offload(
        net, max_overhead=0.01, target="host", min_bytes=0
    ) as session:
        for _ in range(6):
            net(torch.randn(16, 32)).sum().backward()
            marks.append((len(trimmed), session.plan is not None))
            adam.step()
            adam.zero_grad()
    assert marks[0] == (0, False) and marks[1] == (2, False)  # and it is observed
    assert next(number for number, planned in marks if planned) == 3
    other = torch.optim.Adam(net.parameters())
    before = len(trimmed)
    net(torch.randn(16, 32)).sum().backward()
    other.step()
    assert len(trimmed) == before  # closed


def test_what_is_easy() -> None:
    profile = replace(drawn(3, 8), base_bytes=1000)
    assert Goal().easy_bytes(profile) is None
    assert Goal(memory_budget_bytes=5000).easy_bytes(profile) is None
    most = 10_000 * (1 - DEVICE_RESERVE) - 1000
    for goal in (Goal(device_bytes=10_000), Goal(capacity_bytes=10_000)):
        assert goal.easy_bytes(profile) == most
        assert replace(goal, torn_bytes=800).easy_bytes(profile) == most - 800
    spared = Goal(device_bytes=10_000, torn_bytes=800, spare_bytes=50)
    assert spared.easy_bytes(profile) == most - 850


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_torn_blocks_of_the_observed_step_are_planned_for(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Where most is in use: less is torn elsewhere, and nobody needs it there."""
    whole = Run(monkeypatch).steps(2).highest[-1]
    limit = int(1.1 * whole)
    run = Run(monkeypatch, device_memory=limit, **SETTINGS)
    meter: Any = run.meter

    def level(device: CpuDevice) -> MemoryLevel:
        now, peak = meter.now_bytes, meter.peak_bytes
        return MemoryLevel(now, 0, peak, 0, int(share * limit))

    monkeypatch.setattr(CpuDevice, "memory", level)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: limit)
    run.steps(6)
    assert isinstance(meter, Meter) and run.session is not None
    plan = run.session.plan
    run.session.close()
    assert plan is not None and plan.prediction is not None
    keeps = plan.prediction.keep_peak_bytes
    assert plan.keeps_all == (share == 0.0)
    assert share == 0.0 or plan.prediction.peak_bytes < keeps


def test_what_is_stuck_when_a_plan_is_made_is_left_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing was torn while the step was observed; the emptied cache still has it."""
    whole = Run(monkeypatch).steps(2).highest[-1]
    limit = int(1.1 * whole)
    run = Run(monkeypatch, device_memory=limit, **SETTINGS)
    meter: Any = run.meter

    def level(device: CpuDevice) -> MemoryLevel:
        now, peak = meter.now_bytes, meter.peak_bytes
        return MemoryLevel(now, now + int(0.1 * limit), peak, peak)

    monkeypatch.setattr(CpuDevice, "memory", level)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: limit)
    monkeypatch.setattr(CpuDevice, "trim", lambda device, share=0.7: True)
    run.steps(6)
    assert run.session is not None
    plan, profile = run.session.plan, run.session.profile
    run.session.close()
    assert plan is not None and plan.prediction and profile is not None
    used_bytes = profile.base_bytes + plan.prediction.peak_bytes
    assert used_bytes <= (1 - 0.1 - DEVICE_RESERVE) * limit


def test_a_plan_leaves_pages_free_where_segments_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of them lie between tensors in the middle of a step."""
    whole = Run(monkeypatch).steps(2).highest[-1]
    limit = int(1.1 * whole)
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: limit)
    monkeypatch.setattr("ssdtrain.observe.room.STRANDED_BYTES", int(0.1 * limit))
    used = {}
    for reason in ("", "the user's settings name it"):
        monkeypatch.setattr(
            CpuDevice, "grow_segments", lambda device, told=reason: (told, lambda: None)
        )
        run = Run(monkeypatch, device_memory=limit, **SETTINGS).steps(6)
        assert run.session is not None
        plan, profile = run.session.plan, run.session.profile
        run.session.close()
        assert plan is not None and plan.prediction and profile is not None
        used[reason] = profile.base_bytes + plan.prediction.peak_bytes
    assert used[""] <= (1 - 0.1 - DEVICE_RESERVE) * limit < used[reason]


class Growing(CpuDevice):
    """Counts requests for segments that grow, and their ends."""

    def __init__(self, reason: str = "") -> None:
        super().__init__()
        self.reason, self.is_short = reason, False
        self.asked = self.undone = 0
        self.shares: list[float] = []

    def trim(self, share: float = TRIMMED_SHARE) -> bool:
        self.shares.append(share)
        return self.is_short

    def grow_segments(self) -> tuple[str, Callable[[], None]]:
        self.asked += 1
        return self.reason, self._end

    def _end(self) -> None:
        self.undone += 1


def test_segments_grow_once_memory_is_short_until_the_session_closes() -> None:
    device = Growing()
    room = Room(device)
    room.trim()
    assert device.asked == 0 and room.segments == "whole"
    device.is_short = True
    for _ in range(3):
        room.trim()
    assert device.asked == 1 and room.segments == "growing"
    for _ in range(2):
        room.close()
        assert device.undone == 1
    assert device.shares == [TRIMMED_SHARE] * 4


def test_under_a_limit_segments_grow_from_the_start_and_nothing_old_is_cached() -> None:
    device = Growing()
    Room(device).open()
    assert device.asked == 1 and device.shares == [0.0]


def test_segments_grow_from_the_start_where_much_is_trained() -> None:
    """An optimizer's state would stay in the holes between the gradients."""

    class Sized(Growing):
        def capacity_bytes(self) -> int:
            return 64 * 4096

    for size, trained, segments in (
        (4096, True, "growing"),
        (4096, False, "whole"),
        (2048, True, "whole"),
    ):
        model = nn.Linear(size, 1, bias=False).requires_grad_(trained)
        room = Room(Sized())
        room.open_for([model, nn.LazyLinear(4)])
        assert room.segments == segments


def test_segments_that_do_not_grow_are_told_with_the_reason() -> None:
    device = Growing("the user's settings name it")
    device.is_short = True
    room = Room(device)
    for _ in range(2):
        room.trim()
    assert room.segments == "whole: the user's settings name it" and device.asked == 1
    direct = Room(device, "a drive reads and writes device memory")
    direct.trim()
    assert device.asked == 1 and direct.segments.startswith("whole: a drive")


def test_a_session_asks_and_puts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def grow(device: CpuDevice) -> tuple[str, Callable[[], None]]:
        calls.append("grow")
        return "", lambda: calls.append("back")

    monkeypatch.setattr(CpuDevice, "grow_segments", grow)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in "abc"))
    with ssdtrain.offload(
        net, max_overhead=0.01, target="host", min_bytes=0
    ) as session:
        net(torch.randn(16, 32)).sum().backward()
        assert session.segments == "whole" and calls == []
    with ssdtrain.offload(net, device_memory="1GB", min_bytes=0) as session:
        assert session.segments == "growing" and calls == ["grow"]
    assert calls == ["grow", "back"]
    monkeypatch.setattr(CpuDevice, "trim", lambda device, share=0.7: True)
    with ssdtrain.offload(
        net, max_overhead=0.01, target="host", min_bytes=0
    ) as session:
        for _ in range(2):
            net(torch.randn(16, 32)).sum().backward()
            torch.optim.SGD(net.parameters()).step()
        assert calls[2:] == ["grow"]
    assert calls[2:] == ["grow", "back"]

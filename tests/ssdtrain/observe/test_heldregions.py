"""A step of regions in which the device is held: what it takes, and what it leaves."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache.cursor import Unobserved
from ssdtrain.cache.regions import Choice
from ssdtrain.jsonfile import decode, dumps
from ssdtrain.observe import observer
from ssdtrain.observe.heldregions import HOLD_MS, HeldTimes, held_steps
from ssdtrain.observe.hostprices import HostPrices
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.planner import Planner, Purpose
from ssdtrain.plan.calibrate import (
    Corrections,
    rebuild_key,
)
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.profile import HostCosts
from ssdtrain.plan.search import Request
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits

pytestmark = pytest.mark.usefixtures("virtual_time")
HELD_S, PAUSE_S = 1.0, 0.01


class Sum(nn.Module):
    """Saves what a recipe makes, and what none does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x.cumsum(-1).sin()))


class Sums(nn.Module):
    """Regions that must run again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Sum() for _ in range(4))
        self.pause: Callable[[], None] = lambda: None
        """Between two parts: the host's time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
            self.pause()
        return x.sum()


def train(net: Sums, steps: int) -> list[list[torch.Tensor]]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.linspace(-1, 1, 32).view(4, 8)).backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        optimizer.step()
    return found


@pytest.mark.parametrize("budget", [None, 1 << 30])
def test_a_step_is_held_when_somebody_asks_for_a_graph(
    monkeypatch: pytest.MonkeyPatch, virtual_time: Any, budget: int | None
) -> None:
    """What a graph's plan is made of is not the launches' time. The step's gradients
    are plain's, and the plan is the same behind it."""
    holds: list[float] = []

    def hold(self: CpuDevice, ms: float) -> None:
        if ms not in (observer.HOLD_MS, observer.RERUN_HOLD_MS):  # the observed step's
            holds.append(ms)
        virtual_time.sleep(HELD_S)

    made: list[Planner] = []
    held: list[HeldTimes] = []
    build = Planner.__init__

    def built(own: Planner, *args: Any, **settings: Any) -> None:
        build(own, *args, **settings)
        made.append(own)

    def noting(cache: Any) -> Any:
        held.append((yield from held_steps(cache)))
        return held[-1]

    monkeypatch.setattr(Planner, "__init__", built)
    monkeypatch.setattr("ssdtrain.observe.measured.held_steps", noting)
    monkeypatch.setattr(CpuDevice, "hold", hold)
    monkeypatch.setattr(MemoryGoal, "fits_plain", lambda *given: False)
    monkeypatch.setattr(HostPrices, "is_on_gpu", True)
    monkeypatch.setattr(HostPrices, "probe", lambda self: HostCosts())
    monkeypatch.setattr("ssdtrain.api._first_regions", lambda *settings: Choice.ALL)
    theirs, net = train(Sums(), 32), Sums()
    net.pause = lambda: virtual_time.sleep(PAUSE_S)
    settings: dict[str, Any] = {"max_overhead": 0.1}
    if budget is not None:
        settings = {"memory_budget_bytes": budget}
    with ssdtrain.offload(net, target="host", min_bytes=1, **settings) as session:
        found = train(net, 20)
        assert session.is_settled and not holds
        plan = session.plan
        assert not session.can_capture
        stages: list[Purpose] = []
        for _ in range(12):
            found += train(net, 1)
            stages.append(made[-1].stage)
        assert stages[:3] == [Purpose.HELD, Purpose.HELD, Purpose.FOLLOWING]
        assert session.can_capture and session.plan is plan
        assert same_bits(found, theirs)
        cache, (by,) = session.cache, held
        assert type(cache.cursor.observer) is Unobserved
        clock = cache.ledger.clock
        assert clock.before_rebuild is None and clock.after_rebuild is None
        profile = session.profile
    assert profile is not None
    ((kind, runs),) = profile.regions.items()
    assert len(by.held_regions[kind]) == len(runs) > 1
    for time in by.held_regions[kind]:
        assert 0.0 < time.forward_ms < HELD_S * 1e3
        assert time.backward_ms < HELD_S * 1e3
    assert any(time.backward_ms > 0.0 for time in by.held_regions[kind])
    rebuilt = [item for item in profile.kinds[kind] if item.recipe is not None]
    keys = {rebuild_key(item.recipe or "", item.num_bytes) for item in rebuilt}
    assert set(by.rebuild_ms) == keys and len(keys) > 0
    assert max(by.rebuild_ms.values()) < HELD_S * 1e3
    assert all(ms >= HOLD_MS for ms in holds)
    corrections = Corrections(**by._asdict())
    request = Request(profile=profile, goal=Goal(), corrections=corrections)
    assert decode(Request, json.loads(dumps(request))) == request

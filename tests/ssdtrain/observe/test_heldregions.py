"""A step of regions in which the device is held: what it takes, and what it leaves."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ssdtrain
from ssdtrain.cache.course import NO_WAY, LaneCourse, Unobserved
from ssdtrain.cache.regioncall import REGION
from ssdtrain.cache.regions import Choice
from ssdtrain.jsonfile import decode, dumps
from ssdtrain.observe import observer
from ssdtrain.observe.heldregions import HOLD_MS, HeldRegions
from ssdtrain.observe.heldsteps import held_steps
from ssdtrain.observe.heldtimes import HeldTimes, held_times
from ssdtrain.observe.hostprices import HostPrices
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.planner import Planner, Stage
from ssdtrain.plan.calibrate import (
    WITHOUT_RERUNS,
    Corrections,
    PlainTimes,
    rebuild_key,
)
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.profile import HostCosts
from ssdtrain.plan.replays import UNHELD, captured
from ssdtrain.plan.search import Request
from ssdtrain.rebuild.clock import Clock
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.plan.test_calibrate import BYTES, NUM_LAYERS, layers

pytestmark = pytest.mark.usefixtures("virtual_time")
HELD_S, PAUSE_S = 1.0, 0.01
HEAD_MS, FORWARD_MS, BACKWARD_MS = 0.5, 4.0, 8.0
"""Of a region, on the device."""


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


class Beside(Clock):
    """A device that runs beside a host of some speed, and its clock."""

    runs_beside = True

    def __init__(self, host: Any, slowness: float) -> None:
        super().__init__(torch.device("cpu"))
        self.host, self.slowness = host, slowness
        self.ready_ms = 0.0

    def now(self) -> float:
        return max(self.ready_ms, self.host.monotonic() * 1e3)

    def ms_between(self, start: float, end: float) -> float:
        self.host.sleep(max(0.0, end / 1e3 - self.host.monotonic()))
        return end - start

    def hold(self, ms: float) -> None:
        self.ready_ms = self.now() + ms

    def run(self, ms: float, host_ms: float) -> None:
        """Ten operators of the program, launched one after the other."""
        for _ in range(10):
            self.host.sleep(self.slowness * host_ms / 1e4)
            self.ready_ms = self.now() + ms / 10

    def span(self, recipe: str, place: Any, ms: float, host_ms: float) -> None:
        begun = self.begin()
        assert begun is not None
        self.run(ms, host_ms)
        self.end(begun, recipe, place, 64)


def step(clock: Any, regions: HeldRegions, *, interrupted: int = -1) -> None:
    """A step of `NUM_LAYERS` regions: forward, then re-run, rebuild and backward of
    each. interrupted: the host comes late to what follows this one's forward."""
    regions.start()
    regions.lane(LaneCourse(0, NO_WAY), "model/0")
    clock.run(HEAD_MS, 2.0)
    for number in range(NUM_LAYERS):
        regions.region(0, number, "")
        clock.run(FORWARD_MS, 2.0)
        if number == interrupted:
            clock.host.sleep(1.0)
    for number in reversed(range(NUM_LAYERS)):
        clock.span(REGION, ("model/0", REGION, number), FORWARD_MS, 4.0)
        clock.run(1.0, 1.0)
        clock.span("silu", number, 0.25, 0.5)
        clock.run(BACKWARD_MS - 1.0, 5.0)
    clock.cut()
    regions.stop()


def told(regions: HeldRegions, empty_ms: float = 0.0) -> HeldTimes:
    """What one held step tells by itself."""
    return held_times([regions.told(empty_ms)], empty_ms)


def held(host: Any, slowness: float, *, interrupted: int = -1) -> HeldTimes:
    """What a held step told behind one that was looked at."""
    clock: Any = Beside(host, slowness)
    step(clock, looking := HeldRegions(clock, clock))
    holds_ms = {look: ms for each in looking.holds_ms() for look, ms in each.items()}
    step(clock, own := HeldRegions(clock, clock, holds_ms), interrupted=interrupted)
    return told(own)


def hosted(slowness: float, own: HeldTimes | None) -> Corrections:
    """Step times that are all launches, and what a held step told."""
    host_ms = slowness * NUM_LAYERS * 5.0
    plain = PlainTimes(
        step_ms=3 * host_ms, forward_ms=host_ms, host_forward_ms=0.9 * host_ms
    )
    by = Corrections(
        plain=tuple(plain),
        note=WITHOUT_RERUNS,
        rerun_ms={"model/0": (slowness * 5.0,) * NUM_LAYERS},
    )
    if own is None:
        return by
    return replace(by, held_regions=own.held_regions, rebuild_ms=own.rebuild_ms)


def test_a_slow_host_leads_to_the_same_graph(virtual_time: Any) -> None:
    """Whatever launches take, a held step tells what the device does, and the plan of a
    graph is the same. Without one the observed step is believed, and not the launches'
    time."""
    seen, goal = layers(1.5), Goal(memory_budget_bytes=22 * BYTES)
    plans, unheld = [], []
    for slowness in (1.0, 2.0, 4.0):
        own = held(virtual_time, slowness)
        assert own.held_head_ms == pytest.approx(HEAD_MS)
        for time in own.held_regions["model/0"][1:]:
            assert time.backward_ms == pytest.approx(BACKWARD_MS)
        for time in own.held_regions["model/0"]:
            assert time.forward_ms == pytest.approx(FORWARD_MS)
        assert own.rebuild_ms == {rebuild_key("silu", 64): pytest.approx(0.25)}
        profile = captured(seen, hosted(slowness, own))
        assert profile.compute_ms == pytest.approx(
            NUM_LAYERS * (FORWARD_MS + BACKWARD_MS)
        )
        assert UNHELD not in profile.notes
        plans.append(choose(profile, goal).orders)
        profile = captured(seen, hosted(slowness, None))
        assert profile.compute_ms <= seen.compute_ms * (1 + 1e-9)
        unheld.append(choose(profile, goal).orders)
    assert plans[0] == plans[1] == plans[2]
    assert unheld[1] == unheld[2]


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
    monkeypatch.setattr(MemoryGoal, "fits_plain", lambda self, profile: False)
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
        stages: list[Stage] = []
        for _ in range(12):
            found += train(net, 1)
            stages.append(made[-1].stage)
        assert stages[:3] == [Stage.HELD, Stage.HELD, Stage.FOLLOWING]
        assert session.can_capture and session.plan is plan
        assert same_bits(found, theirs)
        cache, (by,) = session.cache, held
        assert type(cache.course.observer) is Unobserved
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

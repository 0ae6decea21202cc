"""The steps between an observed one and the first plan, and what they leave behind."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.cache import bypass
from ssdtrain.cache.bypass import Bypass
from ssdtrain.cache.cursor import Unobserved
from ssdtrain.cache.regions import Choice
from ssdtrain.observe.hostprices import HostPrices
from ssdtrain.observe.measured import NUM_REGION_STEPS, Measured
from ssdtrain.observe.memorygoal import MemoryGoal
from ssdtrain.observe.plainsteps import NUM_STEPS
from ssdtrain.observe.regionsteps import RegionStep
from ssdtrain.plan.calibrate import Corrections
from ssdtrain.plan.plan import LinkLoad, Plan, Prediction
from ssdtrain.plan.profile import HostCost, HostCosts, Profile
from ssdtrain.plan.simulate import Simulation
from ssdtrain.plan.timeline import Timeline
from ssdtrain.transfer.device import CpuDevice
from tests.ssdtrain.plan.test_host import hosted, moved_orders

FREE = HostCosts(host=HostCost(pack_ms=1))
pytestmark = pytest.mark.usefixtures("virtual_time")

PLAIN = ["plain"] * NUM_STEPS
REGIONS = ["", *["regions"] * (NUM_REGION_STEPS - 1)]
"""Nothing is measured in the first one."""
STEP_S = 0.1


class Net(nn.Module):
    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
        self.parts = nn.ModuleList(parts)
        self._look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._look()
        for part in self.parts:
            x = part(x)
        return x.sum()


def kind_of(cache: Any) -> str:
    """What a step is run for, by what stands in its way."""
    if isinstance(cache.bypass, Bypass):
        return "plain"
    return "regions" if cache.timer is not None else ""


def is_clean(cache: Any) -> bool:
    clock = cache.ledger.clock
    own = cache.bypass, cache.timer, cache.meter, clock.before_rebuild
    return (
        all(each is None for each in (*own, clock.after_rebuild))
        and not clock.keep_spans
        and type(cache.cursor.observer) is Unobserved
    )


def steps(
    monkeypatch: pytest.MonkeyPatch, *, fits: bool, most: int = 20
) -> tuple[list[str], Any]:
    """Train until so many steps have measured, and no other is observed; what each was
    for, and the cache behind it."""
    monkeypatch.setattr(MemoryGoal, "fits_plain", lambda *given: fits)
    monkeypatch.setattr(CpuDevice, "hold", lambda own, ms: None)
    choice = Choice.NONE if fits else Choice.ALL
    monkeypatch.setattr("ssdtrain.api._first_regions", lambda *settings: choice)
    found: list[str] = []

    def look() -> None:
        found.append(kind_of(session.cache))
        bypass.time.sleep(STEP_S)  # type: ignore[attr-defined]

    net = Net(look)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings: dict[str, Any] = {"target": "host", "min_bytes": 1, "max_overhead": 0.01}
    with ssdtrain.offload(net, **settings) as session:
        for _ in range(most + 2):
            net(torch.ones(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.plan is not None:
                break
    return found, session.cache


@pytest.mark.parametrize(("fits", "kinds"), [(True, PLAIN), (False, REGIONS)])
def test_steps_that_measure_stand_between_the_observed_one_and_the_plan(
    monkeypatch: pytest.MonkeyPatch, fits: bool, kinds: list[str]
) -> None:
    found, cache = steps(monkeypatch, fits=fits)
    assert found == ["", "", *kinds, ""]
    assert is_clean(cache)


def test_the_hosts_time_is_not_that_of_the_step_that_makes_the_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[Note: base steps]: a lane is timed that follows its table."""
    monkeypatch.setattr(CpuDevice, "hold", lambda own, ms: None)
    monkeypatch.setattr("ssdtrain.api._first_regions", lambda *own: Choice.ALL)
    found: list[tuple[bool, bool]] = []

    def look() -> None:
        cache = session.cache
        found.append((cache.meter is not None, cache.lanes.current.run is not None))

    net = Net(look)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ssdtrain.offload(
        net, min_bytes=1, target="host", memory_budget=900
    ) as session:
        for _ in range(2 + NUM_REGION_STEPS):
            net(torch.ones(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            session.cache.offloader.wait_io()
    base = found[2:]
    assert base[0] == (False, False)  # here they are made
    assert base[1] == (True, True)
    assert base[2:] == [(False, True)] * (NUM_REGION_STEPS - 2)


def test_each_rerun_of_the_base_has_its_time_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuDevice, "hold", lambda own, ms: None)
    monkeypatch.setattr("ssdtrain.api._first_regions", lambda *own: Choice.ALL)
    monkeypatch.setattr(HostPrices, "is_on_gpu", True)
    found: list[list[dict[tuple[str, int], int]]] = []

    def host_ms(own: Measured, profile: Profile, steps: list[RegionStep]) -> Any:
        found.append([dict(step.reruns.spent_ns) for step in steps if step.reruns])
        return {}

    monkeypatch.setattr(Measured, "_rerun_host_ms", host_ms)
    net = Net(lambda: bypass.time.sleep(STEP_S))  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ssdtrain.offload(
        net, min_bytes=1, target="host", memory_budget=900
    ) as session:
        for _ in range(3 + NUM_REGION_STEPS):
            net(torch.ones(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            session.cache.offloader.wait_io()
    (steps,) = found
    assert len(steps) == NUM_REGION_STEPS - 2
    assert all({number for _, number in each} == {0, 1, 2, 3} for each in steps)


@pytest.mark.parametrize(
    ("fits", "kinds"),
    [(True, PLAIN[:n]) for n in (1, NUM_STEPS)]
    + [(False, REGIONS[:n]) for n in (1, NUM_REGION_STEPS)],
)
def test_a_session_that_is_closed_among_them_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, fits: bool, kinds: list[str]
) -> None:
    found, cache = steps(monkeypatch, fits=fits, most=len(kinds))
    assert found == ["", "", *kinds]
    assert is_clean(cache)


def empty(host: Any = None) -> Any:
    own: Any = None
    return Measured(own, host or SimpleNamespace(costs=None), own, own)


def told(step_ms: float, copies_ms: float) -> Prediction:
    return Prediction(
        step_ms=step_ms,
        peak_bytes=0,
        stall_ms=0.0,
        recompute_ms=0.0,
        keep_ms=100.0,
        keep_peak_bytes=0,
        links={"d2h": LinkLoad(num_bytes=1, busy_ms=copies_ms)},
    )


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_the_base_tells_what_region_calls_and_kept_tensors_cost(part: float) -> None:
    costs = HostCosts(keep=HostCost(pack_ms=0.5, use_ms=0.3), host=HostCost(pack_ms=1))
    profile = replace(hosted(1.0), host_costs=costs)
    orders = moved_orders(profile, {0})

    def told_ms(profile: Profile) -> float:
        return Simulation(Timeline(profile), orders).run().step_ms

    whole_ms, least_ms = told_ms(profile), told_ms(replace(profile, host_costs=FREE))
    measured = empty(SimpleNamespace(costs=costs, is_on_gpu=True))
    measured.corrections = Corrections(host_costs=costs)
    plan = Plan(orders=orders, policy="base")
    took_ms = least_ms + part * (whole_ms - least_ms) - (0.0 if part else 9.0)
    matched = measured.match(profile, plan, took_ms)
    found = measured.corrections.host_costs
    assert found is not None and found.host == costs.host
    assert found.keep.pack_ms == pytest.approx(part * 0.5)
    own_ms = told_ms(matched)
    assert matched == replace(profile, host_costs=found)
    assert own_ms == pytest.approx(max(took_ms, least_ms))
    measured.match(profile, plan, 2 * whole_ms)  # not more than was measured
    assert measured.corrections.host_costs == found


def test_a_plan_that_disappoints_makes_what_it_does_dearer() -> None:
    measured = empty()
    measured.disappointed(told(110.0, 50.0), 110.0)
    assert measured.corrections == Corrections()
    measured.disappointed(told(110.0, 50.0), 120.0)
    by = measured.corrections
    assert by.copy_slowdown == pytest.approx(0.1)
    assert by.host_factor == pytest.approx(1.5)
    measured.disappointed(told(100.0, 0.0), 400.0)
    assert measured.corrections.copy_slowdown == by.copy_slowdown
    assert measured.corrections.host_factor <= 2.0 * by.host_factor

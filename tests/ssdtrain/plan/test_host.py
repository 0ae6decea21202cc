"""The host as a queue of the simulator."""

import random
from dataclasses import replace

import pytest

from ssdtrain.plan.calibrate import Corrections, PlainTimes, corrected
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, Prediction, Wait
from ssdtrain.plan.profile import HostCost, HostCosts, Profile
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import Simulation, keep_all, simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.plan.words import explain
from tests.ssdtrain.plan.profiles import chain

COSTS = HostCosts(
    keep=HostCost(pack_ms=0.002, use_ms=0.001),
    host=HostCost(pack_ms=0.3, use_ms=0.1, load_ms=0.1),
)


def hosted(share: float, *, num: int = 12, num_handles: int = 0) -> Profile:
    """The chain, launched by a host that needs this share of the device's time."""
    plain = chain(num, gb_per_s=10.0)
    marks = tuple(
        replace(mark, host_ms=share * mark.ms, num_handles=num_handles)
        for mark in plain.marks
    )
    tail_ms = share * plain.tail_ms
    return replace(plain, marks=marks, host_costs=COSTS, tail_host_ms=tail_ms)


def moved_orders(profile: Profile, numbers: set[int]) -> dict[str, tuple[Order, ...]]:
    """Orders that move these items."""
    count = len(profile.kinds["model/0"])
    placements = {
        "model/0": [
            Placement.OFFLOAD if n in numbers else Placement.KEEP for n in range(count)
        ]
    }
    return schedule(Timeline(profile), placements)


def moved(profile: Profile, numbers: set[int]) -> Prediction:
    """A prediction for the plan that moves these items."""
    return simulate(Timeline(profile), moved_orders(profile, numbers))


def test_what_a_bound_host_does_is_added_to_the_step() -> None:
    profile = hosted(1.0)
    found = moved(profile, {0, 1, 2})
    own_ms = 3 * (0.3 + 0.1 + 0.1) + 9 * 0.003
    assert found.step_ms == pytest.approx(found.keep_ms + own_ms)
    assert found.host_wait_ms == pytest.approx(own_ms)
    assert found.waits == {Wait.HOST.value: pytest.approx(own_ms)}
    assert sum(wait.ms for wait in found.host_stalls) <= own_ms + 1e-9
    assert found.host_stalls[0].cause is Wait.HOST
    assert found.host_wait_ms > found.stall_ms


def test_the_default_plan_keeps_its_promise_on_a_bound_host() -> None:
    plan = choose(hosted(1.0), Goal(max_overhead=0.01))
    assert plan.keeps_all
    free = choose(hosted(0.3), Goal(max_overhead=0.01))
    assert free.prediction.peak_bytes <= 0.7 * plan.prediction.peak_bytes
    some = choose(hosted(1.0), Goal(max_overhead=0.05))
    assert some.prediction.overhead <= 0.05
    assert some.prediction.peak_bytes < plan.prediction.peak_bytes


@pytest.mark.parametrize("seed", range(100))
def test_keeping_everything_takes_what_was_measured(seed: int) -> None:
    """Whatever clocks and leads say of the host."""
    draw = random.Random(seed)
    profile = chain(draw.randint(2, 8))
    profile = replace(
        profile,
        marks=tuple(
            replace(
                mark,
                ms=draw.choice([0.0, 0.1, 1.0, 5.0]) * draw.random(),
                host_ms=draw.choice([0.0, 0.1, 1.0, 10.0]) * draw.random(),
            )
            for mark in profile.marks
        ),
        head_ms=draw.choice([0.0, 1.0, 3.0]),
        tail_ms=draw.choice([0.0, 1.0, 8.0]),
        head_host_ms=draw.choice([0.0, 1.0, 5.0]),
        tail_host_ms=draw.choice([0.0, 1.0, 9.0]),
        host_lead_ms=draw.choice([0.0, 1.0, 5.0, 50.0]),
        host_costs=COSTS,
    )
    ran = PlainTimes(
        step_ms=profile.compute_ms * draw.uniform(0.6, 1.4),
        forward_ms=profile.forward_ms * draw.uniform(0.6, 1.4),
        host_forward_ms=profile.host_ms * draw.uniform(0.2, 1.5),
        host_lead_ms=profile.host_lead_ms,
    )
    dearer = HostCosts(rebuild=HostCost(use_ms=1.0), host=HostCost(pack_ms=2.0))
    for by in (
        Corrections(plain=tuple(ran)),
        Corrections(plain=tuple(ran), host_costs=dearer, copy_slowdown=0.5),
    ):
        timeline = Timeline(corrected(profile, by))
        run = Simulation(timeline, keep_all(timeline)).run()
        assert run.step_ms == pytest.approx(timeline.profile.compute_ms)
        assert run.host_wait_ms == pytest.approx(0.0, abs=1e-6)


def test_the_report_names_the_host() -> None:
    profile = hosted(1.0)
    plan = choose(profile, Goal(max_overhead=0.05))
    text = explain(profile, plan)
    assert "waited for the host" in text and "blocks." in text
    text = explain(profile, choose(profile, Goal(max_overhead=0.01)))
    assert "no hooks" in text

"""Releases and loads that share an event: [Note: together] in plan/schedule.py."""

import random
from dataclasses import replace

import pytest

from ssdtrain.plan.choose import options
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import Simulation
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.plan import profiles as made
from tests.ssdtrain.plan.profiles import MB

EVENT_MS = 0.01


def priced(profile: Profile, event_ms: float = EVENT_MS) -> Profile:
    """Where an event costs compute so much."""
    return replace(profile, links=replace(profile.links, event_ms=event_ms))


@pytest.mark.parametrize("seed", range(40))
def test_any_plan_is_predicted_to_hold_no_more_than_batches(seed: int) -> None:
    """Against the plan without them, for the same placements."""
    draw = random.Random(seed)
    profile = made.drawn(seed, draw.randint(100, 300))
    timeline = Timeline(profile)
    placements = {
        kind: [draw.choice(options(timeline, item)) for item in items]
        for kind, items in profile.kinds.items()
    }
    alone = Simulation(timeline, schedule(timeline, placements)).run()
    orders = schedule(Timeline(priced(profile)), placements)
    together = Simulation(timeline, orders).run()
    most_bytes = 0.01 * profile.saved_bytes
    assert together.peak_bytes <= alone.peak_bytes + 2 * most_bytes + 8 * MB
    assert together.stall_ms <= alone.stall_ms + 0.001 * alone.step_ms

"""Releases and loads that share an event: [Note: together] in plan/schedule.py."""

import random
from dataclasses import replace

import pytest

from ssdtrain.plan.choose import options
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.simulate import Run, keep_all, simulate
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.plan import profiles as made
from tests.ssdtrain.plan.profiles import MB

EVENT_MS = 0.01


def priced(profile: Profile, event_ms: float = EVENT_MS) -> Profile:
    """Where an event costs compute so much."""
    return replace(profile, links=replace(profile.links, event_ms=event_ms))


def moved(profile: Profile, style: Style | None = None) -> tuple[Order, ...]:
    """Orders under which all leave that can."""
    (kind,) = profile.kinds
    everything = {kind: [Placement.OFFLOAD] * len(profile.kinds[kind])}
    return schedule(Timeline(profile), everything, style)[kind]


def release_marks(orders: tuple[Order, ...]) -> list[int]:
    """Of those that leave, in a chain."""
    return [n + o.release_after for n, o in enumerate(orders) if o.release_after]


def test_a_batch_holds_its_share_and_no_more() -> None:
    """400 items of 1 MB: 4 MB are a hundredth."""
    profile = made.chain(400, gb_per_s=20.0)
    alone, together = moved(profile), moved(priced(profile))
    assert len(set(release_marks(alone))) == len(release_marks(alone))
    assert {order.load_batch for order in alone} == {0}
    of_release = [
        release_marks(together).count(m) for m in set(release_marks(together))
    ]
    assert max(of_release) == 4 and of_release.count(4) >= 90
    loads = [(o.load_at, o.load_batch) for o in together if o.release_after]
    of_load = [loads.count(each) for each in set(loads)]
    assert max(of_load) == 4 and of_load.count(4) >= 90


@pytest.mark.parametrize(("copy_ms", "waits"), [(1.0, [0, 0]), (2.5, [3.0, 1.0])])
def test_a_load_arrives_with_its_batch(copy_ms: float, waits: list[float]) -> None:
    """Loads at the use of item 3, 2 ms before that of item 2: both are there when the
    second one is."""
    profile = made.chain(6, gb_per_s=1.0 / copy_ms)
    keep = keep_all(Timeline(profile))["model/0"]
    found = []
    for load_batch in (7, 0):
        orders = [
            replace(
                order,
                placement=Placement.OFFLOAD,
                release_after=6 - number,  # when backward begins
                load_at=2,
                load_batch=load_batch,
            )
            if number in (1, 2)
            else order
            for number, order in enumerate(keep)
        ]
        found.append(simulate(Timeline(profile), {"model/0": tuple(orders)}).stall_ms)
    assert found == pytest.approx(waits)


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
    alone = Run(timeline, schedule(timeline, placements)).run()
    orders = schedule(Timeline(priced(profile)), placements)
    together = Run(timeline, orders).run()
    most_bytes = 0.01 * profile.saved_bytes
    assert together.peak_bytes <= alone.peak_bytes + 2 * most_bytes + 8 * MB
    assert together.stall_ms <= alone.stall_ms + 0.001 * alone.step_ms

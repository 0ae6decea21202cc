"""Releases and loads that share an event: [Note: together] in plan/schedule.py."""

import random
from dataclasses import replace

import pytest

from ssdtrain.plan.choose import QUICK_MARKS, choose, options
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, batches
from ssdtrain.plan.profile import Profile, RegionRun
from ssdtrain.plan.replays import NEVER_MS
from ssdtrain.plan.schedule import Late, Style, schedule
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


def test_events_are_paid_once_for_a_batch() -> None:
    """A record for a copy out, a wait for it, a record for a copy in, a wait for it."""
    profile = made.chain(400, gb_per_s=20.0)
    orders = {"model/0": moved(priced(profile))}
    free = simulate(Timeline(profile), orders).step_ms
    paid = simulate(Timeline(priced(profile)), orders).step_ms
    away = [order for order in orders["model/0"] if order.release_after]
    releases = len(set(release_marks(orders["model/0"])))
    loads = len({(order.load_at, order.load_batch) for order in away})
    events = len(away) + releases + 2 * loads
    assert events < 2 * len(away)
    assert paid - free == pytest.approx(events * EVENT_MS)


def test_a_batch_makes_nothing_wait() -> None:
    """Its loads start as early as its first needs; what is late goes by itself."""
    profile = priced(made.chain(400, gb_per_s=2.0))
    orders = {"model/0": moved(profile)}
    assert any(order.load_batch for order in orders["model/0"])
    assert simulate(Timeline(profile), orders).stall_ms == 0.0
    slow = priced(made.chain(100, gb_per_s=0.4, num_bytes=MB // 2))
    single = replace(slow, links=replace(slow.links, event_ms=0.0))
    for late in Late:
        style = Style(late=late, window_bytes=8 * MB)
        ours, theirs = moved(slow, style), moved(single, style)
        waits = [
            simulate(Timeline(single), {"model/0": orders}).stall_ms
            for orders in (ours, theirs)
        ]
        assert waits[0] <= waits[1] + 1e-9, late


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


def test_batches_are_told_apart() -> None:
    numbers = {9: 0, 8: 3, 7: 0, 6: 4, 5: 3, 4: 4}
    assert batches(numbers, numbers.__getitem__) == [(9,), (7,), (8, 5), (6, 4)]


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


@pytest.mark.parametrize("can_run", [True, False])
def test_small_tensors_stay_where_only_events_have_a_price(can_run: bool) -> None:
    """As in a CUDA graph: no host, and regions that cannot run again. A fifth of the
    bytes are in small tensors, and every second one is rebuilt for next to nothing."""
    chain = made.chain(120, gb_per_s=100.0)
    items = [
        replace(item, num_bytes=MB // 2)
        if number % 3
        else replace(item, num_bytes=4 * MB)
        for number, item in enumerate(chain.kinds["model/0"])
    ]
    for number in range(1, 120, 3):
        cheap = replace(items[number], recipe="gelu", recipe_ms=0.001, inputs=(0,))
        items[number] = cheap
    runs = (RegionRun(ms=1.0 if can_run else NEVER_MS, host_ms=0.0),)
    profile = replace(chain, kinds={"model/0": tuple(items)}, regions={"model/0": runs})
    goal = Goal(memory_budget_bytes=int(0.5 * profile.saved_bytes))
    plan = choose(priced(profile, 0.05), goal, QUICK_MARKS)
    (orders,) = plan.orders.values()
    moved_bytes = {o.num_bytes for o in orders if o.placement is Placement.OFFLOAD}
    rebuilt = [o for o in orders if o.placement is Placement.RECOMPUTE]
    assert moved_bytes == {4 * MB} and len(rebuilt) > 20


def test_larger_batches_are_fewer_edges() -> None:
    """As in the plan of a replay: a batch has room for a pair of large tensors."""
    chain = priced(made.chain(100, gb_per_s=20.0))
    wide = replace(chain, links=replace(chain.links, batch_share=0.04))
    few, many = moved(wide), moved(chain)
    assert len(set(release_marks(few))) < 0.3 * len(set(release_marks(many)))
    paid = [
        simulate(Timeline(chain), {"model/0": orders}).step_ms for orders in (few, many)
    ]
    assert paid[0] < paid[1] - 100 * EVENT_MS

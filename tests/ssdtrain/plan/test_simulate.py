"""The simulator against closed forms."""

import math
from dataclasses import replace

import pytest

from ssdtrain.plan.baselines import placed_by
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order
from ssdtrain.plan.profile import Item, Mark, Phase, Profile
from ssdtrain.plan.schedule import Late, Style, schedule
from ssdtrain.plan.simulate import Simulation, keep_all, simulate
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.plan import profiles as made

MB = made.MB


def orders_of(profile: Profile, each: Order) -> dict[str, tuple[Order, ...]]:
    return {
        kind: tuple(replace(each, name=i.name, num_bytes=i.num_bytes) for i in items)
        for kind, items in profile.kinds.items()
    }


def test_keep_all_is_the_step_and_all_bytes() -> None:
    profile = made.chain(6)
    found = simulate(Timeline(profile), keep_all(Timeline(profile)))
    assert found.step_ms == pytest.approx(profile.compute_ms) == pytest.approx(21.0)
    assert found.peak_bytes == 6 * MB
    assert found.stall_ms == 0 and found.overhead == 0


def test_everything_on_an_infinite_link_costs_no_time() -> None:
    profile = made.chain(6, gb_per_s=math.inf)
    timeline = Timeline(profile)
    # Released one mark after the pack, loaded at the use before its own.
    orders = {
        "model/0": tuple(
            Order(
                name=item.name,
                num_bytes=item.num_bytes,
                placement=Placement.OFFLOAD,
                release_after=1,
                load_at=max(0, 4 - n),
            )
            for n, item in enumerate(profile.kinds["model/0"])
        )
    }
    found = simulate(timeline, orders)
    assert found.step_ms == pytest.approx(profile.compute_ms)
    # One being packed; in backward the one in use and the next.
    assert found.peak_bytes == 2 * MB
    assert found.links["d2h"].num_bytes == found.links["h2d"].num_bytes == 6 * MB


def test_stall_is_the_part_of_a_copy_that_compute_does_not_hide() -> None:
    profile = made.chain(2, gb_per_s=0.1)  # 10 ms a copy
    orders = orders_of(profile, Order(name="", num_bytes=0, placement=Placement.KEEP))
    first = replace(
        orders["model/0"][0], placement=Placement.OFFLOAD, release_after=1, load_at=0
    )
    found = simulate(Timeline(profile), {"model/0": (first, orders["model/0"][1])})
    # 1 ms of the copy out is hidden, then 2 ms of the copy in.
    assert found.stall_ms == pytest.approx(9.0 + (10.0 - 2.0))
    assert found.stalls[0].item == 0


def test_a_recipe_costs_its_time_and_holds_its_input() -> None:
    items = (
        Item(name="x", num_bytes=4 * MB),
        Item(name="y", num_bytes=8 * MB, recipe="gelu", recipe_ms=0.5, inputs=(0,)),
    )
    marks = [
        Mark(lane=0, phase=Phase.FORWARD, item=0, ms=1.0),
        Mark(lane=0, phase=Phase.FORWARD, item=1, ms=1.0),
        Mark(lane=0, phase=Phase.BACKWARD, item=1, ms=2.0, other_bytes=MB),
        Mark(lane=0, phase=Phase.BACKWARD, item=0, ms=2.0, other_bytes=3 * MB),
        Mark(lane=0, phase=Phase.BACKWARD, item=0, ms=0.0),
    ]
    profile = Profile(
        lanes=("m/0",), kinds={"m/0": items}, marks=tuple(marks), links=made.links(10)
    )
    timeline = Timeline(profile)
    placements = {"m/0": (Placement.KEEP, Placement.RECOMPUTE)}
    found = simulate(timeline, schedule(timeline, placements))
    assert found.step_ms == pytest.approx(6.5)
    assert found.recompute_ms == pytest.approx(0.5)
    assert found.peak_bytes == 13 * MB  # input, result and the operator's own


@pytest.mark.parametrize("placement", [Placement.OFFLOAD, Placement.RECOMPUTE])
@pytest.mark.parametrize("frame_marks", [0, 1, 3, 9])
def test_nothing_frees_what_a_frame_holds(
    frame_marks: int, placement: Placement
) -> None:
    """Item 0 leaves at once; backward asks for it last."""
    num = 4
    profile = made.chain(num, gb_per_s=1000.0)
    first, *rest = profile.kinds["model/0"]
    first = replace(first, frame_marks=frame_marks, recipe="gelu")
    profile = replace(profile, kinds={"model/0": (first, *rest)})
    keep = keep_all(Timeline(profile))["model/0"]
    leaves = replace(keep[0], placement=placement, release_after=1, load_at=num)
    run = Simulation(Timeline(profile), {"model/0": (leaves, *keep[1:])})
    curve = [num_bytes // MB for _, num_bytes in run.run(detailed=True).curve]
    others = [0, 1, 2, 3, 3, 2, 1, 1]  # at the last one it is back
    at_least = 1 if placement is Placement.OFFLOAD else 0  # its own mark
    held = [mark < max(frame_marks, at_least) for mark in range(2 * num)]
    assert curve == [a + b for a, b in zip(others, held, strict=True)]


def test_ssd_waits_for_staging_and_reads_back() -> None:
    profile = replace(
        made.chain(8),
        links=made.links(10.0, ssd_write=made.curve(0.25), ssd_read=made.curve(10.0)),
        host_bytes=2 * MB,
    )
    each = Order(name="", num_bytes=0, placement=Placement.OFFLOAD_SSD, release_after=1)
    outcome = Simulation(Timeline(profile), orders_of(profile, each)).run()
    # Writes of 4 ms each, two buffers: six of the eight packs wait for one.
    assert outcome.moved_bytes["ssd_write"] == 8 * MB
    assert outcome.host_peak_bytes <= 2 * MB
    assert outcome.stall_ms > 6 * 2.0


def test_ssd_without_a_curve_is_an_error() -> None:
    profile = made.chain(2)
    each = Order(name="", num_bytes=0, placement=Placement.OFFLOAD_SSD)
    with pytest.raises(ValueError, match="ssdtrain doctor"):
        Simulation(Timeline(profile), orders_of(profile, each)).run()


@pytest.mark.parametrize("seed", range(30))
def test_a_scheduled_plan_never_holds_more_than_keep(seed: int) -> None:
    profile = made.drawn(seed, 12, num_lanes=1 + seed % 3)
    timeline = Timeline(profile)
    keep = Simulation(timeline, keep_all(timeline)).run()
    for style in (Style(), Style(late=Late.WAIT), Style(window_bytes=8 * MB)):
        everything = placed_by(timeline, lambda *_: Placement.OFFLOAD)
        outcome = Simulation(timeline, schedule(timeline, everything, style)).run()
        assert outcome.peak_bytes <= keep.peak_bytes
        assert outcome.step_ms >= keep.step_ms - 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_a_faster_link_is_never_slower(seed: int) -> None:
    profile = made.drawn(seed, 12)
    timeline = Timeline(profile)
    everything = placed_by(timeline, lambda *_: Placement.OFFLOAD)
    orders = schedule(timeline, everything, Style(window_bytes=8 * MB, late=Late.WAIT))
    times = [
        Simulation(Timeline(made.with_links(profile, rate)), orders).run().step_ms
        for rate in (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
    ]
    assert times == sorted(times, reverse=True)

"""The simulator against closed forms."""

import math
from dataclasses import replace

import pytest

from ssdtrain.plan.baselines import fixed_policies, placed_by
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order
from ssdtrain.plan.profile import Item, Mark, Phase, Profile
from ssdtrain.plan.schedule import Late, Style, schedule
from ssdtrain.plan.simulate import Run, keep_all, simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.tools.report.references import references
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


def test_gradients_are_no_part_of_the_passing_peak() -> None:
    """What stays from some mark on is left out, a temporary is not."""
    profile, grown = made.chain(6), [0] * 6 + [1, 2, 3, 4, 5, 6]
    marks = [
        replace(mark, other_bytes=10 * MB * stays)
        for mark, stays in zip(profile.marks, grown, strict=True)
    ]
    marks[6] = replace(marks[6], other_bytes=marks[6].other_bytes + 30 * MB)
    profile = replace(profile, marks=tuple(marks))
    found = simulate(Timeline(profile), keep_all(Timeline(profile)))
    assert found.peak_bytes == (60 + 1) * MB
    assert found.passing_peak_bytes == (6 + 10 + 30 - 20) * MB


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


@pytest.mark.parametrize("gb_per_s", [0.05, 0.2, 0.5, 2.0])
def test_a_link_bound_step_is_the_maximum(gb_per_s: float) -> None:
    """All packs release the item before: forward is the longer of compute and link."""
    num, forward_ms = 40, 1.0
    profile = made.chain(num, gb_per_s=gb_per_s, forward_ms=forward_ms)
    each = Order(
        name="", num_bytes=0, placement=Placement.OFFLOAD, release_after=1, load_at=0
    )
    orders = {
        kind: tuple(replace(o, load_at=max(0, num - 2 - n)) for n, o in enumerate(own))
        for kind, own in orders_of(profile, each).items()
    }
    outcome = Run(Timeline(profile), orders).run()
    copy_ms = MB / (gb_per_s * 1e9) * 1e3
    expected = num * max(forward_ms, copy_ms) + num * max(2 * forward_ms, copy_ms) + 3
    assert outcome.step_ms == pytest.approx(expected, rel=3 / num)


def test_stall_is_the_part_of_a_copy_that_compute_does_not_hide() -> None:
    profile = made.chain(2, gb_per_s=0.1)  # 10 ms a copy
    orders = orders_of(profile, Order(name="", num_bytes=0, placement=Placement.KEEP))
    first = replace(
        orders["model/0"][0],
        placement=Placement.OFFLOAD,
        release_after=1,
        load_at=0,
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


@pytest.mark.parametrize("rebuilds", [True, False])
def test_what_a_recipe_stores_in_a_smaller_dtype_is_made_in_forward(
    rebuilds: bool,
) -> None:
    items = (
        Item(name="wide", num_bytes=2 * MB, recipe="cast", recipe_ms=0.5, inputs=(1,)),
        Item(name="narrow", num_bytes=MB, owner=0, made_ms=0.25),
    )
    forward = [Mark(lane=0, phase=Phase.FORWARD, item=n, ms=1.0) for n in (0, 1)]
    backward = Mark(lane=0, phase=Phase.BACKWARD, item=0, ms=2.0)
    profile = Profile(
        lanes=("m/0",),
        kinds={"m/0": items},
        marks=(*forward, backward),
        links=made.links(10),
    )
    wide = Placement.RECOMPUTE if rebuilds else Placement.KEEP
    timeline = Timeline(profile)
    orders = schedule(timeline, {"m/0": (wide, Placement.KEEP)})
    found = simulate(timeline, orders)
    assert found.recompute_ms == pytest.approx(0.75 * rebuilds)
    assert found.step_ms == pytest.approx(4.0 + 0.75 * rebuilds)
    leaves = replace(orders["m/0"][1], placement=Placement.OFFLOAD, release_after=1)
    own = Run(timeline, {"m/0": (orders["m/0"][0], leaves)}).run()
    # Its copy in starts at its use, and is waited for.
    assert own.step_ms == pytest.approx((4.0 + 0.75 + 0.1) if rebuilds else 4.0)


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
    run = Run(Timeline(profile), {"model/0": (leaves, *keep[1:])})
    curve = [num_bytes // MB for _, num_bytes in run.run(detailed=True).curve]
    others = [0, 1, 2, 3, 3, 2, 1, 1]  # at the last one it is back
    at_least = 1 if placement is Placement.OFFLOAD else 0  # its own mark
    held = [mark < max(frame_marks, at_least) for mark in range(2 * num)]
    assert curve == [a + b for a, b in zip(others, held, strict=True)]


def test_what_nobody_asks_for_goes_with_its_micro_batch() -> None:
    items = (Item(name="x", num_bytes=4 * MB), Item(name="unused", num_bytes=MB))
    marks = []
    for lane in range(3):
        for phase, item in (("forward", 1), ("forward", 0), ("backward", 0)):
            marks.append(Mark(lane=lane, phase=Phase(phase), item=item, ms=1.0))
    profile = Profile(
        lanes=("m/0",) * 3,
        kinds={"m/0": items},
        marks=tuple(marks),
        links=made.links(10),
    )
    timeline = Timeline(profile)
    assert Run(timeline, keep_all(timeline)).run().peak_bytes == 5 * MB


def test_copies_slow_compute_by_the_measured_fraction() -> None:
    profile = made.chain(8, gb_per_s=0.25)  # 4 ms a copy, 1 ms an operator
    slow = replace(profile, links=replace(profile.links, copy_slowdown=0.1))
    orders = orders_of(
        profile,
        Order(name="", num_bytes=0, placement=Placement.OFFLOAD, release_after=0),
    )
    plain = Run(Timeline(profile), orders).run().step_ms
    slowed = Run(Timeline(slow), orders).run().step_ms
    # The link is busy from the first pack until 32 ms, longer than the 24 ms of work.
    assert slowed == pytest.approx(plain + 0.1 * 24.0)


def test_ssd_waits_for_staging_and_reads_back() -> None:
    profile = replace(
        made.chain(8),
        links=made.links(10.0, ssd_write=made.curve(0.25), ssd_read=made.curve(10.0)),
        host_bytes=2 * MB,
    )
    each = Order(name="", num_bytes=0, placement=Placement.OFFLOAD_SSD, release_after=1)
    outcome = Run(Timeline(profile), orders_of(profile, each)).run()
    # Writes of 4 ms each, two buffers: six of the eight packs wait for one.
    assert outcome.moved_bytes["ssd_write"] == 8 * MB
    assert outcome.host_peak_bytes <= 2 * MB
    assert outcome.stall_ms > 6 * 2.0


@pytest.mark.parametrize("share", [0.25, 0.9, 4.0])
def test_no_step_is_shorter_than_its_writes(share: float) -> None:
    """See [Note: steady state]: pinned memory is no limit here, within one step."""
    num = 40
    compute_ms = made.chain(num).compute_ms
    speed = num * MB / (share * compute_ms / 1e3) / 1e9
    drive = {"ssd_write": made.curve(speed), "ssd_read": made.curve(10.0)}
    profile = replace(
        made.chain(num), links=made.links(10.0, **drive), host_bytes=100 * num * MB
    )
    each = Order(name="", num_bytes=0, placement=Placement.OFFLOAD_SSD)
    orders = orders_of(profile, each)
    found = simulate(Timeline(profile), orders)
    keep_ms = simulate(Timeline(profile), keep_all(Timeline(profile))).step_ms
    assert found.links["ssd_write"].busy_ms == pytest.approx(
        share * compute_ms, rel=0.1
    )
    assert found.step_ms >= found.links["ssd_write"].busy_ms - 1e-6
    assert (found.stall_ms > 0) == (share > 1)
    if share > 1:
        assert found.step_ms == pytest.approx(share * keep_ms, rel=0.1)
        assert sum(stall.ms for stall in found.stalls) == pytest.approx(found.stall_ms)


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_writes_and_reads_share_a_disk_as_far_as_measured(shared: float) -> None:
    num = 40
    compute_ms = made.chain(num).compute_ms
    speed = num * MB / (1.5 * compute_ms / 1e3) / 1e9
    drive = {"ssd_write": made.curve(speed), "ssd_read": made.curve(speed)}
    links = made.links(10.0, **drive, ssd_duplex_slowdown=shared)
    profile = replace(made.chain(num), links=links, host_bytes=100 * num * MB)
    each = Order(name="", num_bytes=0, placement=Placement.OFFLOAD_SSD, release_after=1)
    outcome = Run(Timeline(profile), orders_of(profile, each)).run()
    one_way_ms = num * MB / (speed * 1e9) * 1e3
    read_ms = outcome.moved_bytes["ssd_read"] / (speed * 1e9) * 1e3
    assert 0.0 < read_ms < one_way_ms  # what is not written yet is not read
    least_ms = one_way_ms + shared * read_ms
    assert outcome.step_ms >= least_ms - 1e-6
    assert outcome.step_ms == pytest.approx(least_ms, rel=0.15)


@pytest.mark.parametrize("speed", [0.5, 4.0])
def test_a_direct_path_stages_nothing(speed: float) -> None:
    """What is released waits for its write, and what is loaded for write and read."""
    drive = {"ssd_write": made.curve(speed), "ssd_read": made.curve(speed)}
    links = made.links(1000.0, **drive, ssd_direct=True)
    profile = replace(made.chain(8), links=links, host_bytes=0)
    each = Order(name="", num_bytes=0, placement=Placement.OFFLOAD_SSD, release_after=1)
    outcome = Run(Timeline(profile), orders_of(profile, each)).run()
    moved = outcome.moved_bytes
    assert moved["ssd_write"] == moved["ssd_read"] == 8 * MB
    assert moved["d2h"] == moved["h2d"] == outcome.host_peak_bytes == 0
    each_ms = MB / (speed * 1e9) * 1e3
    # An operator of forward takes 1 ms, one of backward 2, a transfer 2 or 0.25; all
    # loads are asked for at the first use.
    waits_ms = 8 * max(0.0, each_ms - 1.0)
    assert outcome.stall_ms == pytest.approx(waits_ms + each_ms, rel=0.05)


def test_ssd_without_a_curve_is_an_error() -> None:
    profile = made.chain(2)
    each = Order(name="", num_bytes=0, placement=Placement.OFFLOAD_SSD)
    with pytest.raises(ValueError, match="ssdtrain doctor"):
        Run(Timeline(profile), orders_of(profile, each)).run()


@pytest.mark.parametrize("seed", range(30))
def test_a_scheduled_plan_never_holds_more_than_keep(seed: int) -> None:
    profile = made.drawn(seed, 12, num_lanes=1 + seed % 3)
    timeline = Timeline(profile)
    keep = Run(timeline, keep_all(timeline)).run()
    for style in (Style(), Style(late=Late.WAIT), Style(window_bytes=8 * MB)):
        everything = placed_by(timeline, lambda *_: Placement.OFFLOAD)
        outcome = Run(timeline, schedule(timeline, everything, style)).run()
        assert outcome.peak_bytes <= keep.peak_bytes
        assert outcome.step_ms >= keep.step_ms - 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_a_faster_link_is_never_slower(seed: int) -> None:
    profile = made.drawn(seed, 12)
    timeline = Timeline(profile)
    everything = placed_by(timeline, lambda *_: Placement.OFFLOAD)
    orders = schedule(timeline, everything, Style(window_bytes=8 * MB, late=Late.WAIT))
    times = [
        Run(Timeline(made.with_links(profile, rate)), orders).run().step_ms
        for rate in (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
    ]
    assert times == sorted(times, reverse=True)


def test_the_seed_rule_offloads_what_the_link_can_take() -> None:
    counts = []
    for rate in (100.0, 0.25, 0.1):
        policies = fixed_policies(Timeline(made.chain(8, gb_per_s=rate)))
        rule = next(fixed for fixed in policies if fixed.name == "last-module")
        placed = rule.placements["model/0"]
        counts.append(sum(p is Placement.OFFLOAD for p in placed))
    # Modules of 2 MB and 2 ms; 20 ms until the first one's backward, 16 until the
    # second's. 0.25 GB/s: 5 MB >= 0 + 2 x 2, but 4 MB < 2 + 2 x 2. 0.1 GB/s: 2 MB < 4.
    assert counts == [8, 2, 0]


def test_full_recompute_is_priced_from_the_blocks() -> None:
    plain, moved = references(Timeline(made.chain(8)))[:2]
    # Four blocks of two items: forward again, four inputs and one block.
    assert plain.step_ms == pytest.approx(27.0 + 8.0)
    assert plain.peak_bytes == 4 * MB + 2 * MB
    assert moved.peak_bytes == 2 * MB + 2 * MB

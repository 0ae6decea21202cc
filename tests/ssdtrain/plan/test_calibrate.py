"""Times of an observed step in those of the plain one."""

from dataclasses import replace

import pytest

from ssdtrain.curves import Curve, Links
from ssdtrain.plan.calibrate import (
    BLAMED,
    WITHOUT_RERUNS,
    Corrections,
    PlainTimes,
    RegionTimes,
    calibrated,
    corrected,
    with_rerun_hosts,
    with_reruns,
)
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.profile import (
    HostCost,
    HostCosts,
    Item,
    Mark,
    Phase,
    Profile,
    RegionRun,
)
from ssdtrain.plan.simulate import Run, keep_all, simulate
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.plan import profiles as made


def profile() -> Profile:
    """Two tensors: forward takes 1 + 2 * 4 ms, backward and the tail 2 * 5 + 1."""
    rate = Curve.straight(1e-5, 1e9)
    return Profile(
        lanes=("model/0",),
        kinds={"model/0": (Item(name="a", num_bytes=8), Item(name="b", num_bytes=8))},
        marks=(
            Mark(lane=0, phase=Phase.FORWARD, item=0, ms=4.0, other_bytes=3),
            Mark(lane=0, phase=Phase.FORWARD, item=1, ms=4.0),
            Mark(lane=0, phase=Phase.BACKWARD, item=1, ms=5.0),
            Mark(lane=0, phase=Phase.BACKWARD, item=0, ms=5.0),
        ),
        links=Links(d2h=rate, h2d=rate),
        head_ms=1.0,
        tail_ms=1.0,
    )


def items_of(found: Profile) -> tuple[Item, ...]:
    return found.kinds["model/0"]


def test_keeping_everything_takes_the_plain_step() -> None:
    found = calibrated(profile(), PlainTimes(step_ms=10.0, forward_ms=3.0))
    assert found.forward_ms == pytest.approx(3.0)
    assert found.compute_ms == pytest.approx(10.0)
    timeline = Timeline(found)
    assert Run(timeline, keep_all(timeline)).run().step_ms == pytest.approx(10.0)
    assert [mark.ms for mark in found.marks] == pytest.approx(
        [4 / 3, 4 / 3, 35 / 11, 35 / 11]
    )
    assert found.marks[0].other_bytes == 3
    assert found.notes["plain_step_ms"] == "10.000"


@pytest.mark.parametrize(
    ("hooked_ms", "believed_ms"),
    [(3.0, 3.0), (8.0, 8.0), (13.0, 9.0 * 12.0 / 11.0)],
)
def test_hooks_make_no_forward_longer(hooked_ms: float, believed_ms: float) -> None:
    """The rest took 12 ms where 11 were observed: so does the forward, of 9 ms, at
    most, whatever the step of regions took for it under its hooks."""
    plain = PlainTimes(step_ms=12.0 + hooked_ms, forward_ms=hooked_ms)
    found = calibrated(profile(), plain, note=WITHOUT_RERUNS)
    assert found.forward_ms == pytest.approx(believed_ms)
    assert found.compute_ms == pytest.approx(12.0 + believed_ms)


def test_reruns_take_the_host_no_longer_than_unwatched_ones() -> None:
    runs = [RegionRun(module="m", ms=1.0, host_ms=ms) for ms in (4.0, 4.0, 1.0)]
    before = replace(profile(), regions={"model/0": tuple(runs)})
    found = with_rerun_hosts(before, {"model/0": (2.0, 0.0, 3.0)})
    assert [run.host_ms for run in found.regions["model/0"]] == [2.0, 4.0, 1.0]
    assert with_rerun_hosts(before, {"model/0": (2.0,)}) == before


@pytest.mark.parametrize(
    "times",
    [
        PlainTimes(step_ms=200.0, forward_ms=3.0),
        PlainTimes(step_ms=10.0, forward_ms=0.0),
    ],
)
def test_another_step_changes_nothing(times: PlainTimes) -> None:
    assert calibrated(profile(), times) == profile()


@pytest.mark.parametrize(
    "times",
    [
        PlainTimes(step_ms=10.0, forward_ms=0.05),
        PlainTimes(step_ms=2.0, forward_ms=3.0),
    ],
)
def test_halves_that_tell_nothing_leave_the_length_of_the_step(
    times: PlainTimes,
) -> None:
    """A forward that took nearly nothing, or longer than its step: one factor."""
    found, factor = calibrated(profile(), times), times.step_ms / profile().compute_ms
    assert found.compute_ms == pytest.approx(times.step_ms)
    before = [mark.ms * factor for mark in profile().marks]
    assert [mark.ms for mark in found.marks] == pytest.approx(before)


def test_what_remains_of_a_step_without_its_reruns() -> None:
    """Forward 12 with 2 of waits, backward 30 with 10 of re-runs and 3 of waits. The
    host's 9 are the program's own."""
    step = PlainTimes(step_ms=42.0, forward_ms=12.0, host_forward_ms=9.0)
    times = RegionTimes(step, rerun_ms=10.0, stall_ms=5.0, stall_out_ms=2.0)
    plain = PlainTimes(step_ms=27.0, forward_ms=10.0, host_forward_ms=9.0)
    assert times.plain() == plain


NUM_LAYERS, SLOW = 8, 4.0
BYTES = 1 << 20


def layers(factor: float) -> Profile:
    """Layers that save an input and four tensors, each 1 ms forward and 2 ms backward,
    `factor` times that in the observed step. A re-run takes 3.5 ms of 4."""
    items, forward, backward = [], [], []
    for layer in range(NUM_LAYERS):
        items.append(Item(name=f"in{layer}", num_bytes=BYTES, serves=layer))
        items.extend(
            Item(name=f"{layer}.{place}", num_bytes=BYTES, region=layer)
            for place in range(4)
        )
    for number, item in enumerate(items):
        ms = 0.0 if item.serves >= 0 else factor
        forward.append(Mark(lane=0, phase=Phase.FORWARD, item=number, ms=ms))
        if item.serves < 0:
            mark = Mark(lane=0, phase=Phase.BACKWARD, item=number, ms=2 * factor)
            backward.append(mark)
    runs = tuple(
        RegionRun(inputs=(5 * layer,), ms=3.5, other_bytes=4 * BYTES)
        for layer in range(NUM_LAYERS)
    )
    rate = Curve.straight(0.0, BYTES / 3e-3)  # 3 ms a tensor
    return Profile(
        lanes=("model/0",),
        kinds={"model/0": tuple(items)},
        regions={"model/0": runs},
        marks=(*forward, *reversed(backward)),
        links=Links(d2h=rate, h2d=rate),
    )


def test_plans_under_a_budget_are_chosen_by_the_times_without_reruns() -> None:
    """The observed step is four times as slow, so copies seem to be free."""
    true, observed = layers(1.0), layers(SLOW)
    keep_ms = NUM_LAYERS * (4 * 1.0 + 4 * 2.0)
    rerun_ms = NUM_LAYERS * 3.5
    step = PlainTimes(step_ms=keep_ms + rerun_ms, forward_ms=NUM_LAYERS * 4.0)
    slower = {"model/0": (3.5,) * NUM_LAYERS}
    found = calibrated(observed, RegionTimes(step, rerun_ms).plain())
    found = with_reruns(found, slower)
    timeline = Timeline(found)
    assert Run(timeline, keep_all(timeline)).run().step_ms == pytest.approx(
        keep_ms, rel=0.01
    )
    # What checkpointing needs: all inputs, and one layer's tensors.
    goal = Goal(memory_budget_bytes=int((NUM_LAYERS + 5) * BYTES / 0.98))
    really, choices = Timeline(true), {}
    for name, profile in (("wrong", observed), ("right", found)):
        plan = choose(profile, goal)
        predicted = simulate(really, plan.orders)
        assert predicted.peak_bytes <= goal.memory_budget_bytes
        choices[name] = plan, predicted.step_ms
    plan, right_ms = choices["right"]
    assert plan.prediction is not None
    assert plan.prediction.step_ms == pytest.approx(right_ms, rel=0.01)
    assert right_ms < 0.95 * choices["wrong"][1]
    assert right_ms <= keep_ms + rerun_ms
    away = plan.bytes_by_placement()
    assert away[Placement.RERUN.name.lower()] > 0


def test_another_number_of_reruns_is_not_believed() -> None:
    """The step that was measured with them had another forward."""
    profile = layers(1.0)
    for times in ((9.0,) * (NUM_LAYERS - 1), (9.0,) * (NUM_LAYERS + 1), ()):
        assert with_reruns(profile, {"model/0": times}) == profile


def test_behind_backward_the_host_takes_what_it_does_in_other_steps() -> None:
    before = replace(profile(), tail_host_ms=50.0)
    for told_ms, found_ms in ((None, 50.0), (20.0, 20.0), (80.0, 50.0)):
        found = corrected(before, Corrections(tail_host_ms=told_ms))
        assert found.tail_host_ms == found_ms


@pytest.mark.parametrize(
    ("behind_ms", "factor", "tail_ms"),
    [
        (8.0, 1.6, 0.0),  # 8 of 16 before it, and 5 behind it as much longer
        (10.0, 1.2, 4.0),
        (None, 1.0, 6.0),
        (3.0, 1.0, 6.0),  # less than the rest of backward takes: another step
        (17.0, 1.0, 6.0),
    ],
)
def test_what_is_behind_backward_is_told_by_the_last_rerun(
    behind_ms: float | None, factor: float, tail_ms: float
) -> None:
    """Of 16 ms behind the forward, where backward had 5 and 5 and the rest 6. The
    second tensor of backward is of the region that runs again last."""
    before = replace(profile(), tail_ms=6.0, regions={"model/0": (RegionRun(),) * 2})
    items = [replace(item, region=at) for at, item in enumerate(items_of(before))]
    before = replace(before, kinds={"model/0": tuple(items)})
    plain = PlainTimes(step_ms=19.0, forward_ms=3.0)
    told = Corrections(plain=tuple(plain), note=WITHOUT_RERUNS, behind_ms=behind_ms)
    found = corrected(before, told)
    backward = [mark.ms for mark in found.marks if mark.phase is Phase.BACKWARD]
    assert backward == pytest.approx([5.0 * factor] * 2)
    assert found.tail_ms == pytest.approx(tail_ms)
    assert found.compute_ms == pytest.approx(19.0)


def test_hooks_that_were_found_dearer_cost_more() -> None:
    """Whatever they do, and however they were priced."""
    item = Item(name="a", num_bytes=8, recipe="silu", recipe_host_ms=0.5)
    cost = HostCost(pack_ms=1.0, use_ms=2.0, load_ms=3.0)
    before = replace(
        profile(),
        kinds={"model/0": (item, item)},
        host_costs=HostCosts(keep=cost, host=cost, ssd=cost, rebuild=cost, region_ms=4),
    )
    found = corrected(before, Corrections(host_factor=1.5))
    assert {each.recipe_host_ms for each in found.kinds["model/0"]} == {0.75}
    more = HostCost(pack_ms=1.5, use_ms=3.0, load_ms=4.5)
    assert found.host_costs == HostCosts(
        keep=more, host=more, ssd=more, rebuild=more, region_ms=6.0
    )
    by = Corrections(host_costs=HostCosts(keep=cost), host_factor=0.5)
    assert corrected(before, by).host_costs.keep.use_ms == 1.0


def test_copies_that_are_blamed_move_less() -> None:
    """They hide, and cost what steps under a plan lost beside them."""
    seen = made.chain(8, gb_per_s=1.0)
    goal = Goal(max_overhead=0.02)
    before = choose(seen, goal).prediction
    slower = corrected(seen, Corrections(copy_slowdown=0.2))
    behind = choose(slower, goal).prediction
    assert before is not None and behind is not None
    assert slower.links.copy_slowdown == pytest.approx(seen.links.copy_slowdown + 0.2)
    assert slower.notes["copy_slowdown"] == BLAMED
    moved = before.links["d2h"].num_bytes
    assert 0 <= behind.links["d2h"].num_bytes < moved
    assert behind.overhead <= 0.02
    assert corrected(seen, Corrections(copy_slowdown=3.0)).links.copy_slowdown == 1.0

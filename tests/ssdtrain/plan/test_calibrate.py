"""Times of an observed step in those of the plain one."""

from dataclasses import replace

import pytest

from ssdtrain.curves import Curve, Links
from ssdtrain.plan.calibrate import (
    Corrections,
    PlainTimes,
    RegionTimes,
    calibrated,
    corrected,
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
    "times",
    [
        PlainTimes(step_ms=200.0, forward_ms=3.0),
        PlainTimes(step_ms=10.0, forward_ms=0.0),
    ],
)
def test_another_step_changes_nothing(times: PlainTimes) -> None:
    assert calibrated(profile(), times) == profile()


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

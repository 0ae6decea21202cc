"""Plans that need no search, and how a profile grows."""

from dataclasses import replace
from pathlib import Path

import pytest

from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.profile import PROFILE_FILE, Mark, Phase, Profile
from ssdtrain.plan.regions import spread, with_regions
from ssdtrain.plan.scaled import (
    Growth,
    StepTime,
    scaled,
)
from ssdtrain.plan.schedule import Late, Style, schedule
from ssdtrain.plan.simulate import Run, simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.plan.unsearched import (
    MOST_RATIO,
    all_again,
    all_again_moving,
    fewest_again,
    keeping_all,
    runs_always,
    unsearched,
)
from tests.ssdtrain.plan.profiles import MB, chain
from tests.ssdtrain.plan.test_regions import KIND, NUM_REGIONS, layers

RECORDED = Path(__file__).parent / "recorded" / "h200_qwen3_4b_12_layers.json"


@pytest.fixture(scope="module")
def recorded() -> Profile:
    """Of 12 layers of a 4B model, as observed on an H200."""
    return PROFILE_FILE.read(RECORDED)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 2.0])
def test_each_serves_batches_up_to_its_size(recorded: Profile, share: float) -> None:
    """There its peak is within the limit; and the more regions run again, the larger a
    batch may be."""
    timeline = Timeline(recorded)
    keep_bytes = simulate(timeline, unsearched_orders(recorded)).keep_peak_bytes
    goal = Goal(memory_budget_bytes=int(share * keep_bytes))
    most_bytes = goal.most_bytes(recorded)
    assert most_bytes is not None
    found = unsearched(recorded, goal, Growth())
    assert found
    ratios = [each.ratio for each in found]
    assert ratios == sorted(ratios) and len(set(ratios)) == len(ratios)
    again = [len(each.plan.regions_of("model/0")) for each in found]
    assert again == sorted(again)
    for each in found:
        placements = {order.placement for order in each.plan.orders["model/0"]}
        assert placements <= {Placement.KEEP, Placement.RERUN}
        larger = Timeline(scaled(recorded, each.ratio))
        peak_bytes = Run(larger, at_size(each.plan.orders, larger)).run().peak_bytes
        assert peak_bytes <= most_bytes
        if each.ratio < MOST_RATIO:
            # And not by far: what is between two sizes is on a line, nearly.
            beyond = Timeline(scaled(recorded, 1.2 * each.ratio))
            assert Run(beyond, at_size(each.plan.orders, beyond)).run().peak_bytes > (
                most_bytes
            )


def unsearched_orders(profile: Profile) -> dict[str, tuple[object, ...]]:
    """Of what keeps everything."""
    whole = Goal(memory_budget_bytes=1 << 50)
    return dict(unsearched(profile, whole, Growth())[0].plan.orders)


def at_size(orders: object, timeline: Timeline) -> dict[str, tuple[object, ...]]:
    """The orders with the sizes of another profile."""
    return {
        kind: tuple(
            replace(order, num_bytes=item.num_bytes)
            for order, item in zip(own, timeline.profile.kinds[kind], strict=True)
        )
        for kind, own in orders.items()  # type: ignore[attr-defined]
    }


def always(profile: Profile) -> Profile:
    """With regions that run again in any plan."""
    return replace(profile, notes={**profile.notes, "recompute": "regions"})


def test_regions_that_always_run_again_do_so_where_everything_stays() -> None:
    profile = always(layers())
    plan = keeping_all(profile)
    assert runs_always(profile) and not plan.keeps_all and plan.moves_nothing
    assert len(plan.regions_of(KIND)) == NUM_REGIONS
    assert plan.prediction is not None
    rerun_ms = sum(run.ms for run in profile.regions[KIND])
    assert plan.prediction.step_ms == profile.compute_ms + rerun_ms


def test_regions_that_always_run_again_do_so_in_any_plan() -> None:
    """Though a limit has room for some of them, or a batch is short."""
    profile = layers()
    kept = keeping_all(profile).prediction
    assert kept is not None
    goal = Goal(memory_budget_bytes=kept.peak_bytes - MB)
    fewest = fewest_again(profile, profile, goal)
    assert fewest is not None and 0 < len(fewest.regions_of(KIND)) < NUM_REGIONS
    assert len(unsearched(profile, goal, Growth())) > 1
    profile = always(profile)
    assert fewest_again(profile, profile, goal) is None
    (only,) = unsearched(profile, goal, Growth())
    assert len(only.plan.regions_of(KIND)) == NUM_REGIONS


def test_all_again_takes_what_checkpointing_takes() -> None:
    """Each re-run once; what is not made again stays."""
    profile = layers()
    plan = all_again(profile, profile, Goal(memory_budget_bytes=20 * MB))
    assert plan is not None and plan.policy == "regions" and plan.moves_nothing
    assert len(plan.regions_of(KIND)) == NUM_REGIONS
    assert plan.prediction is not None
    assert plan.prediction.recompute_ms == sum(r.ms for r in profile.regions[KIND])
    assert plan.prediction.peak_bytes < plan.prediction.keep_peak_bytes


def test_all_again_must_fit_for_the_largest_batch() -> None:
    """And is predicted for the observed one."""
    profile = layers()
    larger = scaled(profile, 2.0)
    small = all_again(profile, profile, Goal(memory_budget_bytes=20 * MB))
    assert small is not None and small.prediction is not None
    needs = simulate(Timeline(larger), small.orders).peak_bytes
    assert needs > small.prediction.peak_bytes
    enough = Goal(memory_budget_bytes=int(1.05 * needs))
    assert all_again(profile, larger, enough) == small
    least = Goal(memory_budget_bytes=int(0.95 * needs))
    assert all_again(profile, profile, least) == small
    assert all_again(profile, larger, least) is None


@pytest.mark.parametrize("share", [0.97, 0.8, 0.6])
def test_what_regions_read_leaves_as_far_as_it_must(share: float) -> None:
    """The first of it; one less would be too much."""
    profile = layers(gb_per_s=10.0)
    whole = all_again(profile, profile, Goal(memory_budget_bytes=20 * MB))
    assert whole is not None and whole.prediction is not None
    goal = Goal(memory_budget_bytes=int(share * whole.prediction.peak_bytes))
    assert all_again(profile, profile, goal) is None
    plan = all_again_moving(profile, profile, goal)
    assert plan is not None and plan.prediction is not None
    assert plan.policy == "regions" and not plan.moves_nothing
    assert plan.prediction.peak_bytes <= goal.memory_budget_bytes  # type: ignore[operator]
    assert plan.prediction.step_ms <= 1.01 * whole.prediction.step_ms
    moved = [
        number
        for number, order in enumerate(plan.orders[KIND])
        if order.placement is Placement.OFFLOAD
    ]
    assert moved == list(range(0, 3 * len(moved), 3))
    timeline = Timeline(profile)
    placed = {KIND: [Placement.KEEP] * len(profile.kinds[KIND])}
    for number in moved[:-1]:
        placed[KIND][number] = Placement.OFFLOAD
    placements = with_regions(timeline, placed, spread(timeline))
    fewer = simulate(timeline, schedule(timeline, placements, Style(late=Late.WAIT)))
    assert fewer.peak_bytes > goal.memory_budget_bytes * (1 - goal.budget_margin)  # type: ignore[operator]


def test_what_leaves_has_room_in_host_memory() -> None:
    """As in a plan that was searched for: else copies would not be made, and the step
    would go beyond the limit."""
    profile = layers(gb_per_s=10.0)
    whole = all_again(profile, profile, Goal(memory_budget_bytes=20 * MB))
    assert whole is not None and whole.prediction is not None
    goal = Goal(memory_budget_bytes=int(0.6 * whole.prediction.peak_bytes))
    plan = all_again_moving(profile, profile, goal)
    assert plan is not None and plan.prediction is not None
    needed = plan.prediction.host_peak_bytes
    enough = replace(profile, host_bytes=needed)
    assert all_again_moving(enough, enough, goal) == plan
    short = replace(profile, host_bytes=needed - 1)
    assert all_again_moving(short, short, goal) is None


def test_nothing_leaves_where_that_is_not_enough() -> None:
    profile = layers(gb_per_s=10.0)
    goal = Goal(memory_budget_bytes=MB)
    assert all_again_moving(profile, profile, goal) is None
    assert all_again_moving(chain(4), chain(4), goal) is None
    assert all_again_moving(profile, profile, Goal()) is None


def test_without_regions_or_a_limit_nothing_runs_all_again() -> None:
    profile, limit = chain(4), Goal(memory_budget_bytes=20 * MB)
    assert all_again(profile, profile, limit) is None
    assert all_again(layers(), layers(), Goal()) is None


def test_nothing_where_nothing_fits(recorded: Profile) -> None:
    assert not unsearched(recorded, Goal(memory_budget_bytes=MB), Growth())
    assert not unsearched(recorded, Goal(), Growth())  # no limit: no need


def test_what_does_not_grow_stays_as_it_is() -> None:
    """A gradient of the head's weights that a fused loss saves for backward."""
    profile = chain(4)
    fixed = profile.kinds["model/0"][2].name
    larger = scaled(profile, 3.0, Growth(fixed=(fixed,)))
    assert [item.num_bytes for item in larger.kinds["model/0"]] == [
        3 * MB,
        3 * MB,
        MB,
        3 * MB,
    ]
    # Nor does a part of the time, nor what is behind backward.
    assert larger.compute_ms - larger.tail_ms == pytest.approx(
        Growth().times_longer(3.0) * (profile.compute_ms - profile.tail_ms)
    )


def line(*sizes: int) -> list[StepTime]:
    """Steps of which 40 ms do not grow, and 0.02 ms a byte does."""
    return [StepTime(size, 40.0 + 0.02 * size) for size in sizes]


def test_a_smaller_batch_has_no_smaller_gradients() -> None:
    """What is beside the saved tensors is taken to be as much; or a plan for it would
    go beyond the limit."""
    mark = Mark(lane=0, phase=Phase.BACKWARD, item=0, ms=1.0, other_bytes=5 * MB)
    profile = chain(2)
    profile = replace(profile, marks=(*profile.marks, mark))
    assert scaled(profile, 0.25).marks[-1].other_bytes == 5 * MB
    assert scaled(profile, 2.0).marks[-1].other_bytes == 10 * MB
    assert scaled(profile, 0.25).kinds["model/0"][0].num_bytes == MB // 4

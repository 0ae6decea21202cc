"""Plans that need no search, and how a profile grows."""

from dataclasses import replace
from pathlib import Path

import pytest

from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.profile import PROFILE_FILE, Mark, Phase, Profile
from ssdtrain.plan.scaled import Growth, scaled
from ssdtrain.plan.simulate import Simulation, simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.plan.unsearched import (
    MOST_RATIO,
    all_again,
    all_again_moving,
    fewest_again,
    keeping_all,
    least_number,
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
        peak_bytes = (
            Simulation(larger, at_size(each.plan.orders, larger)).run().peak_bytes
        )
        assert peak_bytes <= most_bytes
        if each.ratio < MOST_RATIO:
            # And not by far: what is between two sizes is on a line, nearly.
            beyond = Timeline(scaled(recorded, 1.2 * each.ratio))
            assert Simulation(
                beyond, at_size(each.plan.orders, beyond)
            ).run().peak_bytes > (most_bytes)


@pytest.mark.parametrize("bend", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("at", [0, 1, 2, 31, 62, 63, 64])
def test_the_least_number_is_found_in_few_simulations(bend: float, at: int) -> None:
    """Where memory falls evenly with each region that runs again, and where not."""
    asked = list[int]()

    def over(number: int) -> float:
        asked.append(number)
        return float((64 - number) ** bend - (64 - at) ** bend)

    assert least_number(over, 63) == (max(at, 1) if at < 64 else None)
    assert len(asked) <= (5 if bend == 1.0 else 9)
    assert len(set(asked)) == len(asked)


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


def test_a_smaller_batch_has_no_smaller_gradients() -> None:
    """What is beside the saved tensors is taken to be as much; or a plan for it would
    go beyond the limit."""
    mark = Mark(lane=0, phase=Phase.BACKWARD, item=0, ms=1.0, other_bytes=5 * MB)
    profile = chain(2)
    profile = replace(profile, marks=(*profile.marks, mark))
    assert scaled(profile, 0.25).marks[-1].other_bytes == 5 * MB
    assert scaled(profile, 2.0).marks[-1].other_bytes == 10 * MB
    assert scaled(profile, 0.25).kinds["model/0"][0].num_bytes == MB // 4

"""Plans that need no search, and how a profile grows."""

from dataclasses import replace
from pathlib import Path

import pytest

from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.profile import PROFILE_FILE, Mark, Phase, Profile
from ssdtrain.plan.scaled import Growth, scaled, times_longer
from ssdtrain.plan.simulate import Run, simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.plan.unsearched import MOST_RATIO, unsearched
from tests.ssdtrain.plan.profiles import MB, chain

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


def test_nothing_where_nothing_fits(recorded: Profile) -> None:
    assert not unsearched(recorded, Goal(memory_budget_bytes=MB), Growth())
    assert not unsearched(recorded, Goal(), Growth())  # no limit: no need


def test_without_regions_only_what_keeps_everything() -> None:
    profile = chain(10)
    found = unsearched(profile, Goal(memory_budget_bytes=20 * MB), Growth())
    assert [each.plan.policy for each in found] == ["keep-all"]
    assert found[0].ratio == pytest.approx(2.0 * (1 - 0.019), rel=0.1)


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
        times_longer(3.0) * (profile.compute_ms - profile.tail_ms)
    )


def test_times_grow_as_they_were_measured() -> None:
    """Of 12 layers of a 4B model on an H200, from the shortest batch and longest."""
    measured = {2379: 117, 4169: 144, 5365: 184, 6827: 233, 8192: 257}
    for observed, usual_ms in ((2379, 117), (8192, 257)):
        for tokens, ms in measured.items():
            found = usual_ms * times_longer(tokens / observed)
            assert found == pytest.approx(ms, rel=0.25), (observed, tokens)


def test_a_smaller_batch_has_no_smaller_gradients() -> None:
    """What is beside the saved tensors is taken to be as much; or a plan for it would
    go beyond the limit."""
    mark = Mark(lane=0, phase=Phase.BACKWARD, item=0, ms=1.0, other_bytes=5 * MB)
    profile = chain(2)
    profile = replace(profile, marks=(*profile.marks, mark))
    assert scaled(profile, 0.25).marks[-1].other_bytes == 5 * MB
    assert scaled(profile, 2.0).marks[-1].other_bytes == 10 * MB
    assert scaled(profile, 0.25).kinds["model/0"][0].num_bytes == MB // 4

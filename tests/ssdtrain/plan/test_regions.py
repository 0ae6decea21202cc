"""Regions in the simulator and the search: times, memory and choice, by hand."""

import itertools
from dataclasses import replace

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile, RegionRun
from ssdtrain.plan.regions import parts, spread, with_regions
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.plan.profiles import MB, chain

NUM_REGIONS = 4
KIND = "model/0"


def layers(gb_per_s: float = 1e-6, other_bytes: int = 3 * MB) -> Profile:
    """Four regions of an input and two tensors, on a link that is of no use."""
    profile = chain(3 * NUM_REGIONS, gb_per_s=gb_per_s)
    items = tuple(
        replace(item, serves=n // 3) if n % 3 == 0 else replace(item, region=n // 3)
        for n, item in enumerate(profile.kinds[KIND])
    )
    # Nobody but the region asks for its input.
    marks = tuple(
        mark for mark in profile.marks if mark.phase.value == "forward" or mark.item % 3
    )
    runs = tuple(
        RegionRun(
            module=f"layers.{n}", inputs=(3 * n,), ms=2.0, other_bytes=other_bytes
        )
        for n in range(NUM_REGIONS)
    )
    return replace(profile, kinds={KIND: items}, marks=marks, regions={KIND: runs})


def predicted(profile: Profile, chosen: list[tuple[str, int]]):  # type: ignore[no-untyped-def]
    timeline = Timeline(profile)
    keep = {KIND: [Placement.KEEP] * (3 * NUM_REGIONS)}
    orders = schedule(timeline, with_regions(timeline, keep, chosen))
    return simulate(timeline, orders), Plan(orders=orders, policy="by hand")


def test_a_plan_fits_no_profile_with_other_regions() -> None:
    """A module may cease to be one between two observations."""
    profile = layers()
    items = tuple(
        replace(item, region=-1) if item.region == NUM_REGIONS - 1 else item
        for item in profile.kinds[KIND]
    )
    items = tuple(
        replace(item, serves=-1) if item.serves == NUM_REGIONS - 1 else item
        for item in items
    )
    runs = {KIND: profile.regions[KIND][:-1]}
    fewer = replace(profile, kinds={KIND: items}, regions=runs)
    assert fewer.signature() != profile.signature()
    assert replace(profile).signature() == profile.signature()


def test_a_rerun_costs_its_time_and_frees_all_but_its_input() -> None:
    none, _ = predicted(layers(), [])
    # Two tensors a region: inputs are not saved for their own sake.
    assert none.peak_bytes == 8 * MB and none.recompute_ms == 0.0
    for count in range(1, NUM_REGIONS + 1):
        found, plan = predicted(layers(), [(KIND, n) for n in range(count)])
        assert found.step_ms == pytest.approx(none.step_ms + 2.0 * count)
        assert found.recompute_ms == 2.0 * count
        assert plan.regions_of(KIND) == frozenset(range(count))
        saved = plan.bytes_by_placement()
        assert saved["rerun"] == 2 * count * MB
        assert saved["keep"] == (8 - 2 * count + count) * MB
    # The last one's tensors and four inputs: in its forward, and when it runs again.
    assert found.peak_bytes == (4 + 3) * MB
    assert found.keep_peak_bytes == none.peak_bytes


def test_what_a_rerun_needs_is_in_the_peak() -> None:
    every = [(KIND, n) for n in range(NUM_REGIONS)]
    found, _ = predicted(layers(other_bytes=50 * MB), every)
    assert found.peak_bytes == (4 + 50) * MB


def test_those_that_are_chosen_lie_evenly() -> None:
    timeline = Timeline(layers())
    sets = parts(timeline)
    assert [len(each) for each in sets] == list(range(NUM_REGIONS + 1))
    assert all(before < after for before, after in itertools.pairwise(sets))
    two = sorted(number for _, number in spread(timeline)[:2])
    assert two[1] - two[0] >= 2


def test_the_search_takes_as_many_as_the_budget_asks_for() -> None:
    profile = layers(other_bytes=2 * MB)
    times = []
    for budget in (9 * MB, 7.2 * MB, 6.2 * MB):
        plan = choose(profile, Goal(max_overhead=0.0, memory_budget_bytes=int(budget)))
        assert plan.prediction is not None and plan.prediction.peak_bytes <= budget
        times.append(len(plan.regions_of(KIND)))
    assert times[0] == 0 < times[1] <= times[2]
    with pytest.raises(ConfigError, match="least reachable peak"):
        choose(profile, Goal(max_overhead=0.0, memory_budget_bytes=MB))

"""Regions in the simulator and the search: times, memory and choice, by hand."""

from dataclasses import replace

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.jsonfile import Unfit
from ssdtrain.plan.choose import choose
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import PROFILE_FILE, AttentionPart, Profile, RegionRun
from ssdtrain.plan.regions import spread, with_regions
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.plan.profiles import MB, chain

NUM_REGIONS = 4
KIND = "model/0"


def layers(
    gb_per_s: float = 1e-6, other_bytes: int = 3 * MB, num: int = NUM_REGIONS
) -> Profile:
    """Regions of an input and two tensors, on a link that is of no use."""
    profile = chain(3 * num, gb_per_s=gb_per_s)
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
        for n in range(num)
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


def with_attention(
    ms: float = 1.5, other_bytes: int = 3 * MB, gb_per_s: float = 1e-6
) -> Profile:
    """As `layers`, and the first tensor of each region is an attention's."""
    profile = layers(gb_per_s, other_bytes)
    runs = tuple(
        replace(run, parts=(AttentionPart(items=(3 * n + 1,), ms=ms),))
        for n, run in enumerate(profile.regions[KIND])
    )
    return replace(profile, regions={KIND: runs})


def test_moved_attention_is_back_when_its_region_runs_again() -> None:
    profile = with_attention()
    timeline = Timeline(profile)
    every = spread(timeline)
    move = {KIND: [Placement.OFFLOAD] * (3 * NUM_REGIONS)}
    placed = timeline.placements_by_id(with_regions(timeline, move, every, every))
    layout = timeline.layout(placed)
    first = layout.residency.first
    for run, at in layout.run_marks.items():
        assert first[3 * run + 1] == at


def test_a_part_of_another_region_is_refused() -> None:
    profile = with_attention()
    runs = tuple(
        replace(run, parts=(AttentionPart(items=(1,), ms=1.0),))
        for run in profile.regions[KIND]
    )
    with pytest.raises(Unfit, match="parts"):
        PROFILE_FILE.check(replace(profile, regions={KIND: runs}))


def test_at_long_contexts_attention_is_stored_at_checkpointings_own_peak() -> None:
    """Where attention is most of a re-run, and a link moves what it gives in time; not
    where it is next to nothing."""
    for ms, is_stored in ((1.9, True), (0.0, False)):
        profile = with_attention(ms, gb_per_s=1.0)
        timeline = Timeline(profile)
        keep = {KIND: [Placement.KEEP] * (3 * NUM_REGIONS)}
        again = with_regions(timeline, keep, spread(timeline))
        checkpointing = simulate(timeline, schedule(timeline, again))
        limit = int(1.02 * checkpointing.peak_bytes)
        profile = replace(profile, notes={"recompute": "regions"})
        plan = choose(profile, Goal(max_overhead=0.0, memory_budget_bytes=limit))
        found = plan.prediction
        assert found is not None and found.peak_bytes <= limit
        saved_ms = checkpointing.recompute_ms - found.recompute_ms
        assert saved_ms == pytest.approx(4 * ms if is_stored else 0.0)
        if is_stored:
            assert checkpointing.step_ms / found.step_ms > 1.15

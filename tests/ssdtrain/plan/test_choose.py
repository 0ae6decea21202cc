"""The search against brute force, the fixed policies, and what a goal promises."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.plan.baselines import fixed_policies
from ssdtrain.plan.choose import Judge, choose, kept_but
from ssdtrain.plan.goal import DEVICE_RESERVE, Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import PLAN_FILE, read_plan
from ssdtrain.plan.profile import PROFILE_FILE, Profile
from ssdtrain.plan.regions import spread
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.simulate import Simulation, keep_all
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.plan import profiles as made
from tests.ssdtrain.plan.enumerated import assignments, styles
from tests.ssdtrain.plan.test_regions import KIND, layers

MB = made.MB

GOALS = (
    Goal(max_overhead=0.0),
    Goal(max_overhead=0.05),
    Goal(max_overhead=0.5),
    Goal(memory_budget_bytes=14 * MB),
    Goal(max_overhead=0.05, capacity_bytes=16 * MB),
)


def brute_force(
    profile: object, goal: Goal, *, waits: bool = True
) -> tuple[float, ...]:
    """The best rank over every placement and style; or where compute waits for no
    copy out."""
    timeline = Timeline(profile)  # type: ignore[arg-type]
    judge = Judge(timeline, goal)
    return min(
        judge.judge(placements, style, "oracle").rank
        for placements in assignments(timeline)
        for style in (styles(timeline) if waits else (Style(),))
    )


def rank_of(profile: object, goal: Goal, plan: object) -> tuple[float, ...]:
    timeline = Timeline(profile)  # type: ignore[arg-type]
    outcome = Simulation(timeline, plan.orders).run()  # type: ignore[attr-defined]
    return Judge(timeline, goal).rank(outcome)


@pytest.mark.parametrize("goal", GOALS, ids=str)
def test_the_search_comes_close_to_all_plans_and_styles(goal: Goal) -> None:
    """It knows fewer ways to wait for copies than there are."""
    others = 0
    for seed in range(6):
        profile = made.drawn(seed, 5)
        best = brute_force(profile, goal)
        try:
            found = rank_of(profile, goal, choose(profile, goal))
        except ConfigError:
            assert best[0] > 0
            continue
        assert found[0] == best[0]
        assert found[1] <= 1.2 * best[1]
        others += found > best
    assert others <= 1


@pytest.mark.parametrize("seed", range(6))
def test_the_search_comes_close_to_brute_force(seed: int) -> None:
    goal = Goal(max_overhead=0.1)
    profile = made.drawn(100 + seed, 6)
    best = brute_force(profile, goal, waits=False)
    found = rank_of(profile, goal, choose(profile, goal))
    assert found[0] == best[0] == 0.0
    assert found[1] <= 1.05 * best[1]


@pytest.mark.parametrize("goal", GOALS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_it_never_loses_to_a_fixed_policy(seed: int, goal: Goal) -> None:
    profile = made.drawn(seed, 24)
    timeline = Timeline(profile)
    goal = replace(goal, memory_budget_bytes=goal.memory_budget_bytes and 60 * MB)
    judge = Judge(timeline, goal)
    own = rank_of(profile, goal, choose(profile, goal))
    for fixed in fixed_policies(timeline):
        orders = schedule(timeline, fixed.placements, fixed.style)
        assert own <= judge.rank(Simulation(timeline, orders).run()), fixed.name


def test_more_overhead_or_memory_is_never_worse() -> None:
    profile = made.drawn(7, 20)
    peaks = [
        choose(profile, Goal(max_overhead=limit)).prediction.peak_bytes
        for limit in (0.0, 0.02, 0.1, 0.3, 1.0)
    ]
    assert all(b <= 1.02 * a for a, b in itertools.pairwise(peaks))
    keep = Simulation(Timeline(profile), keep_all(Timeline(profile))).run().peak_bytes
    times = [
        choose(profile, Goal(memory_budget_bytes=int(part * keep))).prediction.step_ms
        for part in (0.6, 0.7, 0.8, 0.9, 1.1)
    ]
    assert all(b <= 1.02 * a for a, b in itertools.pairwise(times))


def test_it_declines_when_nothing_is_needed() -> None:
    plan = choose(made.drawn(3, 20), Goal(memory_budget_bytes=10**12))
    assert plan.policy == "keep-all"
    placed = {order.placement for own in plan.orders.values() for order in own}
    assert placed == {Placement.KEEP}


def test_an_unreachable_budget_names_the_least_peak() -> None:
    profile = made.drawn(5, 12)
    with pytest.raises(ConfigError, match="least reachable peak") as error:
        choose(profile, Goal(memory_budget_bytes=MB))
    least, keep, needed = numbers_of(error.value)
    assert least <= keep and needed <= keep
    plan = choose(profile, Goal(memory_budget_bytes=needed))
    assert plan.prediction is not None and plan.prediction.peak_bytes <= needed
    with pytest.raises(ConfigError):
        choose(profile, Goal(memory_budget_bytes=int(0.9 * needed)))


def numbers_of(error: Exception) -> tuple[int, ...]:
    """The least peak, that of everything kept, and the least budget that it names."""
    text = r"activations is (\d+) .*kept: (\d+)\).* to at least (\d+),"
    found = re.search(text, str(error))
    assert found is not None, error
    return tuple(map(int, found.groups()))


@pytest.mark.parametrize("seed", range(6))
def test_no_refusal_names_more_than_everything_kept(seed: int) -> None:
    """Also where nothing can leave: a budget of all that a step keeps is enough."""
    drawn = made.drawn(seed, 3)
    for host_bytes in (None, 0):
        profile = replace(drawn, host_bytes=host_bytes)
        with pytest.raises(ConfigError) as error:
            choose(profile, Goal(memory_budget_bytes=1))
        least, keep, needed = numbers_of(error.value)
        assert least <= needed <= keep
        for budget in (needed, keep):
            assert choose(profile, Goal(memory_budget_bytes=budget)).orders
        spare = Goal(memory_budget_bytes=needed, spare_bytes=needed // 10)
        with pytest.raises(ConfigError):
            choose(profile, spare)


def test_what_fits_goes_before_what_is_fast() -> None:
    """A plan above the device is the last choice, and no error."""
    profile = made.drawn(5, 14)
    cheap = choose(profile, Goal(max_overhead=0.0)).prediction
    dear = choose(profile, Goal(max_overhead=9.0)).prediction
    assert cheap is not None and dear is not None
    assert dear.peak_bytes < cheap.peak_bytes
    for base_bytes in (0, 5 * MB):
        own = replace(profile, base_bytes=base_bytes)
        between = (dear.peak_bytes + cheap.peak_bytes) // 2
        capacity = int((between + base_bytes) / (1 - DEVICE_RESERVE)) + 1
        found = choose(own, Goal(max_overhead=0.0, capacity_bytes=capacity)).prediction
        assert found is not None
        assert found.peak_bytes <= between < cheap.peak_bytes
        assert found.step_ms <= dear.step_ms
    nothing = choose(profile, Goal(max_overhead=0.0, capacity_bytes=1)).prediction
    assert nothing is not None and nothing.peak_bytes <= dear.peak_bytes
    roomy = choose(profile, Goal(max_overhead=0.0, capacity_bytes=1 << 40)).prediction
    assert roomy == cheap


def test_host_memory_is_a_limit() -> None:
    profile = replace(made.drawn(5, 12), host_bytes=10 * MB)
    plan = choose(profile, Goal(max_overhead=1.0))
    assert plan.prediction is not None
    assert plan.prediction.host_peak_bytes <= 10 * MB
    free = choose(replace(profile, host_bytes=None), Goal(max_overhead=1.0))
    assert free.prediction is not None
    assert free.prediction.host_peak_bytes > 10 * MB


def test_what_is_too_much_for_host_memory_goes_to_the_ssd() -> None:
    profile = replace(
        made.drawn(5, 12),
        host_bytes=20 * MB,
        links=made.links(20.0, ssd_write=made.curve(6.0), ssd_read=made.curve(6.0)),
    )
    plan = choose(profile, Goal(max_overhead=1.0))
    placed = [order.placement for order in plan.orders["model/0"]]
    assert Placement.OFFLOAD_SSD in placed


@pytest.mark.parametrize("budget", [21 * MB, 24 * MB, 27 * MB, 30 * MB])
def test_no_more_regions_run_again_than_a_limit_asks_for(budget: int) -> None:
    """Between all that stays and all that runs again, where nothing else pays; also in
    the shortest search."""
    profile = layers(other_bytes=2 * MB, num=16)
    timeline = Timeline(profile)
    goal = Goal(memory_budget_bytes=budget)
    most_bytes, order = goal.most_bytes(profile), spread(timeline)
    assert most_bytes is not None

    def peak_bytes(number: int) -> int:
        return Simulation(timeline, kept_but(timeline, order[:number])).run().peak_bytes

    assert peak_bytes(len(order)) <= most_bytes < peak_bytes(0)
    plan = choose(profile, goal, 1)
    number = len(plan.regions_of(KIND))
    assert 0 < number < len(order)
    assert plan.moves_nothing and plan.prediction is not None
    assert plan.prediction.peak_bytes <= most_bytes < peak_bytes(number - 1)


def test_profile_and_plan_survive_json(tmp_path: Path) -> None:
    profile = made.drawn(9, 15)
    plan = choose(profile, Goal(max_overhead=0.2))
    text = json.dumps(PROFILE_FILE.to_json(profile))
    assert PROFILE_FILE.from_json(json.loads(text)) == profile
    (tmp_path / "profile.json").write_text(text)
    assert PROFILE_FILE.read(tmp_path / "profile.json") == profile
    text = json.dumps(PLAN_FILE.to_json(plan))
    assert PLAN_FILE.from_json(json.loads(text)) == plan
    (tmp_path / "plan.json").write_text(text)
    assert read_plan(tmp_path / "plan.json") == plan


def test_other_versions_and_damage_are_refused(tmp_path: Path) -> None:
    profile = PROFILE_FILE.to_json(made.chain(2))
    with pytest.raises(ConfigError, match="version"):
        PROFILE_FILE.from_json({**profile, "schema_version": 0})
    with pytest.raises(ConfigError, match="damaged"):
        PROFILE_FILE.from_json({**profile, "marks": [{"lane": 0}]})
    with pytest.raises(ConfigError, match="an item of its lane"):
        PROFILE_FILE.from_json(
            {**profile, "marks": [{**profile["marks"][0], "item": 7}]}
        )
    plan = PLAN_FILE.to_json(choose(made.chain(2), Goal()))
    with pytest.raises(ConfigError, match="version"):
        PLAN_FILE.from_json({**plan, "schema_version": 0})
    with pytest.raises(ConfigError, match="damaged"):
        PLAN_FILE.from_json({**plan, "orders": {"m": [{"placement": "somewhere"}]}})
    (tmp_path / "plan.json").write_text("no")
    with pytest.raises(ConfigError, match="as JSON"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="plan expects"):
        read_plan(tmp_path / "absent.json")


def ssd_only(num: int) -> Profile:
    """A chain whose only way out is an SSD fast enough for all of it."""
    fast = made.links(10.0, ssd_write=made.curve(10.0), ssd_read=made.curve(10.0))
    return replace(made.chain(num), links=fast, notes={"target": "ssd"})


@pytest.mark.parametrize("num", [4, 24])
def test_a_plan_holds_the_write_budget(num: int) -> None:
    """Few items are enumerated, many are searched; both write what is allowed."""
    profile = ssd_only(num)
    free = choose(profile, Goal(max_overhead=0.2)).prediction
    unlimited = free.links["ssd_write"].num_bytes
    assert unlimited > 0
    written = []
    for part in (2.0, 0.5, 0.1, 0.0):
        rate = part * unlimited / (free.step_ms / 1e3)
        goal = Goal(max_overhead=0.2, ssd_bytes_per_s=rate)
        found = choose(profile, goal).prediction
        assert goal.allows(found.links["ssd_write"].num_bytes, found.step_ms)
        written.append(found.links["ssd_write"].num_bytes)
    assert written[0] == unlimited
    assert 0 < written[1] <= 0.6 * unlimited
    assert written[-1] == 0


def test_a_memory_budget_out_of_reach_names_the_write_budget() -> None:
    goal = Goal(memory_budget_bytes=6 * MB, ssd_bytes_per_s=1e6)
    choose(ssd_only(12), replace(goal, ssd_bytes_per_s=None))
    with pytest.raises(ConfigError, match=r"write_budget holds this rank to 1\.0 MB/s"):
        choose(ssd_only(12), goal)


@pytest.mark.parametrize("gb_per_s", [10.0, 0.1, 0.001])
def test_a_slow_link_costs_time_and_no_memory(gb_per_s: float) -> None:
    """Of the last tensors none is copied before its use: a plan that let them stay
    would need half of all."""
    profile = made.chain(12, gb_per_s=gb_per_s)
    budget = 3 * made.MB
    plan = choose(profile, Goal(memory_budget_bytes=budget))
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes <= budget
    assert (plan.policy == "waits for copies out") == (gb_per_s < 1.0)
    if gb_per_s < 1.0:  # nine tensors at least leave and come back
        assert plan.prediction.step_ms > 2 * 9 * made.MB / gb_per_s / 1e6

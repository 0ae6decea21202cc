"""Plans that need no search: some regions run again, or all, and nothing moves but what
their forwards read.

They are made at once where a step is observed, and each serves batches up to the size
for which its peak stays within a memory limit: what keeps everything serves the short
ones, what runs all regions again the long ones.
(tests/ssdtrain/plan/test_unsearched.py)
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from ssdtrain.plan.baselines import away
from ssdtrain.plan.choose import kept_but
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.regions import (
    Region,
    as_they_run,
    running,
    spread,
    with_regions,
)
from ssdtrain.plan.scaled import Growth, UpTo, scaled
from ssdtrain.plan.schedule import Late, Style, schedule
from ssdtrain.plan.simulate import Simulation, simulate
from ssdtrain.plan.timeline import Timeline

PARTS = 4
"""Plans that run so many parts of the regions again, next to the one that runs none."""
MOST_RATIO = 4.0
"""Batches are no larger or smaller than this, over the observed one."""


ALL_AGAIN = "regions"
"""Name of the plan that runs all regions again."""


def runs_always(profile: Profile) -> bool:
    """Return whether all regions run again in any plan."""
    return profile.notes.get("recompute") == "regions"


def keeping_all(profile: Profile) -> Plan:
    """Return the plan that keeps everything, but for regions that always run again."""
    timeline = Timeline(profile)
    again = spread(timeline) if runs_always(profile) else []
    orders = kept_but(timeline, again)
    prediction = simulate(timeline, orders)
    return Plan(orders=orders, policy="keep-all", prediction=prediction)


def all_again(profile: Profile, larger: Profile, goal: Goal) -> Plan | None:
    """Return the plan that runs all regions again and keeps the rest; None: there are
    none, or it needs more than the memory limit.

    Args:
        profile: an observed step.
        larger: the same with batches that must fit.
        goal: with a memory limit.
    """
    return _fitting(*_timelines(profile, larger), goal, 0)


def all_again_moving(profile: Profile, larger: Profile, goal: Goal) -> Plan | None:
    """As `all_again`, where what regions read must leave: the first of it, which
    backward asks for last, and no more than is needed."""
    observed, largest = _timelines(profile, larger)
    most = num_read(profile)
    found, low, high = None, 0, 1
    # What leaves last comes back at once: to move all of it may need more than a part.
    while found is None and low < most:
        high = min(high, most)
        found = _fitting(observed, largest, goal, high)
        if found is None:
            low, high = high, 2 * high
    while found is not None and high - low > 1:
        number = (low + high) // 2
        if plan := _fitting(observed, largest, goal, number):
            found, high = plan, number
        else:
            low = number
    return None if found is None or _is_too_much(largest, found, goal) else found


def fewest_again(profile: Profile, larger: Profile, goal: Goal) -> Plan | None:
    """Return the plan that moves nothing and runs as few regions again as fit: the last
    ones stay, whose memory backward gives back first. None: all run again, or none."""
    observed, largest = _timelines(profile, larger)
    order = as_they_run(observed)
    most_bytes = _room_bytes(largest.profile, goal)
    if most_bytes is None or runs_always(profile):
        return None

    def over_bytes(number: int) -> float:
        needs = Simulation(largest, kept_but(largest, order[:number])).run()
        return needs.peak_bytes - most_bytes

    number = least_number(over_bytes, len(order) - 1)
    if number is None:
        return None
    orders = kept_but(observed, order[:number])
    policy = f"{number} regions run again"
    prediction = simulate(observed, orders)
    return Plan(orders=orders, policy=policy, prediction=prediction)


def staying(profile: Profile, plan: Plan) -> frozenset[str]:
    """Return the paths of regions that run again in none of their calls."""
    again = running(
        Timeline(profile),
        {k: [order.placement for order in own] for k, own in plan.orders.items()},
    )
    paths = {True: set[str](), False: set[str]()}
    for kind, runs in profile.regions.items():
        for number, run in enumerate(runs):
            paths[(kind, number) in again].add(run.module)
    return frozenset(paths[False] - paths[True])


def left_free(profile: Profile, goal: Goal, wanted: int) -> int:
    """Return how many of these bytes the plan that runs all regions again leaves of a
    memory limit."""
    most_bytes = goal.most_bytes(profile)
    if not wanted or most_bytes is None:
        return 0
    timeline = Timeline(profile)
    needs = Simulation(timeline, kept_but(timeline, spread(timeline))).run()
    return max(0, min(wanted, int(most_bytes) - needs.peak_bytes))


class RegionBytes(NamedTuple):
    """Bytes of a call of a region."""

    saved: int
    """By its forward."""
    read: int
    """Of its arguments, which stay where it runs again."""


def region_bytes(profile: Profile) -> dict[str, RegionBytes]:
    """Return the most that a call of each region needs, by path."""
    found: dict[str, RegionBytes] = {}
    for kind, runs in profile.regions.items():
        items = profile.kinds[kind]
        for number, run in enumerate(runs):
            saved = sum(item.num_bytes for item in items if item.region == number)
            read = sum(items[item].num_bytes for item in run.inputs)
            needs = RegionBytes(saved + run.small_bytes, read)
            found[run.module] = max(found.get(run.module, needs), needs)
    return found


def least_number(over: Callable[[int], float], most: int) -> int | None:
    """Return the least number from 1 to `most` for which `over`, which falls, is not
    above zero; None: there is none.

    Training waits for it, and each `over` is a simulation: so the line through what is
    known says where to look next, and the middle does where that did not halve it.
    """
    if most < 1 or (right := over(most)) > 0.0:
        return None
    if (left := over(1)) <= 0.0:
        return 1
    first, last, by_line = 1, most, True
    while last - first > 1:
        size = last - first
        share = left / (left - right) if by_line else 0.5
        middle = min(max(first + math.ceil(share * size), first + 1), last - 1)
        if (found := over(middle)) <= 0.0:
            last, right = middle, found
        else:
            first, left = middle, found
        by_line = 2 * (last - first) <= size
    return last


def _room_bytes(profile: Profile, goal: Goal) -> float | None:
    """Return the peak that a memory limit and torn blocks leave room for; None: any."""
    limits = goal.most_bytes(profile), goal.easy_bytes(profile)
    return min((each for each in limits if each is not None), default=None)


def _is_too_much(largest: Timeline, plan: Plan, goal: Goal) -> bool:
    """Return whether what leaves is more than the host has room for, or than may be
    written: then copies are not made, and steps go beyond the memory limit."""
    needs, host_bytes = (
        Simulation(largest, plan.orders).run(),
        largest.profile.host_bytes,
    )
    if host_bytes is not None and needs.host_peak_bytes > host_bytes:
        return True
    return not goal.allows(needs.moved_bytes["ssd_write"], needs.step_ms)


def _read(profile: Profile, kind: str) -> set[int]:
    """Return the items that regions of a kind of lane read."""
    runs = profile.regions.get(kind, ())
    return {item for run in runs for item in run.inputs}


def _timelines(profile: Profile, larger: Profile) -> tuple[Timeline, Timeline]:
    observed = Timeline(profile)
    return observed, observed if larger is profile else Timeline(larger)


def again_moving(
    observed: Timeline, num_moved: int
) -> dict[str, tuple[Order, ...]] | None:
    """Return the orders that run all regions again and move so many of what they read;
    None: there are no regions."""
    profile, regions = observed.profile, spread(observed)
    if not regions:
        return None
    target, left = away(observed), num_moved
    placements: dict[str, list[Placement]] = {}
    for kind, items in profile.kinds.items():
        placements[kind] = [Placement.KEEP] * len(items)
        for number in sorted(_read(profile, kind)):
            if left > 0 and not items[number].held:
                placements[kind][number], left = target, left - 1
    style = Style(late=Late.WAIT) if num_moved else Style()
    return schedule(observed, with_regions(observed, placements, regions), style)


def num_read(profile: Profile) -> int:
    """Return how many items regions read."""
    return sum(len(_read(profile, kind)) for kind in profile.regions)


def _fitting(
    observed: Timeline, largest: Timeline, goal: Goal, num_moved: int
) -> Plan | None:
    """Return the plan of `again_moving`; None: there is none, or it does not fit the
    memory limit."""
    most_bytes = goal.most_bytes(largest.profile)
    orders = None if most_bytes is None else again_moving(observed, num_moved)
    if most_bytes is None or orders is None:
        return None
    if Simulation(largest, orders).run().peak_bytes > most_bytes:
        return None
    prediction = simulate(observed, orders)
    return Plan(orders=orders, policy=ALL_AGAIN, prediction=prediction)


def unsearched(profile: Profile, goal: Goal, growth: Growth) -> list[UpTo]:
    """Return plans under which nothing moves, the least ratio first; only those that
    serve larger batches than the ones before."""
    found: list[UpTo] = []
    observed, most_bytes = Timeline(profile), _room_bytes(profile, goal)
    order = spread(observed)

    @cache
    def timeline_of(ratio: float) -> Timeline:
        return Timeline(scaled(profile, ratio, growth))

    first = PARTS if runs_always(profile) else 0
    for part in range(first, PARTS + 1) if order else (0,):
        regions = order[: -(-len(order) * part // PARTS)]
        ratio = _most_ratio(timeline_of, regions, most_bytes)
        if ratio > (found[-1].ratio if found else 0.0):
            policy = "keep-all" if not regions else f"{len(regions)} regions run again"
            plan = Plan(orders=kept_but(observed, regions), policy=policy)
            found.append(UpTo(ratio, plan))
    return found


def _most_ratio(
    timeline_of: Callable[[float], Timeline],
    regions: Sequence[Region],
    most_bytes: float | None,
) -> float:
    """Return up to which size of a batch a limit is kept where these regions run again
    and all else stays; 0.0: at none.

    A peak is the largest of sums that grow evenly with the size: between two sizes it
    lies below the line from one to the other.
    """
    if most_bytes is None:
        return 0.0

    def peak_bytes(ratio: float) -> int:
        timeline = timeline_of(ratio)
        return Simulation(timeline, kept_but(timeline, regions)).run().peak_bytes

    usual_bytes = peak_bytes(1.0)
    if usual_bytes <= most_bytes:
        small, low, large = 1.0, usual_bytes, MOST_RATIO
        high = peak_bytes(large)
    else:
        small, large, high = 1 / MOST_RATIO, 1.0, usual_bytes
        low = peak_bytes(small)
    if low > most_bytes:
        return 0.0
    if high <= most_bytes:
        return large
    return small + (large - small) * (most_bytes - low) / (high - low)

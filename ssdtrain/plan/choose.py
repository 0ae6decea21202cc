"""Which placement each item gets: least peak at an overhead, or least time in memory.

[Note: the search]
A byte on the device is given a price, and every tensor and every region takes what is
cheapest at it ([Note: prices] in prices.py): the price is bisected until the plan meets
the goal, for several shares of the link's time and prices of the host's. How many
regions run again where nothing moves is bisected as well. Then single items change that
are alive at the peak or make compute wait, as long as that helps. Every plan is
scheduled just in time and simulated; the fixed policies are candidates too, so the
result cannot lose to them. No clock is read: the same profile gives the same plan on
every rank.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ssdtrain.errors import ConfigError
from ssdtrain.plan.baselines import (
    WINDOW_LARGEST,
    away,
    fixed_policies,
    largest_bytes,
    placed_by,
    spilled,
    with_tail_kept,
)
from ssdtrain.plan.goal import Goal
from ssdtrain.plan.outcomes import Outcomes
from ssdtrain.plan.placement import Placement, Placements
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.prices import Priced, Prices
from ssdtrain.plan.profile import Item, Profile
from ssdtrain.plan.regions import (
    Region,
    as_they_run,
    by_yield,
    is_made_again,
    part_items,
    running,
    spread,
    with_regions,
)
from ssdtrain.plan.replays import NEVER_MS
from ssdtrain.plan.schedule import Late, Style, schedule
from ssdtrain.plan.shortage import Shortage, check_rest
from ssdtrain.plan.simulate import Outcome, Simulation, simulate
from ssdtrain.plan.timeline import Timeline

SEARCH_MARKS = 600_000
"""Marks simulated in a search, over all its candidates (one to two seconds)."""
QUICK_MARKS = 120_000
"""Of a search on the training thread: two tenths of a second."""
PRICED_SHARE = 0.6
"""Of a search that goes to prices; the rest is for single items."""
HOOKS_OVERHEAD = 0.002
"""Part of the overhead that is left for the hooks where their host time is unknown;
never more than half of it."""


class Contender(NamedTuple):
    """A scheduled and simulated plan."""

    rank: tuple[float, ...]
    """Smaller is better."""
    asked: Placements
    """Before some that cannot pay become KEEP."""
    outcome: Outcome
    style: Style
    policy: str


class Judge:
    """Schedules, simulates and ranks; counts what it cost."""

    def __init__(
        self,
        timeline: Timeline,
        goal: Goal,
        search_marks: int = SEARCH_MARKS,
        outcomes: Outcomes | None = None,
    ) -> None:
        self.timeline = timeline
        self.outcomes = outcomes or Outcomes(timeline)
        asked = timeline.profile.notes.get("recompute")
        self.always = spread(timeline) if asked == "regions" else []
        """Regions that run again in any case."""
        self.keep = Simulation(timeline, kept_but(timeline, self.always)).run()
        self.least = self.keep
        """Of all candidates that host memory has room for, the least peak."""
        self.short_of_host = False
        """Whether a candidate would fit if there were more host memory."""
        self._most_bytes = goal.most_bytes(timeline.profile)
        self._fitting_bytes = goal.fitting_bytes(timeline.profile)
        self._easy_bytes = goal.easy_bytes(timeline.profile)
        allowed = goal.max_overhead
        if timeline.profile.host_ms <= 0.0:  # else the host's time is simulated
            allowed = max(allowed / 2, allowed - HOOKS_OVERHEAD)
        self._most_ms = self.keep.step_ms * (1 + allowed)
        self._host_bytes = timeline.profile.host_bytes
        self._goal = goal
        self.left_marks = search_marks

    @property
    def is_by_memory(self) -> bool:
        """Whether a memory limit is set, and the least time asked for."""
        return self._most_bytes is not None

    @property
    def is_spent(self) -> bool:
        """Whether the search has simulated enough."""
        return self.left_marks <= 0

    def judge(self, placements: Placements, style: Style, policy: str) -> Contender:
        """Simulate one candidate, or remember it."""
        asked = self.asked(placements)
        outcome = self.outcomes.of(asked, style)
        self.left_marks -= 4 * max(1, self.timeline.num_marks)
        rank = self.rank(outcome)
        if rank[0] < 2 and outcome.peak_bytes < self.least.peak_bytes:
            self.least = outcome
        if rank[0] == 2.0 and self._most_bytes is not None:
            self.short_of_host |= outcome.peak_bytes <= self._most_bytes
        return Contender(rank, asked, outcome, style, policy)

    def asked(self, placements: Placements) -> Placements:
        """Return these placements with what must run again, and what does not fit into
        host memory elsewhere."""
        if self.always:
            # Some of those that run again may store what attention gives.
            again = running(self.timeline, placements)
            rest = [region for region in self.always if region not in again]
            placements = with_regions(self.timeline, placements, rest)
        return spilled(self.timeline, placements)

    def orders(self, contender: Contender) -> dict[str, tuple[Order, ...]]:
        """Return the orders of a candidate."""
        return schedule(self.timeline, contender.asked, contender.style)

    def rank(self, outcome: Outcome) -> tuple[float, ...]:
        """Return a sort key under the goal: the smaller, the better the plan."""
        host = self._host_bytes
        written = outcome.moved_bytes["ssd_write"]
        if not self._goal.allows(written, outcome.step_ms):
            return (3.0, float(written), outcome.step_ms)
        if host is not None and outcome.host_peak_bytes > host:
            return (2.0, float(outcome.host_peak_bytes), outcome.step_ms)
        easy = self._easy_bytes
        is_easy = easy is None or outcome.peak_bytes <= easy
        if self._most_bytes is not None:
            over = outcome.peak_bytes > self._most_bytes
            if over:
                return (1.0, float(outcome.peak_bytes), outcome.step_ms)
            if not is_easy:
                return (0.5, float(outcome.peak_bytes), outcome.step_ms)
            return (0.0, outcome.step_ms, float(outcome.peak_bytes))
        fitting = self._fitting_bytes
        if fitting is not None and outcome.peak_bytes > fitting:
            return (1.5, float(outcome.peak_bytes), outcome.step_ms)
        if not is_easy:
            return (1.25, float(outcome.peak_bytes), outcome.step_ms)
        if outcome.step_ms > self._most_ms:
            return (1.0, outcome.step_ms, float(outcome.peak_bytes))
        return (0.0, float(outcome.peak_bytes), outcome.step_ms)


def kept_but(
    timeline: Timeline, regions: Sequence[Region]
) -> dict[str, tuple[Order, ...]]:
    """Make orders under which nothing moves, and these regions run again."""
    keep = placed_by(timeline, lambda *_: Placement.KEEP)
    return schedule(timeline, with_regions(timeline, keep, regions))


def choose(
    profile: Profile,
    goal: Goal,
    search_marks: int = SEARCH_MARKS,
    outcomes: Outcomes | None = None,
) -> Plan:
    """Search for the best plan.

    Args:
        profile: an observed step.
        goal: what a plan is judged by.
        search_marks: how long to search; `QUICK_MARKS` for a plan to begin with.
        outcomes: of this profile, where it is searched with more than once.

    Raises:
        ConfigError: no plan stays within the memory that the goal allows; the text
            names the least reachable peak, and where it is.
    """
    check_rest(profile, goal)
    timeline = Timeline(profile) if outcomes is None else outcomes.timeline
    judge = Judge(timeline, goal, search_marks, outcomes)
    best: Contender | None = None
    kept: Contender | None = None
    suffices = False
    for fixed in fixed_policies(timeline):
        found = judge.judge(fixed.placements, fixed.style, fixed.name)
        best = found if best is None or found.rank < best.rank else best
        kept = found if fixed.name == "keep-all" else kept
        if goal.is_by_memory and best.policy == "keep-all" and best.rank[0] == 0.0:
            # Regions that always run again may still store what attention gives.
            suffices = not judge.always
            if suffices:
                break
    if best is None:
        raise ConfigError("the profile holds no items; observe a training step")
    if not suffices:
        best = _search(judge, best)
    if best.rank[0] == 1.0 and goal.is_by_memory:
        if kept is None or not goal.holds_all(judge.keep.peak_bytes):
            shortage = Shortage(timeline, goal, judge.keep, judge.least)
            raise shortage.error(judge.short_of_host)
        best = kept
    orders = judge.orders(best)
    return Plan(
        orders=orders, policy=best.policy, prediction=simulate(timeline, orders)
    )


def _search(judge: Judge, best: Contender) -> Contender:
    for finds in (_search_regions, _search_prices, _search_waits, _search_items):
        best = finds(judge, best)
    return best


def _search_waits(judge: Judge, best: Contender) -> Contender:
    """Have compute wait for what leaves. On a slow link nothing would leave in time,
    and the last tensors of a forward would stay, for none that comes after them makes
    the window full: a plan that is slow is better than none. Where the host is late,
    the waits cost nothing."""
    timeline = judge.timeline
    window = largest_bytes(timeline)
    move = placed_by(timeline, lambda *_: away(timeline))
    placements = [best.asked, with_tail_kept(timeline, move, window)]
    if best.rank[0] != 0.0:
        # Of fixed policies the two largest stay, one of which could leave as well.
        again = with_regions(timeline, move, spread(timeline))
        placements.append(with_tail_kept(timeline, again, window))
        placements += [fixed.placements for fixed in fixed_policies(timeline)]
    for each in placements:
        for style in (
            Style(window_bytes=WINDOW_LARGEST * window, late=Late.WAIT),
            Style(window_bytes=window, late=Late.DRAIN),
        ):
            found = judge.judge(each, style, "waits for copies out")
            best = min(best, found, key=lambda one: one.rank)
    return best


def options(timeline: Timeline, item: Item) -> tuple[Placement, ...]:
    """Return everything that may happen to an item."""
    if item.held:
        return (Placement.KEEP,)
    found = [Placement.KEEP, away(timeline)]
    has_ssd = timeline.profile.links.ssd_write is not None
    if has_ssd and found[-1] is Placement.OFFLOAD:
        found.append(Placement.OFFLOAD_SSD)
    if item.recipe is not None:
        found.append(Placement.RECOMPUTE)
    return tuple(found)


# -- prices ---------------------------------------------------------------------------


def may_run_again(timeline: Timeline) -> bool:
    """Return whether plans may have regions run again."""
    return all(run.ms < NEVER_MS for run in timeline.runs)


def _search_regions(judge: Judge, best: Contender) -> Contender:
    """Bisect how many regions run again where nothing moves."""
    timeline = judge.timeline
    if judge.always or not may_run_again(timeline):
        return best
    keep = placed_by(timeline, lambda *_: Placement.KEEP)
    even, yielding = spread(timeline), by_yield(timeline)
    ways: list[tuple[list[Region], list[Region]]]
    ways = [(even, []), (as_they_run(timeline), [])]
    for order, storing in [*ways, (even, yielding)] if yielding else ways:
        low, high = 0, len(order)
        while high - low > 1:
            number = (low + high) // 2
            stored = [each for each in storing if each in order[:number]]
            placements = with_regions(timeline, keep, order[:number], stored)
            found = judge.judge(placements, Style(), f"{number} regions run again")
            best = min(best, found, key=lambda each: each.rank)
            if (found.rank[0] == 0.0) == judge.is_by_memory:
                high = number
            else:
                low = number
    return best


def _search_prices(judge: Judge, best: Contender) -> Contender:
    """Bisect the price of a byte to where the goal is just met: for each price of the
    host's time, and then for each share of the link's with the best of these."""
    prices = Prices(
        judge.timeline, with_runs=not judge.always and may_run_again(judge.timeline)
    )
    left_marks = (1.0 - PRICED_SHARE) * judge.left_marks
    hosts = [_bisected(judge, prices, at, left_marks) for at in prices.hosts]
    host, _ = min(hosts, key=lambda each: each[1].rank)
    links = [
        _bisected(judge, prices, at, left_marks) for at in prices.links_beside(host)
    ]
    found = (contender for _, contender in [*hosts, *links])
    return min([best, *found], key=lambda each: each.rank)


def _bisected(
    judge: Judge, prices: Prices, at: Priced, left_marks: float
) -> tuple[Priced, Contender]:
    """Return the best plan at any price of a byte, of those that bisecting it meets."""
    low, high, best = 0, prices.ends.level, None
    while best is None or (high - low > 1 and judge.left_marks > left_marks):
        level = (low + high) // 2
        placements = prices.placements(at._replace(level=level))
        found = judge.judge(placements, Style(), "search")
        if best is None or found.rank < best.rank:
            best = found
        if (found.rank[0] == 0.0) == judge.is_by_memory:
            high = level
        else:
            low = level
    return at, best


# -- single items ---------------------------------------------------------------------


Change = tuple[tuple[str, int, Placement], ...]
"""New placements of items that change together: kind, number, placement."""


def _search_items(judge: Judge, best: Contender) -> Contender:
    """Move single items, and single regions, while that helps."""
    improved = True
    while improved and not judge.is_spent:
        improved = False
        placements = _placed(orders := judge.orders(best))
        changes = _changes(judge.timeline, best, orders, placements)
        for change in changes:
            if judge.is_spent:
                break
            if not _alters(placements, change):
                continue
            changed = _changed(placements, change)
            found = judge.judge(changed, best.style, "search")
            if found.rank < best.rank:
                best, improved = found, True
                placements = _placed(judge.orders(best))
    return best


def _placed(orders: Mapping[str, Sequence[Order]]) -> Placements:
    return {kind: [one.placement for one in own] for kind, own in orders.items()}


def _alters(placements: Placements, change: Change) -> bool:
    return any(placements[kind][number] is not to for kind, number, to in change)


def _changed(placements: Placements, change: Change) -> Placements:
    changed = {kind: list(placed) for kind, placed in placements.items()}
    for kind, number, placement in change:
        changed[kind][number] = placement
    return changed


def _changes(
    timeline: Timeline,
    best: Contender,
    orders: Mapping[str, Sequence[Order]],
    placements: Placements,
) -> list[Change]:
    """Return changes that may help: what is alive at the peak, largest first, then what
    waits or costs a rebuild. An item of a region that runs again changes with all
    others."""
    alive = Simulation(timeline, orders).run(detailed=True).live_at_peak
    size = {item: timeline.items[item].num_bytes for item in alive}
    items = sorted(alive, key=lambda item: (-size[item], item))
    waiting = sorted(best.outcome.waits, key=lambda i: (-best.outcome.waits[i], i))
    changes: list[Change] = []
    seen: set[tuple[str, int]] = set()
    seen_regions: set[tuple[str, int]] = set()
    for item in [*items, *waiting, *range(len(timeline.items))]:
        lane = timeline.lane_of[item]
        kind, number = timeline.profile.lanes[lane], item - timeline.first_id[lane]
        if (kind, number) in seen:
            continue
        seen.add((kind, number))
        region = kind, timeline.items[item].region
        if region[1] >= 0 and region not in seen_regions:
            seen_regions.add(region)
            changes.append(_turned(timeline, placements, region))
            changes.extend(_stored(timeline, placements, region))
        if placements[kind][number] is Placement.RERUN:
            continue
        changes.extend(
            ((kind, number, placement),)
            for placement in reversed(options(timeline, timeline.items[item]))
        )
    return changes


def _turned(
    timeline: Timeline, placements: Placements, region: tuple[str, int]
) -> Change:
    """Return the placements with one region turned from kept to re-run, or back."""
    kind = region[0]
    members = [
        number
        for number, item in enumerate(timeline.profile.kinds[kind])
        if is_made_again(kind, item, (region,))
    ]
    again = any(placements[kind][number] is Placement.RERUN for number in members)
    to = Placement.KEEP if again else Placement.RERUN
    return tuple((kind, number, to) for number in members)


def _stored(
    timeline: Timeline, placements: Placements, region: tuple[str, int]
) -> list[Change]:
    """Return the placements with what attention gives in a region that runs again
    stored, or not any more."""
    kind, numbers = region[0], part_items(timeline, region)
    if not numbers or region not in running(timeline, placements):
        return []
    again = any(placements[kind][number] is Placement.RERUN for number in numbers)
    ways = (away(timeline), Placement.KEEP) if again else (Placement.RERUN,)
    return [tuple((kind, number, to) for number in numbers) for to in ways]

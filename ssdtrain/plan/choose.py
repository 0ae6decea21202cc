"""Which placement each item gets: least peak at an overhead, or least time in memory.

[Note: the search]
Small instances are enumerated. Large ones are searched in two steps: first prices of a
byte, at each of which every tensor takes what is cheapest (prices.py), and a family of
numbers (how many recipes, cheapest per byte first; how many bytes of the tail stay; how
many bytes may be on their way out; whether compute may wait; where each tensor costs
time (of the host, or events), how many bytes of the smallest stay; how many regions run
again, and how many of those store what attention gives) by pattern search, then single
items that are alive at the peak or make compute wait. The pattern search starts from
the best of two sets: as much made again as the limit allows and the rest moved for
nothing, which is best for long steps, and a coarse grid. Every plan is scheduled just
in time and simulated; the fixed policies are candidates too, so the result cannot lose
to them. No clock is read: the same profile gives the same plan on every rank.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
from ssdtrain.plan.helpers import Helpers
from ssdtrain.plan.outcomes import Outcomes, Placed
from ssdtrain.plan.placement import Placement, Placements
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.prices import Priced, Prices
from ssdtrain.plan.profile import Item, Profile
from ssdtrain.plan.regions import (
    GOLDEN,
    Region,
    by_yield,
    is_made_again,
    part_items,
    parts,
    running,
    spread,
    with_regions,
)
from ssdtrain.plan.replays import NEVER_MS
from ssdtrain.plan.schedule import Late, Style, schedule
from ssdtrain.plan.shortage import Shortage, check_rest
from ssdtrain.plan.simulate import Outcome, Run, simulate
from ssdtrain.plan.timeline import Timeline

T = TypeVar("T")
ENUMERATED = 800
"""At most so many combinations of placements are enumerated."""
SEARCH_MARKS = 1_200_000
"""Marks simulated in a search, over all its candidates (one to four seconds)."""
LONG_MARKS = 6_000_000
"""Of a search for which there is time (five to ten seconds, two with helpers): a stock
model of 28 layers, whose simulation has 1,500 marks, is then searched as thoroughly as
blocks are by the usual one."""
QUICK_MARKS = 120_000
"""Of a search on the training thread: two tenths of a second."""
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


class Family(NamedTuple):
    """A plan as seven positions on the axes of `_Grid`."""

    recipes: int
    tail: int
    window: int
    late: int
    small: int = 0
    regions: int = 0
    stored: int = 0


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
        self.keep = Run(timeline, kept_but(timeline, self.always)).run()
        self.least = self.keep
        """Of all candidates that host memory has room for, the least peak."""
        self.short_of_host = False
        """Whether a candidate would fit if there were more host memory."""
        self._most_bytes = goal.most_bytes(timeline.profile)
        self._fitting_bytes = goal.fitting_bytes(timeline.profile)
        self._easy_bytes = goal.easy_bytes(timeline.profile)
        allowed = goal.overhead
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
        best = _enumerated(judge, best) or _search(judge, best)
    if best.rank[0] == 1.0 and goal.is_by_memory:
        best = _drained(judge, best)
    if best.rank[0] == 1.0 and goal.is_by_memory:
        if kept is None or not goal.holds_all(judge.keep.peak_bytes):
            shortage = Shortage(timeline, goal, judge.keep, judge.least)
            raise shortage.error(judge.short_of_host)
        best = kept
    orders = judge.orders(best)
    return Plan(
        orders=orders, policy=best.policy, prediction=simulate(timeline, orders)
    )


def _drained(judge: Judge, best: Contender) -> Contender:
    """Return the best plan that waits for whatever leaves. On a slow link the last
    tensors of a forward would stay, for none that comes behind them makes the window
    full; a plan that is slow is better than none."""
    timeline = judge.timeline
    style = Style(window_bytes=largest_bytes(timeline), late=Late.DRAIN)
    placements = [fixed.placements for fixed in fixed_policies(timeline)]
    for each in (best.asked, *placements):
        found = judge.judge(each, style, "waits for each copy out")
        if found.rank < best.rank:
            best = found
    return best


def _search(judge: Judge, best: Contender) -> Contender:
    """Search each family and single items briefly, then go on from the best: the coarse
    grid of a long step alone would use up the search."""
    total = judge.left_marks
    families = _Families(judge)
    outcomes = judge.outcomes
    with Helpers(families.work, outcomes.take, outcomes.num_helpers) as helpers:
        families.helpers = helpers
        for marks in (min(QUICK_MARKS, total), total - QUICK_MARKS):
            judge.left_marks = marks
            if marks > 0:
                best = _search_family(judge, best, families)
                best = _search_items(judge, best, helpers)
    return best


# -- small instances ------------------------------------------------------------------


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


def styles(timeline: Timeline) -> tuple[Style, ...]:
    """Return how strictly memory is freed: never wait, or a window of two largest."""
    window = WINDOW_LARGEST * largest_bytes(timeline)
    return (
        Style(),
        Style(late=Late.WAIT),
        Style(window_bytes=window),
        Style(window_bytes=window, late=Late.WAIT),
        Style(window_bytes=window // 2, late=Late.WAIT),
    )


def assignments(timeline: Timeline) -> Iterator[Placements]:
    """Return every combination of placements."""
    kinds = timeline.profile.kinds
    slots = [(kind, item) for kind, items in kinds.items() for item in items]
    for combination in itertools.product(*(options(timeline, i) for _, i in slots)):
        placements: dict[str, list[Placement]] = {kind: [] for kind in kinds}
        for (kind, _), placement in zip(slots, combination, strict=True):
            placements[kind].append(placement)
        yield placements


def _enumerated(judge: Judge, best: Contender) -> Contender | None:
    timeline = judge.timeline
    count = len(styles(timeline))
    for items in timeline.profile.kinds.values():
        for item in items:
            count *= len(options(timeline, item))
            if count > ENUMERATED:
                return None
    for placements in assignments(timeline):
        for style in styles(timeline):
            found = judge.judge(placements, style, "search")
            if found.rank < best.rank:
                best = found
    return best


# -- the family -----------------------------------------------------------------------

RECIPE_PARTS = 4
TAIL_PARTS = 24
SMALL_PARTS = 6
STORED_PARTS = 8
"""Steps between no region and all that store what attention gives."""
WINDOW_PARTS = 168
WINDOW_STEP = 4
"""A step is 10 % of the window, a part 3 %: the search goes to the edge by parts."""
STEPS = (9, 3, 1)
NUM_STARTS = 3
NUM_EDGES = 12
SEARCH_PARTS = 12
"""A search has so many: three for prices, two for as much made again as the limit
allows, one for a coarse grid, one for its edges, two for the pattern search, three for
single items."""


class _Grid:
    """What the positions of a `Family` mean."""

    def __init__(self, timeline: Timeline, always: Sequence[Region]) -> None:
        self._timeline = timeline
        self._target = away(timeline)
        self._recipes = _by_price(timeline)
        self._is_alone = timeline.profile.host_ms <= 0.0
        """Whether the device has no host."""
        lanes = max(1, len(timeline.profile.lanes))
        self._lane_bytes = timeline.profile.saved_bytes // lanes
        self._largest = largest_bytes(timeline)
        self._least_bytes = _thresholds(timeline)
        small = len(self._least_bytes) - 1
        # Those that run again in any case do so at all of its positions.
        self._regions = [frozenset(always)] if always else parts(timeline)
        if not may_run_again(timeline):
            self._regions = [frozenset(always)]
        self._yielding = by_yield(timeline)
        self.ends = Family(
            len(self._recipes),
            TAIL_PARTS,
            WINDOW_PARTS,
            1,
            small,
            len(self._regions) - 1,
            min(STORED_PARTS, len(self._yielding)),
        )

    def placements(self, family: Family) -> Placements:
        """Choose regions, recipes, then the tail; everything else leaves."""
        chosen = self._regions[family.regions]
        rebuilt = set().union(*self._recipes[: family.recipes])
        least_bytes = self._least_bytes[family.small]

        def place(kind: str, number: int, item: Item) -> Placement:
            is_rebuilt = (kind, number) in rebuilt
            # Events are the price of a move; the host has to do with both.
            if item.num_bytes < least_bytes and not (is_rebuilt and self._is_alone):
                return Placement.KEEP
            return Placement.RECOMPUTE if is_rebuilt else self._target

        placements = placed_by(self._timeline, place)
        storing = [region for region in self._yielding if region in chosen]
        if self.ends.stored:
            count = round(len(storing) * family.stored / self.ends.stored)
            storing = storing[:count]
        placements = with_regions(self._timeline, placements, chosen, storing)
        tail = int(self._lane_bytes * (family.tail / TAIL_PARTS) ** 2)
        return with_tail_kept(self._timeline, placements, tail)

    def style(self, family: Family) -> Style:
        """Return the style at a position of its axis; the last one has no window."""
        late = Late.WAIT if family.late else Late.KEEP
        if family.window >= WINDOW_PARTS:
            return Style(late=late)
        most = max(2.0, self._lane_bytes / max(1, self._largest))
        times = most ** (family.window / (WINDOW_PARTS - 1))
        window = int(self._largest * max(1.0, times))
        return Style(window_bytes=window, late=late)


def may_run_again(timeline: Timeline) -> bool:
    """Return whether plans may have regions run again."""
    return all(run.ms < NEVER_MS for run in timeline.runs)


def _thresholds(timeline: Timeline) -> list[int]:
    """Return sizes below which tensors stay: 0, and where they are parts of all
    bytes."""
    found = [0]
    if timeline.profile.host_ms <= 0.0 and timeline.profile.links.event_ms <= 0.0:
        return found
    sizes = sorted(item.num_bytes for item in timeline.items)
    total, below = sum(sizes), 0
    for size in sizes:
        below += size
        if below * SMALL_PARTS >= len(found) * total and size > found[-1]:
            found.append(size)
    return found


def _by_price(timeline: Timeline) -> list[set[tuple[str, int]]]:
    """Return recipes, cheapest per byte first; items alike in parts of a quarter
    each."""
    alike: dict[tuple[str, int], list[tuple[str, int]]] = {}
    cost: dict[tuple[str, int], float] = {}
    for kind, items in timeline.profile.kinds.items():
        for number, item in enumerate(items):
            if item.recipe is None:
                continue
            group = item.recipe, item.num_bytes
            alike.setdefault(group, []).append((kind, number))
            own = (items[each] for each in item.inputs)
            made_ms = sum(each.made_ms for each in own if each.owner == number)
            cost[group] = cost.get(group, 0.0) + item.recipe_ms + made_ms
    prices = {g: cost[g] / max(1, g[1] * len(members)) for g, members in alike.items()}
    parts: list[set[tuple[str, int]]] = []
    for group in sorted(alike, key=lambda g: (prices[g], g)):
        members = alike[group]
        size = -(-len(members) // RECIPE_PARTS)
        parts.extend(
            set(members[at : at + size]) for at in range(0, len(members), size)
        )
    return parts


class _Edge(NamedTuple):
    """All that `_to_the_edge` tries from here."""

    start: "Point"
    axis: str


Point = Family | Priced
"""A plan as positions on axes."""


class _Families:
    """The candidates by positions that were judged, each once; what comes next is given
    to helpers: [Note: helpers]."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._grid = _Grid(judge.timeline, judge.always)
        self._prices = Prices(
            judge.timeline,
            with_runs=not judge.always and may_run_again(judge.timeline),
        )
        self.ends = self._grid.ends
        self.priced_ends = self._prices.ends
        self.seen: dict[Point, Contender] = {}
        self.helpers: Helpers | None = None
        """None in a helper, and before there are any."""

    def value(self, at: Point) -> Contender:
        """Return the candidate, judged."""
        found = self.seen.get(at)
        if found is None:
            if self.helpers is not None:
                self.helpers.settle(at)
            if isinstance(at, Priced):
                placements, style = self._prices.placements(at), Style()
            else:
                placements, style = self._grid.placements(at), self._grid.style(at)
            found = self._judge.judge(placements, style, "search")
            self.seen[at] = found
        return found

    def work(self, task: Point | _Edge | Placed) -> list[tuple[Placed, Outcome]]:
        """Do a task in a helper; return what was simulated."""
        self.helpers = None
        if isinstance(task, Placed):
            self._judge.outcomes.simulate(task)
        elif isinstance(task, _Edge):
            if isinstance(task.start, Priced):
                _to_the_price(task.start, self, is_by_memory=self._judge.is_by_memory)
            else:
                _to_the_edge(task.start, task.axis, self)
        else:
            self.value(task)
        return self._judge.outcomes.news()

    def expect(self, tasks: Iterable[Point | _Edge]) -> None:
        """Tell helpers what will be asked for next."""
        if self.helpers is not None:
            unseen = (task for task in tasks if task not in self.seen)
            self.helpers.ask(itertools.islice(unseen, self.helpers.num_tasks))


def _search_family(judge: Judge, best: Contender, families: _Families) -> Contender:
    value, ends = families.value, families.ends
    part = judge.left_marks // SEARCH_PARTS
    _start_from_prices(judge, families, 9 * part)
    _start_from_free_copies(judge, families, 7 * part)
    _start_from_grid(judge, families, 6 * part, 5 * part)
    reach = 3 * part
    for at in _starts(families.seen):
        for step in STEPS:
            while judge.left_marks > reach:
                beside = _near(at, step, ends)
                families.expect(beside)
                better = min((value(near).rank, near) for near in beside)
                if better[0] >= value(at).rank:
                    break
                at = better[1]
        if judge.left_marks > reach:
            families.expect([_Edge(at, "tail")])
            _to_the_edge(at, "window", families)
            _to_the_edge(at, "tail", families)
    return min([best, *families.seen.values()], key=lambda candidate: candidate.rank)


def _starts(seen: Mapping[Point, Contender]) -> list[Family]:
    """Return the best, each with another number of regions: what lies beside the best
    is found from there."""
    found: dict[int, Family] = {}
    for _, family in sorted(
        (contender.rank, family)
        for family, contender in seen.items()
        if isinstance(family, Family)
    ):
        found.setdefault(family.regions, family)
    return list(found.values())[:NUM_STARTS]


def _start_from_grid(
    judge: Judge, families: _Families, grid_reach: int, reach: int
) -> None:
    """Try a coarse grid, and the limit's edge from its best points."""
    ends = families.ends
    starts = [
        Family(recipes, tail, window, late, small, regions, stored)
        for small in (0, ends.small)[: 1 + (ends.small > 0)]
        for window in (9 * WINDOW_STEP, ends.window, 20 * WINDOW_STEP)
        for late in (1, 0)
        for tail in (0, 9, 6, 12)
        for regions in _spread(ends.regions, 3)
        for stored in sorted({0, ends.stored})
        for recipes in _spread(ends.recipes, 4)
    ]
    tried = []
    # A long step has time for a part of them: any beginning lies evenly in the grid.
    starts = [*_evenly(starts)]
    for at, start in enumerate(starts):
        if judge.left_marks <= grid_reach:
            break
        families.expect(starts[at + 1 :])
        tried.append((families.value(start).rank, start))
    best = [start for _, start in sorted(tried)[:NUM_EDGES]]
    for at, start in enumerate(best):
        if judge.left_marks <= reach:
            break
        families.expect(_Edge(each, "window") for each in best[at + 1 :])
        _to_the_edge(start, "window", families)


def _start_from_prices(judge: Judge, families: _Families, reach: int) -> None:
    """Try prices of a byte around that at which the limit is met: [Note: prices]."""
    ends = families.priced_ends
    starts = [
        Priced(0, host, links)
        for links in range(ends.links + 1)
        for host in range(ends.host + 1)
    ]
    for at, start in enumerate(starts):
        if judge.left_marks <= reach:
            break
        families.expect(_Edge(each, "level") for each in starts[at + 1 :])
        _to_the_price(start, families, is_by_memory=judge.is_by_memory)


def _to_the_price(start: Priced, families: _Families, *, is_by_memory: bool) -> None:
    if families.helpers is not None:
        families.helpers.settle(_Edge(start, "level"))
    low, high = 0, families.priced_ends.level
    while high - low > 1:
        middle = (low + high) // 2
        fits = families.value(start._replace(level=middle)).rank[0] == 0.0
        if fits == is_by_memory:
            high = middle
        else:
            low = middle


def _start_from_free_copies(judge: Judge, families: _Families, reach: int) -> None:
    """Try numbers of recipes and regions, each with the tail at which the limit is met.

    Where steps are long, most is gained by rebuilding up to the limit and by moving, of
    the rest, what the links carry meanwhile for nothing.
    """
    ends = families.ends
    hopeless: list[tuple[int, int, int, int]] = []
    # Where there is a host, the grid tries which stay.
    is_alone = judge.timeline.profile.host_ms <= 0.0
    smalls = range(ends.small + 1) if is_alone else (0,)
    numbers = [
        (recipes, regions, stored, small)
        for recipes in _spread(ends.recipes, 8)
        for small in smalls
        for regions in _spread(ends.regions, 8)
        for stored in sorted({0, ends.stored if regions else 0})
    ]
    numbers = [*_evenly(numbers)]

    def is_hopeless(recipes: int, regions: int, stored: int, small: int) -> bool:
        # What takes too long with less made again takes too long with more, and what
        # needs too much memory with more needs too much with less.
        return any(
            (recipes <= r and regions <= g and stored >= a and small >= s)
            if judge.is_by_memory
            else (recipes >= r and regions >= g and stored <= a and small <= s)
            for r, g, a, s in hopeless
        )

    def start(recipes: int, regions: int, stored: int, small: int) -> Family:
        return Family(recipes, 0, ends.window, 0, small, regions, stored)

    for at, place in enumerate(numbers):
        if judge.left_marks <= reach:
            break
        if is_hopeless(*place):
            continue
        rest = (each for each in numbers[at + 1 :] if not is_hopeless(*each))
        families.expect(_Edge(start(*each), "tail") for each in rest)
        if not _to_the_edge(start(*place), "tail", families):
            hopeless.append(place)


def _spread(end: int, parts: int) -> list[int]:
    """Return positions on an axis, evenly from its beginning to its end."""
    return sorted({at * end // parts for at in range(parts + 1)})


def _evenly(starts: Sequence[T]) -> Iterator[T]:
    """Reorder: any beginning of it lies evenly in the whole."""
    for at in sorted(range(len(starts)), key=lambda at: (at * GOLDEN) % 1.0):
        yield starts[at]


def _to_the_edge(start: Family, axis: str, families: _Families) -> bool:
    """Try the positions of an axis around the one at which the limit is met.

    A narrower window and a longer tail cost time and save memory, or the other way:
    between one that is within the limit and one that is not, the best lies at the edge.

    Returns:
        Whether any is within the limit.
    """

    def fits(position: int) -> bool:
        return families.value(start._replace(**{axis: position})).rank[0] == 0.0

    if families.helpers is not None:
        families.helpers.settle(_Edge(start, axis))
    low, high = 0, int(getattr(families.ends, axis))
    low_fits, high_fits = fits(low), fits(high)
    if low_fits == high_fits:
        return low_fits
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle) == low_fits:
            low = middle
        else:
            high = middle
    return True


def _near(at: Family, step: int, ends: Family) -> list[Family]:
    found = {at}
    for axis in range(len(ends)):
        for sign in (-step, step):
            values = list(at)
            wide = WINDOW_STEP if Family._fields[axis] == "window" else 1
            values[axis] = min(max(values[axis] + wide * sign, 0), ends[axis])
            found.add(Family(*values))
    for sign in (-step, step):  # more made again, and less moved; or the other way
        recipes = min(max(at.recipes + sign, 0), ends.recipes)
        tail = min(max(at.tail + sign, 0), ends.tail)
        found.add(at._replace(recipes=recipes, tail=tail))
    return sorted(found)


# -- single items ---------------------------------------------------------------------


Change = tuple[tuple[str, int, Placement], ...]
"""New placements of items that change together: kind, number, placement."""


def _search_items(judge: Judge, best: Contender, helpers: Helpers) -> Contender:
    """Move single items, and single regions, while that helps."""
    improved = True
    while improved and not judge.is_spent:
        improved = False
        placements = _placed(orders := judge.orders(best))
        changes = _changes(judge.timeline, best, orders, placements)
        for at, change in enumerate(changes):
            if judge.is_spent:
                break
            if not _alters(placements, change):
                continue
            coming = (one for one in changes[at + 1 :] if _alters(placements, one))
            style = best.style
            helpers.ask(
                judge.outcomes.placed(judge.asked(_changed(placements, one)), style)
                for one in itertools.islice(coming, helpers.num_tasks)
            )
            changed = _changed(placements, change)
            helpers.settle(judge.outcomes.placed(judge.asked(changed), style))
            found = judge.judge(changed, style, "search")
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
    alive = Run(timeline, orders).run(detailed=True).live_at_peak
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

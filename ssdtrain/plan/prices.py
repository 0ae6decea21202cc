"""Placements by the price of a byte: each tensor takes what is cheapest at that price.

[Note: prices]
A byte on the device is given a price (ms a byte), and so is the host's time (the part
of it that compute waits for). Each tensor then stays, is rebuilt or leaves, whichever
costs less; the link carries what is worth most of what it has time for until backward;
and a region runs again where that is cheaper than all that would become of its tensors.
One number, the price, so leads from keeping everything to the least memory, and at none
of its values does one tensor pay more for a byte than another one would. Layers are the
same, and all would turn at one price: each has another one (`SPREAD`), so that they
turn one by one, evenly over the step.
(tests/ssdtrain/plan/test_prices.py)
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ssdtrain.plan.baselines import away
from ssdtrain.plan.placement import Placement, Placements
from ssdtrain.plan.profile import HostCost, HostCosts, Item
from ssdtrain.plan.regions import GOLDEN, Region, spread, with_regions
from ssdtrain.plan.timeline import NEVER, Timeline

LEVELS = 1024
"""Prices of a byte that are tried."""
HOST_PARTS = (0.1, 0.0, 0.5, 0.05, 0.2)
"""Of the host's time, that compute waits for."""
LINK_PARTS = (0.9, 0.8, 1.0, 1.1)
"""Of what the link carries before backward, that is planned with."""
SPREAD = 0.15
"""By which the prices of layers differ."""
TIMES = 32
"""Parts of the time before backward, each with room on the link."""
NUM_EVENTS = 2
"""Of a tensor that leaves, that compute loses time by where events have a price."""


class Priced(NamedTuple):
    """A plan as three positions on the axes of `Prices`."""

    level: int
    host: int
    links: int


class Leaving(NamedTuple):
    """What the link carries."""

    moved: set[int]
    room_ms: float
    """What a byte on the link is worth: the best of what it does not carry."""


class Prices:
    """What the positions of a `Priced` mean."""

    def __init__(self, timeline: Timeline, *, with_runs: bool) -> None:
        """with_runs: whether regions may run again."""
        profile = timeline.profile
        self._timeline = timeline
        self._target = away(timeline)
        costs = profile.host_costs
        is_host = self._target is Placement.OFFLOAD
        self._move_ms = NUM_EVENTS * profile.links.event_ms
        self._move_host_ms = _beyond(costs.host if is_host else costs.ssd, costs.keep)
        self._region_host_ms = costs.region_ms
        self._host_parts = HOST_PARTS if profile.host_ms > 0.0 else (0.0,)
        self._lanes = [
            _Lane(timeline, kind, self._target, with_runs=with_runs)
            for kind in profile.kinds
            if kind in profile.lanes
        ]
        self._levels = self._prices()
        self.ends = Priced(
            len(self._levels) - 1, len(self._host_parts) - 1, len(LINK_PARTS) - 1
        )

    def _prices(self) -> list[float]:
        """Return prices of a byte, from 0 to one at which nothing stays."""
        line, costs = self._timeline, self._timeline.profile.host_costs
        again = [
            (item.recipe_ms + _rebuild_host_ms(item, costs), item.num_bytes)
            for item in line.items
            if item.recipe is not None
        ]
        again += [
            (run.ms, sum(line.own_bytes[item] for item in own))
            for run, own in zip(line.runs, line.members, strict=True)
        ]
        moving_ms = self._move_ms + self._move_host_ms
        moves = [(moving_ms, item.num_bytes) for item in line.items]
        low = min(_per_byte([*again, *moves]), default=1.0) / 4
        dear = _per_byte(again) or _per_byte(moves)
        large = max((item.num_bytes for item in line.items), default=0)
        high = 4 * max([*dear, *_per_byte([(moving_ms, large)])], default=1.0)
        steps = range(LEVELS + 1)
        return [0.0, *(low * (high / low) ** (step / LEVELS) for step in steps)]

    @property
    def hosts(self) -> list[Priced]:
        """One for each price of the host's time."""
        return [Priced(0, host, 0) for host in range(self.ends.host + 1)]

    def links_beside(self, at: Priced) -> list[Priced]:
        """One for each other share of the link's time."""
        every = range(self.ends.links + 1)
        return [at._replace(links=links) for links in every if links != at.links]

    def placements(self, at: Priced) -> Placements:
        """Choose what costs least at these prices."""
        placed = {
            kind: [Placement.KEEP] * len(items)
            for kind, items in self._timeline.profile.kinds.items()
        }
        for lane in self._lanes:
            placed[lane.kind] = self._of(lane, placed, at)
        return placed

    def _of(self, lane: "_Lane", kept: Placements, at: Priced) -> list[Placement]:
        price, host = self._levels[at.level], self._host_parts[at.host]
        move_ms = self._move_ms + host * self._move_host_ms
        stays_ms = [price * weight for weight in lane.weight]
        placed, cost_ms = [Placement.KEEP] * len(stays_ms), stays_ms.copy()
        for number, device_ms, host_ms in lane.rebuilds:
            served_ms = sum(stays_ms[each] for each in lane.serving[number])
            rebuilt_ms = device_ms + host * host_ms + served_ms
            if rebuilt_ms < stays_ms[number]:
                placed[number] = Placement.RECOMPUTE
                cost_ms[number] = rebuilt_ms
        leaving = lane.leaving(placed, cost_ms, move_ms, LINK_PARTS[at.links])
        for number in leaving.moved:
            cost_ms[number] = min(
                cost_ms[number],
                move_ms + leaving.room_ms * lane.items[number].num_bytes,
            )
        again, storing = self._again(lane, cost_ms, price, host)
        if again:
            before = {**kept, lane.kind: placed}
            placed = [*with_regions(self._timeline, before, again, storing)[lane.kind]]
            leaving = lane.leaving(
                placed, cost_ms, move_ms, LINK_PARTS[at.links], again
            )
        for number in leaving.moved:
            placed[number] = self._target
        return placed

    def _again(
        self,
        lane: "_Lane",
        cost_ms: Sequence[float],
        price: float,
        host: float,
    ) -> tuple[set[Region], set[Region]]:
        """Choose regions that run again, and those of them that store what attention
        gives."""
        found: tuple[set[Region], set[Region]] = set(), set()
        for number, run in enumerate(lane.runs):
            again_ms = run.ms + host * (run.host_ms + self._region_host_ms)
            again_ms += sum(price * lane.weight[each] for each in lane.inputs[number])
            parts = [each for part in run.parts for each in part.items]
            stored_ms = sum(price * lane.weight[each] for each in parts)
            saved_ms = sum(part.ms for part in run.parts) - stored_ms
            own_ms = sum(cost_ms[each] for each in lane.members[number])
            if again_ms - max(0.0, saved_ms) < own_ms:
                found[0].add((lane.kind, number))
                if saved_ms > 0.0:
                    found[1].add((lane.kind, number))
        return found


class _Lane:
    """The first lane of a kind, in numbers."""

    def __init__(
        self, line: Timeline, kind: str, target: Placement, *, with_runs: bool
    ) -> None:
        profile = line.profile
        lane = profile.lanes.index(kind)
        first = line.first_id[lane]
        self.kind = kind
        self.items = profile.kinds[kind]
        self.runs = profile.regions.get(kind, ()) if with_runs else ()
        count = len(self.runs)
        order = [number for of, number in spread(line) if of == kind]
        turns = {number: turn / len(order) for turn, number in enumerate(order)}
        self.weight: list[float] = []
        """Bytes on the device, more or less of them by layer."""
        self.members: list[list[int]] = [[] for _ in range(count)]
        """Of each region, those that autograd saves where it does not run again."""
        self.inputs: list[list[int]] = [[] for _ in range(count)]
        """Of each region, those that are there for its re-run."""
        self.serving: dict[int, list[int]] = {}
        """Those that are there for a recipe."""
        for number, item in enumerate(self.items):
            region = max(item.region, item.serves)
            turn = turns.get(region, (number * GOLDEN) % 1.0)
            own_bytes = line.own_bytes[first + number]
            self.weight.append(own_bytes * (1.0 + SPREAD * (0.5 - turn)))
            if item.recipe is not None and not item.held:
                self.serving.setdefault(number, [])
            if item.owner >= 0:
                self.serving.setdefault(item.owner, []).append(number)
            elif 0 <= item.region < count:
                self.members[item.region].append(number)
            elif 0 <= item.serves < count:
                self.inputs[item.serves].append(number)
        self.rebuilds = [
            (
                number,
                self.items[number].recipe_ms
                + sum(self.items[each].made_ms for each in own),
                _rebuild_host_ms(self.items[number], profile.host_costs),
            )
            for number, own in self.serving.items()
        ]
        """Items with a recipe, and the device's and the host's time for them."""
        links = profile.links
        curve = links.d2h if target is Placement.OFFLOAD else links.ssd_write
        rate = (curve or links.d2h).bytes_per_second / 1e3
        starts_ms, ends_ms = _starts(line, lane)
        part_ms = max(ends_ms, 1e-9) / TIMES
        self._room_bytes = rate * part_ms
        self._time_of = [
            min(TIMES - 1, int(starts_ms.get(first + number, 0.0) / part_ms))
            for number in range(len(self.items))
        ]
        self._may_leave = [
            line.own_bytes[first + number] > 0 and first + number in starts_ms
            for number in range(len(self.items))
        ]

    def leaving(
        self,
        placed: Sequence[Placement],
        cost_ms: Sequence[float],
        move_ms: float,
        part: float,
        again: Collection[Region] = (),
    ) -> Leaving:
        """Choose what is worth most of what the link carries before backward.

        Args:
            placed: what becomes of the items otherwise.
            cost_ms: what that costs.
            move_ms: what it costs to move one.
            part: of the link's time that is used.
            again: regions that run again.
        """
        worth = {
            number: (cost_ms[number] - move_ms) / item.num_bytes
            for number, item in enumerate(self.items)
            if self._may_leave[number]
            and placed[number] is not Placement.RERUN
            and cost_ms[number] > move_ms
            and (item.owner < 0 or placed[item.owner] is Placement.RECOMPUTE)
            and (item.serves < 0 or (self.kind, item.serves) in again)
        }
        room = [part * self._room_bytes] * TIMES
        found: set[int] = set()
        for number in sorted(worth, key=lambda number: (-worth[number], number)):
            left, at = float(self.items[number].num_bytes), self._time_of[number]
            if sum(room[at:]) < left:
                continue
            found.add(number)
            while left > 0.0 and at < TIMES:
                taken = min(left, room[at])
                room[at] -= taken
                left -= taken
                at += 1
        left_ms = [
            cost_ms[number] / self.items[number].num_bytes
            for number in worth
            if number not in found
        ]
        return Leaving(found, max(left_ms, default=0.0))


def _per_byte(ways: Iterable[tuple[float, int]]) -> list[float]:
    """Return the prices of ways to free so many bytes for so many ms."""
    return [ms / num_bytes for ms, num_bytes in ways if ms > 0.0 and num_bytes]


def _beyond(cost: HostCost, kept: HostCost) -> float:
    """Return the host's time for a tensor beyond that for one that stays."""
    ms = cost.pack_ms + cost.use_ms + cost.load_ms
    return max(0.0, ms - kept.pack_ms - kept.use_ms - kept.load_ms)


def _rebuild_host_ms(item: Item, costs: HostCosts) -> float:
    """Return the host's time for a rebuild beyond that for a tensor that stays."""
    ms = _beyond(costs.rebuild, costs.keep)
    return max(ms, ms + item.recipe_host_ms - costs.rebuild.use_ms)


def _starts(line: Timeline, lane: int) -> tuple[dict[int, float], float]:
    """Return when each item of a lane is saved, from its first one on, and when the
    first is asked for."""
    now, starts, begun = 0.0, dict[int, float](), False
    ends = line.lane_uses[lane][0] if line.lane_uses[lane] else NEVER
    for mark, item in enumerate(line.item_of_mark):
        if mark == ends:
            break
        if line.lane_of[item] == lane and line.is_pack[mark]:
            begun = True
            starts[item] = now
        if begun:
            now += line.length_ms[mark]
    return starts, now

"""When to release and when to fetch, given what leaves: just in time.

[Note: just in time]
A release waits for a copy, so it stands at the first mark by which the copy has
probably ended, or earlier where the bytes on their way out would exceed a window (then
compute waits: time for memory). A load stands as late as the link allows, counted back
from the last use to the first, because what is loaded too early is the peak of
backward. An item that would be back before it is gone is kept instead.

[Note: together]
Each time compute records an event or waits for one it loses microseconds
(`Links.event_ms`). Where that has a price, releases that are due one after the other
stand at one mark, where compute waits once, and loads for uses near each other are a
batch, which starts as early as the first of them needs. Both hold memory longer than
needed, `Links.batch_share` of what a step saves at most; and neither makes compute
wait: what is late anyway goes by itself.
(tests/ssdtrain/plan/test_together.py)
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from ssdtrain.plan.placement import AWAY_PLACEMENTS, Placement, Placements
from ssdtrain.plan.plan import Order
from ssdtrain.plan.timeline import NEVER, Timeline

MAX_PASSES = 4


LATE_SHARE, LATE_QUEUE_SHARE, LATE_MS = 0.08, 0.03, 0.2
"""How much later than predicted a transfer may end without a wait: of its own time, of
the time for which its link has been busy (transfers follow one another, and each that
takes longer than predicted delays those after it), and in any case."""


class Late(Enum):
    """What becomes of an item that the link cannot bring back before its use."""

    KEEP = auto()
    """It stays on the device."""
    WAIT = auto()
    """It leaves all the same, and compute waits for it."""
    DRAIN = auto()
    """The same; and what is on its way out in forward has left when more comes to stay:
    after the last tensor that leaves no other one makes the window full."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How strictly memory is freed."""

    window_bytes: int | None = None
    """Most bytes on their way out in forward; None: releases never wait."""
    late: Late = Late.KEEP
    """What becomes of an item that the link cannot move in time."""


class _Pass(NamedTuple):
    """Marks of release and load by item, and items that had better stay."""

    release: dict[int, int]
    load: dict[int, int]
    stay: set[int]
    batch: dict[int, int]
    """`Order.load_batch` by item, where it is not 0."""


def schedule(
    timeline: Timeline, placements: Placements, style: Style | None = None
) -> dict[str, tuple[Order, ...]]:
    """Make orders for these placements; some that cannot pay become KEEP."""
    style = style or Style()
    current = {kind: list(placed) for kind, placed in placements.items()}
    for _ in range(MAX_PASSES + 1):
        found = _Scheduler(timeline, current, style).run()
        if not _keep(timeline, current, found.stay):
            break
    return _orders(timeline, current, found)


def _keep(
    timeline: Timeline, placements: Mapping[str, list[Placement]], stay: set[int]
) -> bool:
    for item in stay:
        lane = timeline.lane_of[item]
        kind = timeline.profile.lanes[lane]
        placements[kind][item - timeline.first_id[lane]] = Placement.KEEP
    return bool(stay)


def _orders(
    timeline: Timeline, placements: Mapping[str, Sequence[Placement]], found: _Pass
) -> dict[str, tuple[Order, ...]]:
    """Merge the orders of a kind, which hold for all its lanes: late releases, early
    loads."""
    moments: dict[tuple[str, int], tuple[int, int, int]] = {}
    for item, mark in found.release.items():
        lane = timeline.lane_of[item]
        place = timeline.profile.lanes[lane], item - timeline.first_id[lane]
        if placements[place[0]][place[1]] not in AWAY_PLACEMENTS:
            continue
        after, load_at = mark - timeline.pack_mark[item], found.load[item]
        if place in moments:
            after = max(after, moments[place][0])
            load_at = min(load_at, moments[place][1])
        moments[place] = max(after, 0), load_at, found.batch.get(item, 0)
    orders: dict[str, tuple[Order, ...]] = {}
    for kind in timeline.profile.kinds:
        own = [
            timeline.resting_order(kind, number, placement)
            for number, placement in enumerate(placements[kind])
        ]
        for (of, number), (after, load_at, batch) in moments.items():
            if of == kind:
                own[number] = replace(
                    own[number],
                    release_after=after,
                    load_at=load_at,
                    load_batch=batch,
                )
        orders[kind] = tuple(own)
    return orders


class _Leavers:
    """Items on their way out in forward, in the order of their copies."""

    def __init__(self, line: Timeline, window: int | None, batch_bytes: int) -> None:
        self._line = line
        self._window = window
        self._batch_bytes = batch_bytes
        self._leaving: deque[tuple[int, float, float]] = deque()
        """Items, when they are copied, and when they probably are."""
        self._ready: list[int] = []
        """Those that have left."""
        self._ready_bytes = 0
        self.num_bytes = 0
        """Of all of them."""

    def add(self, item: int, copied_ms: float, probably_ms: float) -> None:
        """A copy has been started."""
        self._leaving.append((item, copied_ms, probably_ms))
        self.num_bytes += self._line.items[item].num_bytes

    def release(self, mark: int, now: float, coming: int) -> tuple[float, list[int]]:
        """Return what is released at this mark, where `coming` bytes more leave, and
        the time, later than `now` if compute waits."""
        line, window = self._line, self._window
        packs, gone = line.is_pack[mark], list[int]()
        if not self._ready and not (self._leaving and self._leaving[0][2] <= now):
            if not packs or window is None or self.num_bytes + coming <= window:
                return now, gone  # nothing has left, and nothing has to
        ends = mark + 1 == line.num_marks or not line.is_pack[mark + 1]
        while self._ready or self._leaving:
            self._take_ready(now)
            full = window is not None and self.num_bytes + coming > window
            if packs and full and not self._ready:
                now = max(now, self._leaving[0][1])
                self._is_ready(self._leaving.popleft()[0])
            elif not self._ready or not (
                full or ends or self._ready_bytes >= self._batch_bytes
            ):
                break
            gone += self._ready
            self.num_bytes -= self._ready_bytes
            self._ready, self._ready_bytes = [], 0
        return now, gone

    def _take_ready(self, now: float) -> None:
        while self._leaving and self._leaving[0][2] <= now:
            self._is_ready(self._leaving.popleft()[0])

    def _is_ready(self, item: int) -> None:
        self._ready.append(item)
        self._ready_bytes += self._line.items[item].num_bytes


class _Scheduler:
    """One pass over the step, forwards for the releases and back for the loads."""

    def __init__(self, line: Timeline, placements: Placements, style: Style) -> None:
        self._line = line
        self._style = style
        self._placed = line.placements_by_id(placements)
        layout = line.layout(self._placed)
        self._first = layout.residency.first
        self._moves = [
            placement in AWAY_PLACEMENTS and saved and at != NEVER
            for placement, saved, at in zip(
                self._placed, layout.is_saved, self._first, strict=True
            )
        ]
        """Whether each item leaves."""
        self._slowdown = 1.0 + line.profile.links.copy_slowdown
        self._start_ms: list[float] = []
        self._use_ms: list[list[float]] = []
        """When the uses of each lane start."""
        self._copied: dict[int, float] = {}
        self._release: dict[int, int] = {}
        self._batch: dict[int, int] = {}
        self._num_batches = 0
        links = line.profile.links
        share = links.batch_share if links.event_ms > 0.0 else 0.0
        self._batch_bytes = int(share * line.profile.saved_bytes)
        """Most bytes of a batch; 0: there are none."""
        self._rebuilds_at: dict[int, float] = {}
        for item, placement in enumerate(self._placed):
            if placement is Placement.RECOMPUTE and self._first[item] != NEVER:
                at = self._first[item]
                cost = line.items[item].recipe_ms
                self._rebuilds_at[at] = self._rebuilds_at.get(at, 0.0) + cost
        for item in line.made:
            at = line.pack_mark[item]
            if at != NEVER and layout.is_saved[item]:
                cost = line.items[item].made_ms
                self._rebuilds_at[at] = self._rebuilds_at.get(at, 0.0) + cost
        for run, at in layout.run_marks.items():
            cost = line.runs[run].ms - line.stored_parts(run, self._placed).ms
            self._rebuilds_at[at] = self._rebuilds_at.get(at, 0.0) + cost

    def run(self) -> _Pass:
        """Schedule releases and loads."""
        self._forwards()
        load = self._backwards()
        stay = set()
        for item in self._copied:
            release = self._release.get(item)
            uses = self._line.lane_uses[self._line.lane_of[item]]
            if (
                release is None
                or item not in load
                or uses[load[item]] <= release
                or self._first[item] <= release
            ):
                stay.add(item)
        gone = {i: mark for i, mark in self._release.items() if i not in stay}
        return _Pass(gone, {i: load[i] for i in gone}, stay, self._batch)

    def _forwards(self) -> None:
        line, style = self._line, self._style
        leavers = _Leavers(line, style.window_bytes, self._batch_bytes)
        now, link_free, busy_since = line.profile.head_ms, 0.0, 0.0
        rebuilds_at, start_ms = self._rebuilds_at, self._start_ms
        slowdown = self._slowdown
        drains = style.late is Late.DRAIN
        marks = zip(line.item_of_mark, line.is_pack, line.length_ms, strict=True)
        for mark, (item, packs, length_ms) in enumerate(marks):
            moves = packs and self._moves[item]
            if leavers.num_bytes:
                stays = drains and packs and self._placed[item] is Placement.KEEP
                coming = line.items[item].num_bytes if moves or stays else 0
                now, gone = leavers.release(mark, now, coming)
                for each in gone:
                    self._release[each] = mark
            start_ms.append(now)
            if moves:
                if link_free < now:
                    link_free = busy_since = now
                link_free += line.copy_out_ms[item]
                self._copied[item] = link_free
                queued_ms = (link_free - busy_since) * LATE_QUEUE_SHARE
                own_ms = line.copy_out_ms[item] * LATE_SHARE
                late_ms = own_ms + queued_ms + LATE_MS
                leavers.add(item, link_free, link_free + late_ms)
            if mark in rebuilds_at:
                now += rebuilds_at[mark]
            now += length_ms * slowdown

    def _backwards(self) -> dict[int, int]:
        """Return the use of its lane at which each load starts, by item."""
        moved = [i for i in self._release if self._first[i] != NEVER]
        moved.sort(key=lambda item: (self._first[item], -item))
        self._use_ms = [
            [self._start_ms[use] for use in uses] for uses in self._line.lane_uses
        ]
        found: dict[int, int] = {}
        link_free = 0.0
        for batch, latest in self._batches(moved):
            link_free = self._load(batch, latest, link_free, found)
        return found

    def _batches(self, moved: Sequence[int]) -> list[tuple[list[int], float]]:
        """Return loads in the order of their first uses by batch, with when each batch
        has to start at the latest."""
        line = self._line
        found: list[tuple[list[int], float]] = []
        batch: list[int] = []
        num_bytes, time_ms, next_start = 0, 0.0, float("inf")
        for item in reversed(moved):
            own_bytes, lane = line.items[item].num_bytes, line.lane_of[item]
            fits = num_bytes + own_bytes <= self._batch_bytes
            if batch and not (fits and lane == line.lane_of[batch[0]]):
                found.append((batch, next_start - time_ms))
                next_start, batch = next_start - time_ms, []
                num_bytes, time_ms = 0, 0.0
            batch = [item, *batch]
            num_bytes += own_bytes
            time_ms += line.copy_in_ms[item] * (1.0 + LATE_SHARE)
            use_ms = self._start_ms[self._first[item]] - LATE_MS
            next_start = min(use_ms, next_start)
        if batch:
            found.append((batch, next_start - time_ms))
        return found[::-1]

    def _load(
        self,
        batch: list[int],
        latest_ms: float,
        link_free: float,
        found: dict[int, int],
    ) -> float:
        """Put the loads of a batch into `found` and return when the link is free after
        them. One that would come late is none: each goes by itself."""
        line = self._line
        use_ms = self._use_ms[line.lane_of[batch[0]]]
        # A lane's first use is the first moment at which it can load at all.
        start = max(latest_ms, use_ms[0], link_free)
        end = start + sum([line.copy_in_ms[item] for item in batch])
        if end > self._start_ms[self._first[batch[0]]]:
            if len(batch) > 1:
                for item in batch:
                    link_free = self._load([item], latest_ms, link_free, found)
                return link_free
            if self._style.late is Late.KEEP:
                return link_free
        at = max(0, bisect_right(use_ms, start) - 1)  # the last use by then
        self._num_batches += 1
        for item in batch:
            found[item] = at
            if self._batch_bytes:
                self._batch[item] = self._num_batches
        return end

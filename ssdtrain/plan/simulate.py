"""From a plan to a step time, a memory curve and the load of each link.

Does what the executor does, tensor by tensor, on the queues of one rank (`queues.py`).
Compute waits where the cache would make it wait: at a release for the copy out, at a
first use for the copy in, and at a pack for room in pinned memory. An operator ends no
sooner than the host has launched it, and what ssdtrain does for each tensor is work of
the host (`HostCosts`).
Memory at a mark is what the operators up to the next mark need besides
the saved tensors (measured) plus the saved tensors alive (by the plan).

[Note: steady state]
One step is simulated, and many follow. What a step writes has to be written within a
step, or the queue grows, step by step, until pinned memory is full and compute waits.
So no step is shorter than its writes, nor, as far as both share one bandwidth, than
its writes and reads. For all other transfers compute waits anyway. Nor is any step
shorter than the host's own time: its lead over the device is used up once.

[Note: the host's queue]
`Mark.host_ms` is what the program itself takes the host; in an observed profile
`Mark.ms` already holds the device's waits for that (in one made on paper it does not).
So only what comes on top shows, and where the host is ahead of the device it does not
show at all. A plan that keeps everything installs no hooks, and a call of a layer in
which a plan does nothing runs without them ([Note: quiet calls] in cache/quiet.py): so
a plan that does all it does in a few layers costs the host less than one that does as
much, a little in each.
(tests/ssdtrain/plan/test_simulate.py, test_host.py)
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ssdtrain.curves import Curve
from ssdtrain.plan.placement import AGAIN_PLACEMENTS, AWAY_PLACEMENTS, Placement
from ssdtrain.plan.plan import (
    LinkLoad,
    Order,
    PredictedStall,
    Prediction,
    Wait,
    batches,
)
from ssdtrain.plan.profile import HostCost, HostCosts
from ssdtrain.plan.timeline import NEVER, Timeline
from ssdtrain.queues import Rank

MAX_STALLS = 10
# Share of the pinned memory that reads of the SSD may fill ahead of the copies in.
READ_AHEAD = 0.5


@dataclass
class Outcome:
    """One simulated step."""

    step_ms: float = 0.0
    peak_bytes: int = 0
    peak_mark: int = 0
    stall_ms: float = 0.0
    recompute_ms: float = 0.0
    host_peak_bytes: int = 0
    host_wait_ms: float = 0.0
    """Waits for the host; not in `stall_ms`."""
    waits: dict[int, float] = field(default_factory=dict)
    """Waits for transfers in ms by item."""
    causes: dict[tuple[Wait, int], float] = field(default_factory=dict)
    """All waits in ms by cause and item."""
    busy_ms: dict[str, float] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    curve: list[tuple[float, int]] = field(default_factory=list)
    """(ms since the step's start, most bytes on the device) for each mark."""
    live_at_peak: frozenset[int] = frozenset()
    """Saved tensors on the device at the peak."""


class Simulation:
    """One simulation. `orders` holds every item of every lane kind."""

    def __init__(
        self, timeline: Timeline, orders: Mapping[str, Sequence[Order]]
    ) -> None:
        self._line = timeline
        links = timeline.profile.links
        self._links = links
        flat = [order for kind in timeline.profile.lanes for order in orders[kind]]
        self._orders = flat
        self.placed = [order.placement for order in flat]
        self._layout = timeline.layout(self.placed)
        marks = timeline.num_marks
        self._used_at: list[list[int]] = [[] for _ in range(marks)]
        self._freed_at: list[list[int]] = [[] for _ in range(marks + 1)]
        self._ended_at: list[list[int]] = [[] for _ in range(marks)]
        self._loads_at: list[list[int]] = [[] for _ in range(marks)]
        self._batch_of: dict[int, tuple[int, ...]] = {}
        """Items whose copy in compute has not waited for, and those of its batch."""
        self._index()
        profile = timeline.profile
        self._rank = rank = Rank(links)
        self._compute = rank.compute
        self._compute.hold(profile.head_ms)
        self._lead_ms = profile.host_lead_ms
        self._is_hosted = profile.host_ms > 0.0
        rank.host = profile.head_host_ms - self._lead_ms
        hooked = any(placement is not Placement.KEEP for placement in self.placed)
        costs = profile.host_costs if hooked else HostCosts()
        self._host_costs = _costs_by_placement(costs)
        self._is_hooked: Sequence[bool] = ()
        """Of each mark, whether hooks are called there."""
        self._handled_ms: Sequence[float] = ()
        """Host time for tensors that are no marks, at each mark."""
        # Of a tensor that is no mark, one way: it is as likely packed as used.
        handle_ms = (costs.keep.pack_ms + costs.keep.use_ms) / 2
        if self._is_hosted:
            self._is_hooked = self.hooked_marks()
            self._handled_ms = [handle_ms * count for count in timeline.num_handles]
        self._region_ms = self._region_calls(costs.region_ms)
        self._other_bytes = timeline.other_with_small(self._layout.run_marks)
        self._live: dict[int, int] = {}
        self._live_bytes = 0
        self._framed: dict[int, int] = {}
        """Items that the model's forward still holds: bytes that count for its sake,
        which are none while the record holds them as well."""
        self._let_go_at: dict[int, list[int]] = {}
        self._has_run: set[int] = set()
        """Region calls whose forward has run again."""
        self._mark = 0
        self._leaving: deque[tuple[int, int]] = deque()
        self._away: set[int] = set()
        self._copied: dict[int, float] = {}
        self._written: dict[int, float] = {}
        self._arrival: dict[int, float] = {}
        self._draining: list[tuple[float, int]] = []
        """Writes on their way, and their bytes in pinned memory."""
        self._draining_bytes = 0
        self._host_bytes = 0
        self._backward_ms: dict[int, float] = {}
        self.outcome = Outcome()

    def _index(self) -> None:
        """At which mark each item is used, loaded and freed."""
        line = self._line
        first, last, ended = self._layout.residency
        is_saved = self._layout.is_saved
        for item, order in enumerate(self._orders):
            if not is_saved[item]:
                continue
            uses = line.lane_uses[line.lane_of[item]]
            if first[item] == NEVER:  # it goes with its graph
                for last_use in uses[-1:]:
                    self._freed_at[last_use + 1].append(item)
                continue
            self._used_at[first[item]].append(item)
            if item in ended:
                self._ended_at[last[item]].append(item)
            else:
                self._freed_at[last[item] + 1].append(item)
            if self.placed[item] in AWAY_PLACEMENTS:
                at = order.load_at
                if at < len(uses) and uses[at] < first[item]:
                    self._loads_at[uses[at]].append(item)
        for loads in self._loads_at:
            loads.sort(reverse=True)

    def hooked_marks(self) -> list[bool]:
        """Return of each mark whether its layer has something to do, or it has none."""
        line, placed = self._line, self.placed
        if not line.runs or not line.profile.has_quiet_calls:
            return [True] * line.num_marks
        loud = {NEVER, *line.ends_of_backward}
        marks = [mark for mark, loads in enumerate(self._loads_at) if loads]
        for item, placement in enumerate(placed):
            if placement is Placement.KEEP:
                continue
            loud.add(line.saved_in[item])
            if placement is Placement.RECOMPUTE:
                base = line.first_id[line.lane_of[item]]
                own = line.items[item].inputs
                loud.update([line.saved_in[base + number] for number in own])
            elif self._orders[item].release_after > 0:
                marks.append(line.pack_mark[item] + self._orders[item].release_after)
        runs = line.run_of_mark
        loud.update([runs[mark] for mark in marks if mark < len(runs)])
        return [run in loud for run in runs]

    def run(self, detailed: bool = False) -> Outcome:
        """Simulate the step."""
        line, outcome, rank = self._line, self.outcome, self._rank
        compute, hosted = self._compute, self._is_hosted
        let_go_at, leaving = self._let_go_at, self._leaving
        # What most marks have none of is asked for here: there are a million of them.
        marks = zip(
            *(line.item_of_mark, line.is_pack, self._other_bytes, line.length_ms),
            *(self._freed_at, self._used_at, self._ended_at, self._loads_at),
            strict=False,  # what goes behind the last mark nobody sees
        )
        for mark, row in enumerate(marks):
            item, packs, other_bytes, length_ms, freed, used, ended, loads = row
            self._mark = mark
            if freed or mark in let_go_at or (leaving and leaving[0][0] <= mark):
                self._let_go(mark, freed)
            if hosted:
                self._host_acts(item, mark, used, packs=packs)
            if packs:
                self._pack(item, mark)
            else:
                self._backward_ms.setdefault(line.lane_of[item], compute.free)
            if used or ended or loads:
                self._ask(used, ended, loads)
            memory = self._live_bytes + other_bytes
            if detailed or memory > outcome.peak_bytes:
                self._measure(mark, memory, detailed)
            rank.run(0.0, length_ms)
            if hosted:
                self._wait_for_host(item, line.host_ms[mark])
        self._finish()
        return outcome

    def _let_go(self, mark: int, freed: Sequence[int]) -> None:
        """What goes before the program acts."""
        for item in self._let_go_at.pop(mark, ()):
            self._live_bytes -= self._framed.pop(item)
        for item in freed:
            self._free(item)
        self._release_due(mark)

    def _ask(
        self, used: Sequence[int], ended: Sequence[int], loads: Sequence[int]
    ) -> None:
        """What an operator asks for, and what is loaded for those after it."""
        for item in used if len(used) < 2 else sorted(used, key=self._by_depth):
            self._use(item)
        for item in ended:
            self._free(item)
        if loads:
            self._load_due(loads)

    def _region_calls(self, region_ms: float) -> dict[int, float]:
        """Return the host time of region calls that will run again, by the mark of the
        first tensor that each saves."""
        found: dict[int, float] = {}
        if region_ms <= 0.0:
            return found
        for run in self._layout.run_marks:
            at = self._line.first_pack[run]
            found[at] = found.get(at, 0.0) + region_ms
        return found

    def _host_acts(
        self, item: int, mark: int, used: Sequence[int], *, packs: bool
    ) -> None:
        """Add what the hooks do at this mark to the host's work."""
        if not self._is_hooked[mark]:
            return
        cost, host = self._host_costs[self.placed[item]], self._rank.host
        if mark in self._region_ms:
            host += self._region_ms[mark]
        if not packs:
            host += cost.use_ms
        elif self._layout.is_saved[item]:
            host += cost.pack_ms
        for each in used:
            if self.placed[each] is Placement.RECOMPUTE:
                if each != item:
                    host += cost.use_ms  # for the sake of another
                host += self._rebuild_host_ms(each)
        self._rank.host = host + self._handled_ms[mark]

    def _rebuild_host_ms(self, item: int) -> float:
        """Return by how much its first use is more expensive than `HostCosts` says."""
        own_ms = self._line.items[item].recipe_host_ms
        if not own_ms:
            return 0.0
        return own_ms - self._host_costs[Placement.RECOMPUTE].use_ms

    def _wait_for_host(self, item: int, host_ms: float) -> None:
        """Wait until the host has launched the operator."""
        self._rank.host += host_ms
        if self._compute.free >= self._rank.host:
            return
        wait_ms = self._rank.wait_for_host()
        if wait_ms > 0.0:
            self.outcome.host_wait_ms += wait_ms
            self._blame(Wait.HOST, item, wait_ms)

    def _measure(self, mark: int, memory: int, detailed: bool) -> None:
        outcome = self.outcome
        if memory > outcome.peak_bytes:
            outcome.peak_bytes, outcome.peak_mark = memory, mark
            if detailed:
                outcome.live_at_peak = frozenset(self._live)
        if detailed:
            outcome.curve.append((self._compute.free, memory))

    def _blame(self, cause: Wait, item: int, wait_ms: float) -> None:
        key = cause, item
        self.outcome.causes[key] = self.outcome.causes.get(key, 0.0) + wait_ms

    def _finish(self) -> None:
        rank = self._rank
        queues = {"d2h": rank.d2h, "h2d": rank.h2d}
        queues |= {"ssd_write": rank.ssd_write, "ssd_read": rank.ssd_read}
        for name, queue in queues.items():
            self.outcome.busy_ms[name] = queue.busy
            self.outcome.moved_bytes[name] = queue.num_bytes
        tail_ms = self._line.profile.tail_ms
        if self._written:
            # See [Note: steady state].
            last = max(self._written, key=self._written.__getitem__)
            reading_ms = self._links.ssd_duplex_slowdown * rank.ssd_read.alone
            busy_ms = rank.ssd_write.alone + reading_ms - tail_ms
            self._wait(busy_ms, last, Wait.SSD)
        if self._line.num_marks:
            rank.host += self._lead_ms - tail_ms
            tail_host_ms = self._line.profile.tail_host_ms
            if self._is_hosted:
                self._wait_for_host(self._line.item_of_mark[-1], tail_host_ms)
        self.outcome.step_ms = self._compute.free + tail_ms

    def _by_depth(self, item: int) -> tuple[int, int]:
        """Sort bytes before re-runs before rebuilds, and inputs of recipes before
        their results."""
        placement = self.placed[item]
        if placement is Placement.RERUN:
            return 1, item
        return 2 * (placement is Placement.RECOMPUTE), item

    def _wait(self, until_ms: float, item: int, cause: Wait) -> None:
        stall = self._compute.hold(until_ms)
        if stall > 0.0:
            self.outcome.stall_ms += stall
            self._blame(cause, item, stall)
            self.outcome.waits[item] = self.outcome.waits.get(item, 0.0) + stall

    def _alive(self, item: int) -> None:
        self._live[item] = own_bytes = self._line.own_bytes[item]
        self._live_bytes += own_bytes

    def _drop(self, item: int) -> None:
        own_bytes = self._live.pop(item, 0)
        if self._framed.get(item) == 0:
            self._framed[item] = own_bytes
        else:
            self._live_bytes -= own_bytes

    def _frame(self, item: int, until: int, is_saved: bool) -> None:
        own_bytes = 0 if is_saved else self._line.own_bytes[item]
        self._framed[item] = own_bytes
        self._live_bytes += own_bytes
        self._let_go_at.setdefault(until, []).append(item)

    def _free(self, item: int) -> None:
        self._drop(item)
        if self.placed[item] is Placement.OFFLOAD:
            self._host_bytes -= self._line.items[item].num_bytes

    def _pack(self, item: int, mark: int) -> None:
        line, placement = self._line, self.placed[item]
        is_saved = self._layout.is_saved[item] and placement not in AGAIN_PLACEMENTS
        frame_marks = line.items[item].frame_marks
        if placement is Placement.RERUN:  # it stays until its forward has ended
            frame_marks = max(frame_marks, line.forward_end[line.run_of[item]] - mark)
        if frame_marks:
            self._frame(item, mark + frame_marks, is_saved)
        if not is_saved:
            return
        self._alive(item)
        self._make(item)
        if placement not in AWAY_PLACEMENTS:
            return
        num_bytes = line.items[item].num_bytes
        staged = self._is_staged(item)
        if staged:
            self._take_staging(item, num_bytes)
        self._pass_event()
        copied = self._rank.out.serve(
            self._compute.free, line.copy_out_ms[item], num_bytes
        )
        self._copied[item] = copied
        if self._links.ssd_direct:
            self._written[item] = copied
        elif staged:
            written = self._rank.ssd_write.serve(
                copied, _ms(self._links.ssd_write, num_bytes), num_bytes
            )
            self._written[item] = written
            heappush(self._draining, (written, num_bytes))
            self._draining_bytes += num_bytes
        else:
            self._host_bytes += num_bytes
        resting = self._host_bytes + self._draining_bytes
        self.outcome.host_peak_bytes = max(self.outcome.host_peak_bytes, resting)
        after = self._orders[item].release_after
        if after > 0:
            self._leaving.append((mark + after, item))

    def _make(self, item: int) -> None:
        """Make what a recipe stores in a smaller dtype."""
        made_ms = self._line.items[item].made_ms
        if made_ms > 0.0:
            self._rank.run(0.0, made_ms)
            self.outcome.recompute_ms += made_ms

    def _is_staged(self, item: int) -> bool:
        """Return whether it goes to the SSD through pinned memory."""
        to_ssd = self.placed[item] is Placement.OFFLOAD_SSD
        return to_ssd and not self._links.ssd_direct

    def _take_staging(self, item: int, num_bytes: int) -> None:
        """Wait until writes have freed enough pinned memory."""
        cap = self._line.profile.host_bytes
        while self._draining and self._draining[0][0] <= self._compute.free:
            self._drained()
        while cap is not None and self._draining:
            if self._host_bytes + self._draining_bytes + num_bytes <= cap:
                return
            self._wait(self._drained(), item, Wait.STAGING)
            rank = self._rank
            rank.host = max(rank.host, self._compute.free)  # it is the host that waits

    def _drained(self) -> float:
        """End the write that ends next; return when that is."""
        written, num_bytes = heappop(self._draining)
        self._draining_bytes -= num_bytes
        return written

    def _pass_event(self) -> None:
        """An event stands in the way of compute: see `Links.event_ms`."""
        if self._links.event_ms > 0.0:
            self._compute.serve(0.0, self._links.event_ms)

    def _release_due(self, mark: int) -> None:
        waits = False  # once for all of a mark
        while self._leaving and self._leaving[0][0] <= mark:
            _, item = self._leaving.popleft()
            if item not in self._live:
                continue  # it died
            if item in self._arrival:
                continue  # backward was faster: forwarded
            if not waits:
                waits = True
                self._pass_event()
            self._wait(self._copied[item], item, Wait.COPY_OUT)
            self._drop(item)
            self._away.add(item)

    def _load_due(self, loads: Sequence[int]) -> None:
        orders = self._orders
        for batch in batches(loads, lambda item: orders[item].load_batch):
            self._load_batch([item for item in batch if item in self._away])

    def _load_batch(self, batch: Sequence[int]) -> None:
        """Load what compute waits for together."""
        if not batch:
            return
        self._pass_event()
        for item in batch:
            self._load(item)
        arrival = self._arrival[batch[-1]]
        for item in batch:
            self._arrival[item] = arrival
            self._batch_of[item] = tuple(batch)

    def _load(self, item: int) -> None:
        num_bytes = self._line.items[item].num_bytes
        self._rank.host += self._host_costs[self.placed[item]].load_ms
        self._away.discard(item)
        self._alive(item)
        ready = max(self._compute.free, self._copied[item])
        if self._is_staged(item) and self._written[item] <= self._compute.free:
            ready = max(ready, self._read_back(item, num_bytes))
        time_ms = self._line.copy_in_ms[item]
        self._arrival[item] = self._rank.into.serve(ready, time_ms, num_bytes)

    def _read_back(self, item: int, num_bytes: int) -> float:
        curve = self._links.ssd_read
        cap = self._line.profile.host_bytes
        lane = self._line.lane_of[item]
        start = max(
            self._written[item], self._backward_ms.get(lane, self._compute.free)
        )
        if cap is not None and curve is not None:
            ahead = READ_AHEAD * cap / curve.bytes_per_second * 1e3
            start = max(start, self._compute.free - ahead)
        return self._rank.ssd_read.serve(start, _ms(curve, num_bytes), num_bytes)

    def _run_again(self, number: int) -> None:
        """Run the forward of a region, once."""
        if number in self._has_run:
            return
        self._has_run.add(number)
        run, outcome = self._line.runs[number], self.outcome
        stored = self._line.stored_parts(number, self.placed)
        run_ms = run.ms - stored.ms
        # What is stored is alive already.
        memory = self._live_bytes + max(0, run.other_bytes - stored.num_bytes)
        if memory > outcome.peak_bytes:
            outcome.peak_bytes, outcome.peak_mark = memory, self._mark
            outcome.live_at_peak = frozenset([*self._live, *self._line.members[number]])
        self._compute.serve(0.0, run_ms)
        outcome.recompute_ms += run_ms
        if self._is_hosted:
            self._rank.host += run.host_ms

    def _use(self, item: int) -> None:
        placement = self.placed[item]
        if placement is Placement.RERUN:
            self._run_again(self._line.run_of[item])
            self._alive(item)
        elif placement is Placement.RECOMPUTE:
            what = self._line.items[item]
            memory = self._live_bytes + what.recipe_other_bytes
            if memory > self.outcome.peak_bytes:
                self.outcome.peak_bytes, self.outcome.peak_mark = memory, self._mark
                self.outcome.live_at_peak = frozenset([*self._live, item])
            self._alive(item)
            self._compute.serve(0.0, what.recipe_ms)
            self.outcome.recompute_ms += what.recipe_ms
        elif placement in AWAY_PLACEMENTS:
            if item in self._away:
                self._load_batch([item])
            arrival = self._arrival.setdefault(item, 0.0)
            batch = self._batch_of.get(item)
            if batch is not None:
                self._pass_event()
                for each in batch:
                    del self._batch_of[each]
            self._wait(arrival, item, Wait.COPY_IN)


def _costs_by_placement(costs: HostCosts) -> dict[Placement, HostCost]:
    return {
        Placement.KEEP: costs.keep,
        Placement.OFFLOAD: costs.host,
        Placement.OFFLOAD_SSD: costs.ssd,
        Placement.RECOMPUTE: costs.rebuild,
        Placement.RERUN: costs.keep,
    }


def _ms(curve: Curve | None, num_bytes: int) -> float:
    if curve is None:
        raise ValueError(
            "the plan uses the SSD, but the profile has no ssd_write and ssd_read "
            "curves; measure them with `ssdtrain doctor --directory DIR --save FILE`."
        )
    return curve.seconds(num_bytes) * 1e3


def keep_all(timeline: Timeline) -> dict[str, tuple[Order, ...]]:
    """Make orders under which nothing moves."""
    return {
        kind: tuple(
            timeline.resting_order(kind, number, Placement.KEEP)
            for number in range(len(items))
        )
        for kind, items in timeline.profile.kinds.items()
    }


def simulate(timeline: Timeline, orders: Mapping[str, Sequence[Order]]) -> Prediction:
    """Predict a step under these orders."""
    outcome = Simulation(timeline, orders).run(detailed=True)
    keep = Simulation(timeline, keep_all(timeline)).run()
    by_cause: dict[str, float] = {}
    for (cause, _), ms in outcome.causes.items():
        by_cause[cause.value] = by_cause.get(cause.value, 0.0) + ms
    host = {key: ms for key, ms in outcome.causes.items() if key[0] is Wait.HOST}
    moves = {key: ms for key, ms in outcome.causes.items() if key[0] is not Wait.HOST}
    return Prediction(
        step_ms=outcome.step_ms,
        peak_bytes=outcome.peak_bytes,
        stall_ms=outcome.stall_ms,
        recompute_ms=outcome.recompute_ms,
        keep_ms=keep.step_ms,
        keep_peak_bytes=keep.peak_bytes,
        links={
            name: LinkLoad(
                num_bytes=outcome.moved_bytes[name], busy_ms=outcome.busy_ms[name]
            )
            for name in outcome.busy_ms
        },
        stalls=_longest(timeline, moves),
        host_wait_ms=outcome.host_wait_ms,
        host_stalls=_longest(timeline, host),
        waits=by_cause,
        host_peak_bytes=outcome.host_peak_bytes,
        passing_peak_bytes=_passing_peak(timeline, outcome),
    )


def _passing_peak(timeline: Timeline, outcome: Outcome) -> int:
    found, stays = 0, outcome.peak_bytes
    curve = reversed(outcome.curve)
    for (_, memory), other in zip(curve, reversed(timeline.other_bytes), strict=True):
        stays = min(stays, other)
        found = max(found, memory - stays)
    return found


def _longest(
    timeline: Timeline, waits: Mapping[tuple[Wait, int], float]
) -> tuple[PredictedStall, ...]:
    """Sort waits, the longest first."""
    ranked = sorted(waits.items(), key=lambda wait: (-wait[1], wait[0][1]))
    return tuple(
        PredictedStall(
            lane=timeline.lane_of[item],
            item=item - timeline.first_id[timeline.lane_of[item]],
            ms=ms,
            cause=cause,
        )
        for (cause, item), ms in ranked[:MAX_STALLS]
    )

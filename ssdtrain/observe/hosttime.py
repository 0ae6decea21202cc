"""What the hooks cost the host: measured, by what they do to a tensor.

[Note: host time]
The host launches kernels while the device runs earlier ones; a hook that takes longer
than the device is busy leaves it idle. So the planner must know what each action costs
the host here, in this Python on this machine. A `HostMeter` times the hooks of a step
from outside and files each call by the handle that it made or used. What lies between
two calls is the program's own. Before the first plan `host_costs` (hostprobe.py)
times a compiled plan on a small chain of its own; later, steps that follow the plan are
sampled.

[Note: the host's time of a rebuild]
What a recipe takes the host is the recipe's own time, and that of a use around it. In
the observed step a rebuild's hook takes several times as long: it brings inputs back
that the step has moved, and the observer asks the allocator. The recipes of a 1.7B's
norms were believed to take 0.9 ms and its attention 2.3, and plans did without them. So
the recipe alone is timed, and of those of one kind and size the middle counts: one of
them may have waited for memory.
(tests/ssdtrain/observe/test_hosttime.py)
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ssdtrain.cache.ledger import HookSpan, HookSpans
from ssdtrain.cache.moved import MovedHandle, MovedTensor
from ssdtrain.cache.record import RebuiltView, RecordView, part_of
from ssdtrain.cache.savedplaces import PlaceHandle
from ssdtrain.plan.placement import AWAY_PLACEMENTS, Placement
from ssdtrain.plan.profile import HostCost, HostCosts

DEVICE_PERIOD = 17
"""One call of the hooks in so many has its device's time taken, which costs the host
more than most of them do. A prime, so that no place in a layer is passed over."""
OUTLIER = 8.0
"""Times the median: such a call pinned memory, compiled or was interrupted."""
BESIDE = 1.4
"""What a call of a hook costs the host, over its own time. At that alone 25 plans for
short steps were predicted 4.2 % off in the mean on an H200, all but one too short; at
1.4 times, 3.3 %. Steps of a 1.7B whose host bounds them took as long as if hooks were
1.25 to 1.5 times as expensive, on an H200 and an H100. Where the host bounds nothing it
changes no plan."""

Hook = Callable[[Any], Any]


class HostMeter:
    """Times the hooks of one step.

    Args:
        away: placement of an offloaded record that no plan orders.
        now: the host's clock, in ns.
        moment: a moment of the device, for its waits inside the hooks, of one call in
            `DEVICE_PERIOD`; None: these are not asked for.
        module_of: the module of an item of a kind of lane.
        num_rebuilds: re-runs and rebuilds begun so far. A call that makes some has no
            part in what is asked for by `moment`: their time is known, and one re-run,
            taken for those of all the calls between, would be the step.
    """

    def __init__(
        self,
        away: Placement = Placement.OFFLOAD,
        now: Callable[[], int] = time.monotonic_ns,
        moment: Callable[[], Any] | None = None,
        module_of: Callable[[str, int], str] = lambda kind, item: "",
        num_rebuilds: Callable[[], int] = lambda: 0,
    ) -> None:
        self.now = now
        self.num_calls = 0
        """Of the hooks, so far; of these, of `pack` by autograd."""
        self.device_spans = None if moment is None else HookSpans(DEVICE_PERIOD)
        self._moment = moment
        self._num_rebuilds = num_rebuilds
        self._before: Any = None
        """A moment of the device, if this call's are taken."""
        self._module_of = module_of
        self._away = away
        self._spent_ns = 0
        self._entered: int | None = None
        self._excluded_ns = 0
        self._samples: dict[tuple[Placement, str], list[int]] = defaultdict(list)
        self._recipes_ns: dict[tuple[int, int], int] = {}
        """The least of each item's recipe, by lane and number."""
        self._uses_ns: list[int] = []
        """Of uses of what a recipe makes, for which it did not run."""
        self._rebuilds_before = 0
        """When the running call began."""
        self._regions_ns: list[int] = []
        """Of each region call."""

    @property
    def spent_ns(self) -> int:
        """Host time that was ssdtrain's own, so far."""
        return self._spent_ns

    def around(self, pack: Hook, unpack: Hook) -> tuple[Hook, Hook]:
        """Wrap the pack and unpack hooks of a forward in timers."""

        def timed_pack(tensor: Tensor) -> Any:
            if self._entered is not None:  # a recipe stores an input of its own
                return pack(tensor)
            self._enter()
            handle = None
            try:
                handle = pack(tensor)
                return handle
            finally:
                self._leave(handle, "pack")

        def timed_unpack(handle: Any) -> Any:
            if self._entered is not None:
                return unpack(handle)
            self._enter()
            try:
                return unpack(handle)
            finally:
                self._leave(handle, "use")

        return timed_pack, timed_unpack

    def _enter(self) -> None:
        self.num_calls += 1
        self._excluded_ns = 0
        self._rebuilds_before = self._num_rebuilds()
        if self._moment is not None and self.num_calls % DEVICE_PERIOD == 0:
            self._before = self._moment()
        self._entered = self.now()

    def _leave(self, handle: Any, what: str) -> None:
        start, self._entered = self._entered, None
        if start is None:
            return
        took_ns = self.now() - start
        before, self._before = self._before, None
        made_nothing = self._num_rebuilds() == self._rebuilds_before
        if before is not None and self._moment and self.device_spans is not None:
            if made_nothing:
                after, again = self._moment(), self._moment()
                span = HookSpan(self._module(handle), before, after, again)
                self.device_spans.spans.append(span)
        self._spent_ns += took_ns
        own_ns = max(0, took_ns - self._excluded_ns)
        placement = self._placement_of(handle)
        self._samples[placement, what].append(own_ns)
        if placement is Placement.RECOMPUTE and what == "use" and made_nothing:
            self._uses_ns.append(own_ns)

    def exclude(self, start_ns: int) -> None:
        """Exclude the time since `start_ns`, an observer's, from the running hook."""
        if self._entered is not None:
            self._excluded_ns += self.now() - start_ns

    def load(self, start: Callable[[list[Any]], None], batch: list[Any]) -> None:
        """Start prefetches and book their time as the prefetched tensors', not as that
        of the tensor whose hook runs."""
        begun = self.now()
        start(batch)
        took_ns = self.now() - begun
        if self._entered is not None:
            self._excluded_ns += took_ns
        for record in batch:
            own = self._samples[self._way_of(record), "load"]
            own.append(took_ns // len(batch))

    def region_began(self, since_ns: int) -> None:
        """Book the time outside of the hooks since `since_ns`, of `outside_ns`, as the
        beginning of a region call: it is none of the program's."""
        self._regions_ns.append(0)
        self.region_ended(since_ns)

    def region_ended(self, since_ns: int) -> None:
        """The same, as the end of the region call that began last."""
        took_ns = self.outside_ns() - since_ns
        self._spent_ns += took_ns
        if self._regions_ns:
            self._regions_ns[-1] += took_ns

    def outside_ns(self) -> int:
        """Return the host time so far without the hooks', in ns."""
        at = self.now() if self._entered is None else self._entered
        return at - self._spent_ns

    def _placement_of(self, handle: Any) -> Placement:
        handle = part_of(handle)
        if type(handle) is MovedHandle:
            stays = handle.moved.copy is None
            return Placement.KEEP if stays else Placement.OFFLOAD
        if type(handle) is PlaceHandle:
            return Placement.RERUN
        source = getattr(handle, "source", None)
        if isinstance(source, RebuiltView):
            return Placement.RECOMPUTE
        if not isinstance(source, RecordView):
            return Placement.KEEP
        record = source.record
        if record.region is not None:
            return Placement.RERUN
        return Placement.KEEP if record.transfer is None else self._way_of(record)

    def _module(self, handle: Any) -> str:
        """Return the module that saved the tensor; "" if it is no item of a plan."""
        handle = part_of(handle)
        if type(handle) is MovedHandle:
            return self._module_of(handle.moved.lane.kind, handle.row.item)
        source = getattr(handle, "source", None)
        if isinstance(source, RecordView):
            return self._module_of(source.record.lane.kind, source.record.item)
        if isinstance(source, RebuiltView):
            return self._module_of(source.rebuilt.lane.kind, source.rebuilt.item)
        return ""

    def _way_of(self, record: Any) -> Placement:
        """Return which target an offloaded tensor went to."""
        if type(record) is MovedTensor:
            return Placement.OFFLOAD
        cursor = record.lane.cursor
        if cursor is None or cursor.orders is None:
            return self._away
        ordered: Placement = cursor.orders[record.item].placement
        return ordered if ordered in AWAY_PLACEMENTS else self._away

    def num_packed(self, placement: Placement) -> int:
        """Return how many tensors were packed with this placement."""
        return len(self._samples.get((placement, "pack"), ()))

    def recipe_ran(self, lane: int, item: int, took_ns: int) -> None:
        """Note what a recipe itself took the host."""
        least_ns = self._recipes_ns.get((lane, item), took_ns)
        self._recipes_ns[lane, item] = min(took_ns, least_ns)

    def rebuild_ms(self, lane: int, items: Iterable[int]) -> float:
        """Return what the first rebuild of each of these costs the host in ms, with
        `BESIDE`, where they are the same: [Note: the host's time of a rebuild]; 0.0 if
        none was rebuilt."""
        places = [(lane, item) for item in items]
        own_ns = [self._recipes_ns[at] for at in places if at in self._recipes_ns]
        if not own_ns:
            return 0.0
        around_ns = statistics.median(self._uses_ns) if self._uses_ns else 0.0
        return BESIDE * (statistics.median(own_ns) + around_ns) / 1e6

    def costs(self, otherwise: HostCosts) -> HostCosts:
        """Return the mean costs by action, over their own time by `BESIDE`; those of
        `otherwise` where none was seen."""

        def cost(placement: Placement, before: HostCost) -> HostCost:
            return HostCost(
                pack_ms=self._middle(placement, "pack", before.pack_ms),
                use_ms=self._middle(placement, "use", before.use_ms),
                load_ms=self._middle(placement, "load", before.load_ms),
            )

        return HostCosts(
            keep=cost(Placement.KEEP, otherwise.keep),
            host=cost(Placement.OFFLOAD, otherwise.host),
            ssd=cost(Placement.OFFLOAD_SSD, otherwise.ssd),
            rebuild=cost(Placement.RECOMPUTE, otherwise.rebuild),
            region_ms=(
                BESIDE * mean_ms(self._regions_ns)
                if self._regions_ns
                else otherwise.region_ms
            ),
        )

    def _middle(self, placement: Placement, what: str, otherwise_ms: float) -> float:
        found = self._samples.get((placement, what))
        return BESIDE * mean_ms(found) if found else otherwise_ms


def mean_ms(samples_ns: Iterable[int]) -> float:
    """Return the mean in ms, without samples above `OUTLIER` medians."""
    found = list(samples_ns)
    limit = OUTLIER * statistics.median(found)
    usual = [each for each in found if each <= limit]
    return sum(usual) / len(usual) / 1e6

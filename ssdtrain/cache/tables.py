"""The compiled plans of a session."""

from typing import Any

from ssdtrain.cache.binding import Binding
from ssdtrain.cache.bysize import SizedPlan
from ssdtrain.cache.record import Lane
from ssdtrain.cache.rows import HostRow, moving
from ssdtrain.cache.run import Run
from ssdtrain.cache.table import Hooks, Table
from ssdtrain.plan.plan import Plan
from ssdtrain.transfer.copies import PinnedBuffer, give_back
from ssdtrain.transfer.pinned import PinnedPool


class Tables:
    """Tables of the plan in force and of those next to it for smaller lanes."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self.tables: dict[tuple[str, float], Table] = {}
        """By kind of lane, and which plan it is (`SizedPlan.key`)."""
        self._places: dict[tuple[str, int], list[PinnedBuffer]] = {}
        """By kind of lane and item: only one lane's tensors are there at a time, so all
        tables have the same ones."""
        self.num_made = 0
        """Tables so far, of all plans."""

    def hooks_of(
        self, cache: Any, lane: Lane, sized: SizedPlan, general: Hooks
    ) -> Hooks:
        """What serves the forward of a lane; `general` are the general path's."""
        if sized.in_force is not self._plan:
            self._plan = sized.in_force
            self.close(cache.offloader.pool)
        plan = sized.plan
        if plan is None or lane.kind not in plan.orders:
            return general
        table = self.tables.get((lane.kind, sized.key))
        if table is None:
            lane.binding = binding = Binding(cache, lane, sized, general)
            return binding.pack, binding.unpack
        run = Run(cache, lane, table, general)
        lane.learns = False
        lane.run = run
        cache.retired.watch(run, run.holding)
        lane.num_live += 1
        return run.hooks()

    @property
    def place_sizes(self) -> list[int]:
        """Bytes of the buffers of all places where no tensor is."""
        free = (place for places in self._places.values() for place in places)
        return [place.buffer.capacity_bytes for place in free]

    def close(self, pool: PinnedPool) -> None:
        """Forget all tables, and give their places back."""
        for free in self._places.values():
            while free:
                give_back(pool, free.pop())
        self._places.clear()
        self.tables.clear()

    def left(self, lane: Lane) -> None:
        """Backward of a lane has ended, or its graph is gone."""
        binding, lane.binding = lane.binding, None
        if binding is None or not lane.in_backward:
            return
        if binding.sized.in_force is not self._plan:
            return
        table, key = binding.table(), (lane.kind, binding.sized.key)
        if table is not None and key not in self.tables:
            for row in map(moving, table.rows):
                if type(row) is HostRow:
                    row.free = self._places.setdefault((lane.kind, row.item), row.free)
            self.tables[key] = table
            self.num_made += 1

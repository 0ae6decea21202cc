"""The compiled plans of a session."""

from typing import Any

from ssdtrain.cache.binding import Binding
from ssdtrain.cache.record import Lane
from ssdtrain.cache.rows import HostRow, bare
from ssdtrain.cache.run import Run
from ssdtrain.cache.table import Hooks, Table
from ssdtrain.plan.plan import Plan
from ssdtrain.transfer.pinned import PinnedPool


class Tables:
    """Tables of the plan in force, by kind of lane."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self.tables: dict[str, Table] = {}
        self.num_made = 0
        """Tables so far, of all plans."""

    def hooks_of(
        self, cache: Any, lane: Lane, plan: Plan | None, general: Hooks
    ) -> Hooks:
        """What serves the forward of a lane; `general` are the general path's."""
        if plan is not self._plan:
            self._plan = plan
            self.close(cache.offloader.pool)
        if plan is None or lane.kind not in plan.orders:
            return general
        table = self.tables.get(lane.kind)
        if table is None:
            lane.binding = binding = Binding(cache, lane, plan, general)
            return binding.pack, binding.unpack
        run = Run(cache, lane, table, general)
        lane.learns = False
        lane.run = run
        cache.retired.watch(run, run.holding)
        lane.num_live += 1
        return run.hooks()

    @property
    def free_bytes(self) -> int:
        """Pinned bytes of places where no tensor is."""
        return sum(self.place_sizes)

    @property
    def place_sizes(self) -> list[int]:
        """Bytes of the buffers of all places where no tensor is."""
        rows = (bare(row) for table in self.tables.values() for row in table.rows)
        free = (place for row in rows if type(row) is HostRow for place in row.free)
        return [place.buffer.capacity_bytes for place in free]

    def close(self, pool: PinnedPool) -> None:
        """Forget all tables, and give their places back."""
        for table in self.tables.values():
            table.close(pool)
        self.tables.clear()

    def left(self, lane: Lane) -> None:
        """Backward of a lane has ended, or its graph is gone."""
        binding, lane.binding = lane.binding, None
        if binding is None or binding.plan is not self._plan or not lane.in_backward:
            return
        table = binding.table()
        if table is not None and lane.kind not in self.tables:
            self.tables[lane.kind] = table
            self.num_made += 1

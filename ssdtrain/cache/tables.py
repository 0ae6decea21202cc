"""The compiled plans of a session.

[Note: tables of other plans]
While plans are tried they take turns, and a lane that makes a table takes the host five
to ten times as long as one that follows it. So the tables of the last few plans stay,
without the pinned buffers of their places. Tables of smaller lanes go: the next plan
for these may be another one.
(tests/ssdtrain/cache/test_table.py)
"""

import math
from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import Any

from ssdtrain.cache.binding import Binding
from ssdtrain.cache.bysize import SizedPlan
from ssdtrain.cache.record import Lane
from ssdtrain.cache.rows import HostRow, moving
from ssdtrain.cache.run import Run
from ssdtrain.cache.table import Hooks, Table
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.transfer.copies import PinnedBuffer, give_back
from ssdtrain.transfer.pinned import PinnedPool

MOST_PLANS = 3
"""Plans whose tables stay: the base, the best one, and the one that is tried."""
Orders = Mapping[str, tuple[Order, ...]]


class Tables:
    """Tables of the plan in force and of those next to it for smaller lanes."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._before: deque[tuple[Orders, dict[tuple[str, float], Table]]] = deque(
            maxlen=MOST_PLANS - 1
        )
        """Tables of the plans before: [Note: tables of other plans]."""
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
            self._begin(sized.in_force, cache.offloader.pool)
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

    def _begin(self, plan: Plan | None, pool: PinnedPool) -> None:
        """Another plan is in force from now on."""
        before, self._plan = self._plan, plan
        own = {key: table for key, table in self.tables.items() if key[1] == math.inf}
        self.close(pool)
        if before is not None and own:
            self._before.append((before.orders, own))
        for known in list(self._before):
            if plan is not None and known[0] is plan.orders:
                self._before.remove(known)
                for (kind, ratio), table in known[1].items():
                    self._add(table, kind, ratio)

    def _add(self, table: Table, kind: str, ratio: float) -> None:
        for row in _moving(table):
            row.free = self._places.setdefault((kind, row.item), row.free)
        self.tables[kind, ratio] = table

    @property
    def place_sizes(self) -> list[int]:
        """Bytes of the buffers of all places where no tensor is."""
        free = (place for places in self._places.values() for place in places)
        return [place.buffer.capacity_bytes for place in free]

    def close(self, pool: PinnedPool) -> None:
        """Follow no table from now on. All buffers go back to the pool, also what late
        backwards have left with tables of plans before, which stay."""
        before = (table for _, tables in self._before for table in tables.values())
        late = (row.free for table in before for row in _moving(table))
        for free in chain(self._places.values(), late):
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
            self._add(table, *key)
            self.num_made += 1


def _moving(table: Table) -> list[HostRow]:
    """Return the rows that have places."""
    return [row for row in map(moving, table.rows) if type(row) is HostRow]

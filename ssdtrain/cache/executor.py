"""What the plan says is done here: tensors go out, are released, and come back.

A record leaves by its order or, where no order names it, by the rule: see [Note: a rule
next to the orders] in plan/rule.py. Orders also say when it is released and when it is
loaded; else the window is kept small, and loads go ahead of backward by a byte budget.
(tests/ssdtrain/cache/test_executor.py)
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ssdtrain.cache.captured import Captures
from ssdtrain.cache.cursor import Cursor, Entry
from ssdtrain.cache.identity import check_late_writer
from ssdtrain.cache.moved import MovedTensor
from ssdtrain.cache.record import Lane, LaneCursor, Record
from ssdtrain.cache.state import STAYED, RecordState
from ssdtrain.cache.window import CacheLimits, Pace, ReleaseWindow
from ssdtrain.counters import Count, Counters, Fallback
from ssdtrain.errors import SessionClosedError
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order
from ssdtrain.transfer.copies import Arrival, Copies, discard
from ssdtrain.transfer.graphs import GraphTransfer
from ssdtrain.transfer.offloader import Offloader
from ssdtrain.transfer.transfers import Transfer

PLANNED = (Placement.KEEP, Placement.OFFLOAD, Placement.OFFLOAD_SSD)
"""Placements that an order carries out here."""


class Executor:
    """Moves the records of one cache; its lock is held."""

    def __init__(
        self,
        offloader: Offloader,
        window: ReleaseWindow,
        cursor: Cursor,
        limits: CacheLimits,
        counters: Counters,
        captures: Captures,
        copies: Copies,
        timed: Callable[[Callable[[Any], None], Any], None],
    ) -> None:
        """timed: starts planned loads, and times them where somebody wants to know."""
        self.limits = limits
        self.num_acts = 0
        """Releases and loads of orders so far."""
        self.is_closed = False
        self._offloader = offloader
        self._device = offloader.device
        self._window = window
        self._cursor = cursor
        self._counters = counters
        self._captures = captures
        self._copies = copies
        self._timed = timed
        self._pace = Pace(offloader.device, window)

    @property
    def lingering_bytes(self) -> int:
        """See [Note: pending release] in window.py."""
        return self._window.lingering_bytes

    # -- out ----------------------------------------------------------------------

    def place(self, record: Record, entry: Entry, bytes_before: int) -> bool:
        """Start to move a new record away, if its order or the rule says so and it can.

        Args:
            record: whose bytes are on the device.
            entry: its place in the lane.
            bytes_before: of the lane.
        """
        order = entry.order
        if self._captures.is_forward:
            if order is not None:
                placement = order.placement
            else:
                tail_bytes = self.limits.window_of(record.lane.expected_largest_bytes)
                placement = self._by_rule(record, bytes_before, tail_bytes, entry.held)
            return self._captures.send(record, placement, entry.due)
        if order is not None and order.placement in PLANNED:
            return self.send(record, order, entry.due)
        return self.send_by_rule(record, bytes_before, held=entry.held)

    def send(self, record: Record, order: Order, due: int | None) -> bool:
        """Start to move a new record away, if there is room.

        Args:
            due: mark of its release; None: it stays.
        """
        if due is None or record.data is None:
            return False
        transfer = self._offloader.store(
            record.data, record.name, lambda: True, record.holding
        )
        if transfer is None:
            return False
        record.leave(transfer)
        self._window.add(record, record.data, transfer, due)
        if order.placement is Placement.OFFLOAD_SSD:
            self._offloader.send_on(transfer)
        return True

    def send_by_rule(self, record: Record, bytes_before: int, *, held: bool) -> bool:
        """As `place`, where no order names it."""
        lane, window = record.lane, self._window
        window_bytes = self.limits.window_of(lane.expected_largest_bytes)
        placement = self._by_rule(record, bytes_before, window_bytes, held)
        if placement is Placement.KEEP_LAST:
            lane.kept_last_bytes += record.num_bytes
            window.release_down_to(max(0, window_bytes - lane.kept_last_bytes))
            return False
        if placement is Placement.KEEP or record.data is None:
            return False
        in_time = placement is Placement.OFFLOAD_IF_IN_TIME
        limit = window_bytes - record.num_bytes
        if in_time and not self._pace.make_room(limit):
            self._offloader.fall_back(Fallback.KEPT_BACK_PRESSURE)
            return False
        patient = self._pace.compute_is_busy if in_time else (lambda: True)
        transfer = self._offloader.store(
            record.data, record.name, patient, record.holding
        )
        if transfer is None:
            return False
        record.leave(transfer)
        window.add(record, record.data, transfer)
        window.release_down_to(max(limit, 0) + record.num_bytes)
        return True

    def _by_rule(
        self, record: Record, bytes_before: int, tail_bytes: int, held: bool
    ) -> Placement:
        known = record.lane.profile
        left_bytes = known.total_bytes - bytes_before - record.num_bytes
        if not known.backward_follows:
            left_bytes = -1
        return self._cursor.rule.place(left_bytes, tail_bytes, held=held)

    def release_due(self) -> None:
        """Drop what the plan wants gone by this mark, after its copy."""
        self.num_acts += self._window.release_due(self._cursor.mark)

    # -- back ---------------------------------------------------------------------

    def load_at(self, cursor: LaneCursor, at: int) -> None:
        """Start what the plan loads at this use of a lane that follows it, and read
        ahead from the SSD."""
        for batch in cursor.loads.get(at, ()):
            away = []
            for item in batch:
                found = cursor.records.get(item)
                record = None if found is None else found()
                if record is not None and record.state is RecordState.AWAY:
                    away.append(record)
            if away:
                self.num_acts += len(away)
                self._timed(self._load, away)
        while cursor.reading and self._offloader.storage is not None:
            record = cursor.record(cursor.reading[-1])
            if (
                isinstance(record, Record)  # a `MovedTensor` rests in host memory
                and record.state is RecordState.AWAY
                and record.transfer is not None
                and not self._offloader.recall(record.transfer)
            ):
                self.num_acts += 1  # it will be tried again at the next use
                return
            cursor.reading.pop()
            self.num_acts += 1

    def load_first(self, lane: Lane) -> None:
        """Start what the lane's backward will ask for first.

        Of a planned lane what its first use would load: the plan has room for no more.
        """
        cursor = self._cursor.of(lane)
        if cursor.orders is None:
            self._load_ahead(lane.upcoming())
        else:
            self.load_at(cursor, 0)

    def was_used(self, record: Record, at: int | None) -> None:
        """Its bytes were asked for: load what comes next, and put them back after the
        last use.

        at: number of the use in its lane; None: a recipe asked.
        """
        lane, first_use = record.lane, record.num_uses == 0
        record.num_uses += 1
        if first_use:
            lane.uses.append(record.ordinal)
        cursor = self._cursor.of(lane)
        if cursor.orders is not None:
            if at is not None:
                self.load_at(cursor, at)
        elif first_use and lane.has_moved:
            self._load_ahead(lane.upcoming(record.ordinal))
        if record.num_uses >= record.num_handles:
            record.drop_copy()

    def _load_ahead(self, upcoming: Iterable[Record]) -> None:
        """Load soonest first, within the byte budget.

        What is loaded too early *is* the backward peak, so device memory is taken
        just in time; the storage is read further ahead, into free staging.
        """
        budget, least = self.limits.prefetch_bytes, self.limits.least_bytes
        ahead = 0
        recalling = self._offloader.storage is not None
        for record in upcoming:
            if budget is None:
                budget = self.limits.prefetch_of(record.lane.expected_largest_bytes)
            if record.state is RecordState.AWAY and (
                ahead == 0 or ahead + record.num_bytes <= budget
            ):
                self._timed(self._start_loads, [record])
            if record.state is RecordState.RETURNING:
                ahead += record.num_bytes
            elif record.state is RecordState.AWAY and record.transfer is not None:
                recalling = recalling and self._offloader.recall(record.transfer)
            # No record is smaller: none that comes later would fit.
            if ahead and ahead + least > budget and not recalling:
                return

    def fetch(self, record: Record) -> Tensor:
        """The record's bytes on the device, in the caller's compute order.

        Raises:
            InPlaceError: they are those of before its operator filled it.
        """
        if record.state not in STAYED:
            check_late_writer(record)
        if record.state is RecordState.DROPPED:
            record.region.run_again()
        elif record.state is RecordState.LEAVING:
            self._give_original(record)
        elif record.state is RecordState.AWAY:
            self._start_load(record)
        if record.state is RecordState.RETURNING:
            record.arrive(self._device)
        if record.data is None:
            raise RuntimeError(f"{record.name}: no data in {record.state}")
        return record.data

    def fetch_moved(self, moved: MovedTensor) -> Tensor:
        """As `fetch`, for an item of a table."""
        if moved.state is RecordState.LEAVING:
            self._give_original(moved)
        elif moved.state is RecordState.AWAY:
            self._load_moved([moved])
        if moved.state is RecordState.RETURNING:
            moved.arrive(self._device)
        if moved.data is None:
            raise RuntimeError(f"{moved.name}: no data in {moved.state}")
        return moved.data

    def _give_original(self, record: "Record | MovedTensor") -> None:
        """Hand the live tensor back and stop its way out (Wu 5.3.4)."""
        transfer = record.stay()
        if not record.lane.is_captured:  # no step counts what is only written down
            self._counters.add(Count.FORWARDED, record.num_bytes)
        self._stop(transfer)

    def take_back(self, record: Record, data: Tensor) -> None:
        """Stop its way out, or forget what has left: these are its bytes now."""
        self._stop(record.take_back(data))

    def _stop(self, transfer: Any) -> None:
        if transfer is not None:
            self._window.linger(transfer)
            discard(self._offloader, transfer)

    def _load(self, batch: list[Any]) -> None:
        """Start what the plan loads together."""
        kinds = set(map(type, batch))
        if kinds == {MovedTensor}:  # as in most plans
            self._load_moved(batch)
            return
        moved = [record for record in batch if type(record) is MovedTensor]
        if moved:
            self._load_moved(moved)
        if len(moved) < len(batch):
            records = [record for record in batch if type(record) is not MovedTensor]
            if not self.is_closed:
                records = self._captures.start_loads(records)
            self._start_loads(records)

    def _load_moved(self, batch: list[MovedTensor]) -> None:
        if self.is_closed:
            raise SessionClosedError(_closed_before(batch[0].name))
        copies, num_bytes = self._copies, 0
        places = [moved.copy.pinned for moved in batch]
        try:  # [Note: batches] in transfer/copies.py
            found = copies.back(places)
            for moved, data, place in zip(batch, found, places, strict=True):
                moved.start_load(data, Arrival(data, place, copies))
                num_bytes += moved.num_bytes
        except BaseException:  # an interrupt: `data` may be being filled
            copies.quiesce()
            raise
        self._counters.add(Count.RELOADED, num_bytes)

    def _start_loads(self, batch: Iterable[Record]) -> None:
        for record in batch:
            self._start_load(record)

    def _start_load(self, record: Record) -> None:
        if self.is_closed or record.transfer is None:
            raise SessionClosedError(_closed_before(record.name))
        data = torch.empty(
            record.num_bytes, dtype=torch.uint8, device=self._device.torch_device
        )
        try:
            record.start_load(data, self._load_of(record.transfer, data))
        except BaseException:
            # An interrupt: `data` may be being filled.
            if record.load is None and type(record.transfer) is Transfer:
                self._offloader.settle(record.transfer)
            raise
        if not record.lane.is_captured:
            self._counters.add(Count.RELOADED, record.num_bytes)

    def _load_of(self, transfer: Any, data: Tensor) -> Any:
        copies = self._captures.copies
        if copies is not None and type(transfer) is GraphTransfer:
            return copies.load([transfer], [data])[0]
        return self._offloader.load(transfer, data)

    def close(self) -> None:
        """Release what is on its way out, and bring nothing back from now on."""
        self._window.release_down_to(0)
        self.is_closed = True


def _closed_before(name: str) -> str:
    return (
        f"the saved tensor of {name} was offloaded, and its session was closed before "
        "backward; call close() after the last backward."
    )

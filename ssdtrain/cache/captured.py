"""A forward that is captured into a CUDA graph, and its backward.

See [Note: captured copies] in transfer/graphs.py. The general path serves them under
the plan in force: what it keeps stays, what it rebuilds is rebuilt by the recipes that
earlier steps admitted, and the rest moves inside the graph. Nothing is measured, and
nothing counts as a step.
(tests/ssdtrain/engines/test_graphs.py)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.cache.bypass import Unhooked
from ssdtrain.cache.record import Lane, Record
from ssdtrain.cache.scope import owned
from ssdtrain.cache.traced import untraced
from ssdtrain.counters import Fallback
from ssdtrain.errors import CaptureError
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from ssdtrain.transfer.allocator import begin_with
from ssdtrain.transfer.graphs import GraphCopies, GraphTransfer, relaxed_capture
from ssdtrain.transfer.offloader import Drain

MEMORY = "_ssdtrain_graph_memory"
"""Attribute of the model: the pinned memory that its graphs copy to. Graphs may
outlive the session, and never the model."""
KEEPS = (Placement.KEEP, Placement.KEEP_LAST)


class Captures:
    """The captured forwards and backwards of one cache."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.copies: GraphCopies | None = None
        """None before the first capture."""
        self.is_forward = False
        """Whether a captured forward is running."""
        self._model: nn.Module | None = None
        self._is_ready: Callable[[], bool] = lambda: True
        self._plan_of: Callable[[], Plan | None] = lambda: None
        self._is_sweeping = False
        self._hears_ends = False
        self._has_segment = False
        """Whether the graph that is captured has been given one: [Note: one segment]
        in transfer/allocator.py."""

    def attach(
        self,
        model: nn.Module,
        is_ready: Callable[[], bool],
        plan_of: Callable[[], Plan | None],
        *,
        hears_ends: bool,
    ) -> None:
        """The graphs will be of this model.

        Args:
            model: that keeps their memory.
            is_ready: whether the plan that a graph would hold can be made.
            plan_of: the plan that is made for graphs; None: the one in force holds.
            hears_ends: whether `ends` is called where a capture ends; else one may end
                after any forward.
        """
        self._model, self._is_ready, self._plan_of = model, is_ready, plan_of
        self._hears_ends = hears_ends

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is to happen in a graph that is captured now."""
        if not self._is_ready():
            return False
        own = self._plan_of()
        return (
            isinstance(self._cache.bypass, Unhooked) if own is None else own.keeps_all
        )

    @property
    def must_wait(self) -> bool:
        """Whether what dead records held can only be given back after a capture."""
        if self.copies is None or self._is_sweeping:
            return False
        return bool(self._cache.device.is_capturing())

    @contextmanager
    def forward(self, lane: Lane) -> Iterator[None]:
        """Around a forward that is captured, after `check`."""
        copies = self._open()
        lane.is_captured = self.is_forward = True
        pack = owned(untraced(self._cache.pack), self._cache)
        cursor = self._cache.cursor
        eager = cursor.plan
        cursor.plan = self._plan_of() or eager
        self._begin_with_segment(cursor.plan)
        hooks = saved_tensors_hooks(pack, untraced(self._cache.unpack))
        try:
            with self._cache.ledger.counters.left_out(), hooks:
                yield
        finally:
            self._cache.departures.lane_ends(lane)
            self.is_forward = False
            cursor.plan = eager
            if not self._hears_ends:
                copies.join()

    def ends(self) -> None:
        """A capture ends: its copy streams must be joined with compute."""
        self._has_segment = False
        if self.copies is not None:
            self.copies.join()

    def check(self) -> None:
        """Check that a forward may be captured now, and give back what dead records of
        the last capture held.

        Raises:
            CaptureError: a graph cannot hold what this session is to do.
        """
        cache = self._cache
        if not self._is_ready():
            raise CaptureError(
                "a CUDA graph is being captured, and what its plan is made of is not "
                "observed yet; run eager steps until session.can_capture is True."
            )
        if cache.verifier.checks_all:
            raise CaptureError(
                "a CUDA graph is being captured, and saved bytes are checked by the "
                "host, which no replay would do; set verify='off'."
            )
        if cache.offloader.drain is Drain.AT_ONCE or not cache.moves_to_host:
            raise CaptureError(_NO_STORAGE)
        self._is_sweeping = True
        try:
            with relaxed_capture():
                cache.collect_now()
        finally:
            self._is_sweeping = False
        if not cache.lanes.is_idle:
            raise CaptureError(
                "a CUDA graph is being captured while tensors of an eager forward are "
                "away; run its backward, or drop its loss, before the capture."
            )

    def _begin_with_segment(self, plan: Plan | None) -> None:
        """Once a capture: the plan is for all of its forwards."""
        prediction = None if plan is None else plan.prediction
        if prediction is None or self._has_segment or not self._hears_ends:
            return
        self._has_segment = True
        with relaxed_capture():
            device = self._cache.device.torch_device
            begin_with(prediction.passing_peak_bytes, device)

    def _open(self) -> GraphCopies:
        if self.copies is None:
            pool = self._cache.offloader.pool
            free_bytes = pool.cap_bytes - pool.total_bytes
            self.copies = GraphCopies(self._cache.device, free_bytes)
            if self._model is not None:
                # Behind those of an earlier session, whose graphs may live on.
                slabs = vars(self._model).setdefault(MEMORY, [])
                slabs.append(self.copies.slabs)
        return self.copies

    def send(self, record: Record, placement: Placement, due: int | None) -> bool:
        """Move a new record inside the graph, if it is to move and there is memory.

        Args:
            record: whose bytes are on the device.
            placement: where its order, or the rule, wants it.
            due: mark of its release; None: when the window is full.

        Raises:
            CaptureError: the plan wants it on the SSD.
        """
        if placement is Placement.OFFLOAD_SSD:
            raise CaptureError(_NO_STORAGE)
        copies, data = self.copies, record.data
        if placement in KEEPS or copies is None or data is None:
            return False
        transfer = copies.store(data, record.name)
        if transfer is None:
            self._cache.offloader.fall_back(Fallback.KEPT_HOST_FULL)
            return False
        record.leave(transfer)
        self._cache.window.add(record, data, transfer, due)
        if due is None:
            largest_bytes = record.lane.expected_largest_bytes
            limit_bytes = self._cache.limits.window_of(largest_bytes)
            self._cache.window.release_down_to(limit_bytes)
        return True

    def start_loads(self, records: Sequence[Record]) -> list[Record]:
        """Start to load those that a graph moved, together; returns the others."""
        copies = self.copies
        if copies is None:
            return list(records)
        others, away, transfers = [], [], []
        for record in records:
            transfer: Any = record.transfer
            if type(transfer) is GraphTransfer:
                away.append(record)
                transfers.append(transfer)
            else:
                others.append(record)
        if away:
            device = self._cache.device.torch_device
            targets = [
                torch.empty(each.num_bytes, dtype=torch.uint8, device=device)
                for each in away
            ]
            loads: list[Any] = list(copies.load(transfers, targets))
            for record, target, load in zip(away, targets, loads, strict=True):
                record.start_load(target, load)
        return others

    def backward_starts(self) -> None:
        """Backward asks for the first tensor of a captured forward."""
        if self.copies is not None:
            # torch has no public name for it (2.11 to 2.13).
            Variable._execution_engine.queue_callback(self.copies.join)


_NO_STORAGE = (
    "a CUDA graph is being captured, and it is the host that writes to the storage "
    "behind its memory, which no replay would do; set target='host', or leave the "
    "model uncaptured."
)

"""Turns counters into one `StepReport` a step.

[Note: where a step starts]
A step's memory is counted from what is in use when it starts. FSDP2 gathers the root's
own weights in a hook in front of the root's forward, an embedding's and a head's often:
1.5 GB of a 4B model. Counted from the forward on they would be nobody's, and a step
within a budget would need that much more than one under checkpointing, which a user
measures around the call. So the level is taken where such a root is called, before its
hooks run.
(tests/ssdtrain/engines/test_gathered.py)
"""

import statistics
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from ssdtrain.counters import Count, Counters, Peak, StepReport
from ssdtrain.plan.plan import Wait
from ssdtrain.rebuild.clock import Clock
from ssdtrain.rebuild.modes import ENTRIES
from ssdtrain.transfer.device import Device, MemoryLevel, Stalled


class HookSpan(NamedTuple):
    """When the device was in one call of the hooks: moments."""

    module: str
    before: Any
    after: Any
    again: Any
    """Right after `after`: what the moments themselves take."""


class HookSpans:
    """When the device was in the hooks of one step that rebuild nothing.

    From one moment to the next passes some time, though the device waits for nothing,
    and each span stands for many calls. So it is left out of all: what moments with
    nothing between them take, in the middle, in the same step.

    Args:
        period: one call of the hooks in so many is here.
    """

    def __init__(self, period: int = 1) -> None:
        self.period = period
        self.spans: list[HookSpan] = []

    def by_module(self, ms_between: Callable[[Any, Any], float]) -> dict[str, float]:
        """ms of each module's hooks, of all calls; waits for the device."""
        found: dict[str, float] = {}
        empty = [ms_between(span.after, span.again) for span in self.spans]
        own_ms = statistics.median(empty) if empty else 0.0
        for span in self.spans:
            ms = max(0.0, ms_between(span.before, span.after) - own_ms)
            found[span.module] = found.get(span.module, 0.0) + self.period * ms
        return found


class Ledger:
    """Counts bytes of saved tensors alive on the device, and closes steps."""

    def __init__(self, device: Device, counters: Counters) -> None:
        self.counters = counters
        self.clock = Clock(device.torch_device)
        """Times recipes."""
        self.live_bytes = 0
        self.held_bytes = 0
        """Of these: kept leaves, which their owner holds anyway."""
        self.handed_bytes = 0
        """Let go of by the cache, and held by a node of autograd until it ends."""
        self._holder: int | None = None
        """The node of autograd that holds them."""
        self._peak_bytes = 0
        """Most of `live_bytes` in this step."""
        self._backward_start_bytes = 0
        self.num_steps = 0
        """Steps closed."""
        self.modes_before = ENTRIES.num
        """Dispatch modes entered until the last step was closed."""
        self.closed: Any = None
        """When the last step was closed: a moment of the clock."""
        self.saved_bytes = 0
        """Saved for backward in the last step."""
        self.stalls: Callable[[], Stalled] | None = None
        """Compute's waits of the last step; calling it waits for the device."""
        self.predicted_ms: float | None = None
        """What the plan in force says of the running step."""
        self._start: Any = None
        self._device = device
        self._base = device.memory()
        self._first = self._base
        self._called: MemoryLevel | None = None
        """When the root was called, where somebody tells: see
        [Note: where a step starts]."""
        self.watches_peaks = False
        """Whether the allocator is asked at the end of a backward."""
        self._ended: MemoryLevel | None = None
        self._backward: MemoryLevel | None = None
        self._after: MemoryLevel | None = None
        self._seen_backward = False

    def live(self, change_bytes: int) -> None:
        """Saved tensors came alive (positive) or were released (negative)."""
        self.live_bytes += change_bytes
        if self.live_bytes > self._peak_bytes and change_bytes > 0:
            self._peak_bytes = self.live_bytes

    def hold(self, num_bytes: int) -> None:
        """Bytes that came alive are pinned by an autograd leaf: moving them frees
        nothing."""
        self.held_bytes += num_bytes

    def died(self, live_bytes: int, held_bytes: int) -> None:
        """A record is gone; what of it was alive, and held by its owner."""
        self.held_bytes -= held_bytes
        if live_bytes:
            self.live(-live_bytes)

    def nothing_lives(self) -> None:
        """No record is alive: what an interrupt has left in the sums is gone."""
        self.live_bytes, self.held_bytes = self.handed_bytes, 0

    def hand_over(self, num_bytes: int) -> None:
        """The cache let go of bytes that autograd holds until the running node ends."""
        self.handed_bytes += num_bytes
        # Of the operator that runs: torch has no public name for it (2.11 to 2.13).
        node = torch._C._current_autograd_node()
        self._holder = None if node is None else node._sequence_nr()

    def settle(self) -> None:
        """What was handed over is gone, if that node has ended."""
        if self.handed_bytes and (
            self._holder is None
            or (node := torch._C._current_autograd_node()) is None
            or node._sequence_nr() != self._holder
        ):
            self.live_bytes -= self.handed_bytes
            self.handed_bytes = 0

    def was_read(self, before_bytes: int) -> None:
        """What was handed over since there were so many bytes is gone: a recipe has
        read it."""
        left_bytes = min(before_bytes, self.handed_bytes)
        self.live_bytes -= self.handed_bytes - left_bytes
        self.handed_bytes = left_bytes

    def root_is_called(self) -> None:
        """Hooks in front of a forward are about to run, and then the forward."""
        self._called = self._device.memory()

    def start_level(self) -> MemoryLevel | None:
        """The allocator when the step starts that begins now."""
        return self._device.memory() if self._called is None else self._called

    def forward_starts(self) -> None:
        """The first forward of a step is about to run."""
        self._base, self._called = self.start_level(), None
        self._start = self.clock.now() if self.predicted_ms is not None else None

    def backward_starts(self) -> None:
        """A saved tensor is asked for; the first call of a step is measured."""
        if self._seen_backward:
            return
        self._seen_backward = True
        self._backward = self._device.memory()
        self._ended = None
        if self.watches_peaks and torch._C._current_graph_task_id() != -1:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ended)
        self._backward_start_bytes = self.live_bytes

    def _backward_ended(self) -> None:
        """Called by autograd: whoever starts the allocator's maximum again at the end
        of each step has not done so yet."""
        self._ended = self._device.memory()

    def backward_ends(self) -> None:
        """No saved tensor is alive any more."""
        self._after = self._device.memory()

    @property
    def levels(self) -> tuple[MemoryLevel | None, MemoryLevel | None]:
        """The allocator at the start of the last step, and at the end of its first
        backward if that was watched; None where there is none to ask."""
        return self._base, self._ended

    @property
    def step_is_open(self) -> bool:
        """Whether backward has run since the last step was closed."""
        return self._seen_backward

    def close_step(self, hooks: HookSpans | None = None) -> Callable[[], StepReport]:
        """End the step; the report waits for the device, so it is built on demand.

        Args:
            hooks: of a step whose hooks were timed on the device as well.
        """
        sums = self.counters.take()
        peak_bytes, self._peak_bytes = self._peak_bytes, 0
        backward_bytes, self._backward_start_bytes = self._backward_start_bytes, 0
        self.stalls = stalls = cache(self._device.cut_stalls())
        recipe_ms = self.clock.cut()
        self.closed = self.clock.now()
        self.modes_before = ENTRIES.num
        allocated, reserved = self._peaks()
        step, self.num_steps = self.num_steps, self.num_steps + 1
        plan_error = self._plan_error()
        self._seen_backward = False

        def total(count: Count) -> int:
            return sums.counts.get(count, 0)

        self.saved_bytes = total(Count.SAVED)

        def report() -> StepReport:
            times, stalled = recipe_ms(), stalls()
            waits = {
                Wait.COPY_OUT.value: stalled.out_ms,
                Wait.COPY_IN.value: stalled.ms - stalled.out_ms,
            }
            module = ""
            if hooks is not None:
                spent = hooks.by_module(self.clock.ms_between)
                waits[Wait.HOST.value] = max(0.0, sum(spent.values()) - stalled.ms)
                module = max(spent, key=spent.__getitem__, default="")
            return StepReport(
                step=step,
                num_records=total(Count.RECORDS),
                bytes_saved=total(Count.SAVED),
                bytes_kept=total(Count.KEPT),
                bytes_offloaded=total(Count.OFFLOADED),
                bytes_recomputed=total(Count.RECOMPUTED),
                bytes_forwarded=total(Count.FORWARDED),
                bytes_reloaded=total(Count.RELOADED),
                bytes_written=total(Count.WRITTEN),
                bytes_parameters=total(Count.PARAMETERS),
                stall_ms=stalled.ms,
                waits_ms=waits,
                host_wait_module=module,
                recompute_ms=sum(times.values()),
                saved_peak_bytes=peak_bytes,
                saved_backward_start_bytes=backward_bytes,
                allocated=allocated,
                reserved=reserved,
                plan_error=plan_error(),
                recipes=dict(sorted(sums.recipes.items())),
                recipe_ms=times,
                fallbacks={
                    reason.value: number
                    for reason, number in sorted(sums.fallbacks.items())
                },
                num_resized=total(Count.RESIZED),
                num_verified=total(Count.TENSORS_VERIFIED),
                bytes_verified=total(Count.VERIFIED),
            )

        return report

    def _plan_error(self) -> Callable[[], float | None]:
        start, predicted_ms = self._start, self.predicted_ms
        if start is None or predicted_ms is None:
            return lambda: None
        end = self.clock.now()

        def error() -> float:
            return self.clock.ms_between(start, end) / predicted_ms - 1

        return error

    def _peaks(self) -> tuple[Peak | None, Peak | None]:
        end = self._device.memory()
        if end is None or self._base is None or self._first is None:
            return None, None
        backward, after = self._backward or end, self._after or end
        allocated = Peak(
            backward.allocated_bytes - self._base.allocated_bytes,
            after.max_allocated_bytes - self._base.allocated_bytes,
            end.max_allocated_bytes - self._first.allocated_bytes,
        )
        reserved = Peak(
            backward.reserved_bytes - self._base.reserved_bytes,
            after.max_reserved_bytes - self._base.reserved_bytes,
            end.max_reserved_bytes - self._first.reserved_bytes,
        )
        return allocated, reserved

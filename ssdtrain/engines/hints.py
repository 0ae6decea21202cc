"""The hints: what a schedule tells the cache (Wu 5.3.1, Algorithm 5.1).

A scheduler that ssdtrain does not know drives the same interface:

    hints = session.hints
    with hints.forward(micro_batch=3):      # instead of a plain forward call
        output = stage(inputs)
    hints.set_next_stage(Stage.BACKWARD, micro_batch=3)
    hints.prefetch_last_module()            # while waiting for the neighbour
    output.backward(gradient)
    hints.wait_io()
    hints.step_end()

[Note: spent lanes]
After an optimizer step the saved tensors of the step before need not all be dead. An
output that no loss used may live in a variable of the loop (the pooled output of BERT),
or a loss whose graph was retained for another one. Backward has been through such a
micro-batch and can hardly come back, as its weights have changed: it ends the step like
any other. If backward does come back, it finds its tensors; no observer hears of it.
(tests/ssdtrain/engines/test_spent.py)
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

import torch
from torch.autograd import graph

from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.record import Lane
from ssdtrain.counters import Count, Fallback, StepReport
from ssdtrain.engines.watch import IdleMonitor

MAX_REPORTS = 1000
"""Reports that are remembered."""
MAX_PENDING = 3
"""Closed steps whose reports are not built yet. A device that is so many steps late
is waited for; without a reader, reports would hold events without end."""


def is_transformed() -> bool:
    """Whether a transform of torch.func or a tracer runs what follows: its tensors have
    no bytes, and most allow no saved-tensor hooks; or tensors may be changed in place
    after they were saved (`allow_mutation_on_saved_tensors`)."""
    # torch has no public names for these (2.11 to 2.13).
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or graph._allow_mutation_on_saved_tensors_enabled
        or torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


class Stage(Enum):
    """What a rank does next, as far as saved tensors are concerned."""

    FORWARD = auto()
    BACKWARD = auto()
    COMMUNICATION = auto()
    OPTIMIZER = auto()
    OTHER = auto()


class Steps:
    """Finds step boundaries and keeps the reports."""

    def __init__(
        self, cache: TensorCache, progress: Callable[[], int], monitor: IdleMonitor
    ) -> None:
        self._cache = cache
        self._progress = progress
        self._seen = progress()
        self.on_start: Callable[[int], None] = lambda num_steps: None
        """Told before the first forward of a step how many steps have ended."""
        self.monitor = monitor
        self._pending: deque[Callable[[], StepReport]] = deque()
        self._reports: deque[StepReport] = deque(maxlen=MAX_REPORTS)

    @property
    def latest(self) -> StepReport | None:
        """The newest report that is built; waits for nothing."""
        return self._reports[-1] if self._reports else None

    def _build(self) -> None:
        report = self._pending.popleft()()
        self._reports.append(report)
        self.monitor.step_ended(report)

    def forward_begins(self) -> None:
        """A step ends where a forward begins after the weights have changed."""
        if not self._is_idle():
            self.monitor.forward_is_held(self._progress())
            return
        self.monitor.is_released()
        if self._progress() != self._seen:
            self.end()
        if not self._cache.ledger.step_is_open:
            self.on_start(self._cache.ledger.num_steps)
            self._cache.ledger.forward_starts()

    def _is_idle(self) -> bool:
        if self._progress() != self._seen:
            self._cache.give_up_spent()
        return self._cache.is_idle

    def end(self) -> None:
        """Close the open step, if backward has run in it."""
        if self._cache.owner.is_elsewhere:
            return
        self._seen = self._progress()
        self.monitor.is_released()
        if self._cache.ledger.step_is_open:
            num_resized = self._cache.cursor.num_resized
            self._cache.ledger.counters.add(Count.RESIZED, num_resized)
            meter = self._cache.meter
            hooks = None if meter is None else meter.device_spans
            self._pending.append(self._cache.ledger.close_step(hooks))
            while len(self._pending) > MAX_PENDING:
                self._build()

    def reports(self) -> list[StepReport]:
        """The last `MAX_REPORTS` closed steps; an idle open one is closed first. Waits
        for the device."""
        if self._is_idle():
            self.end()
        while self._pending:
            self._build()
        return list(self._reports)


class _Forward:
    """Lives as long as a forward."""


class Hints:
    """The public door for schedulers. Every call is cheap and may be left out."""

    def __init__(self, cache: TensorCache, steps: Steps) -> None:
        self._cache = cache
        self._steps = steps
        self._lanes: dict[tuple[str, int | None], Lane] = {}
        self._micro_batch: int | None = None
        self._chunk = "model"
        self._next: tuple[Stage, int | None, str] = (Stage.OTHER, None, "model")
        self._inside: weakref.ref[_Forward] | None = None
        """The forward that runs. By its life: an interrupt may skip any line."""

    def is_compiled(self) -> None:
        """A compiler is around the forwards: hooks on modules would be compiled, too,
        and everything after them once more."""
        self._cache.is_compiled = True

    def root_is_called(self) -> None:
        """Hooks in front of a root's forward are about to run: what they gather is the
        step's own."""
        cache = self._cache
        if not cache.owner.is_elsewhere and torch.is_grad_enabled() and cache.is_idle:
            cache.ledger.root_is_called()

    @contextmanager
    def forward(
        self,
        *,
        micro_batch: int | None = None,
        chunk: str | None = None,
        num_elements: int = 0,
        asks_for_cache: bool = False,
    ) -> Iterator[None]:
        """Around one forward of one micro-batch: saved tensors join its lane.

        num_elements: of its arguments, which tells of a batch's size before its first
        tensor is saved; 0: unknown.
        asks_for_cache: whether the caller wants the KV cache of a transformers' model.

        Inert when gradients are off, inside backward (recomputation), inside another
        such block, of another thread as well, in a forked child, and (counted) under a
        transform of torch.func.
        """
        if self._cache.owner.is_elsewhere:  # a forked child trains as if without us
            self._cache.collector.let_go()
            yield
            return
        running = _Forward()
        if (
            not torch.is_grad_enabled()
            or torch._C._current_graph_task_id() != -1
            or not self._begins(running)
        ):
            yield
            return
        try:
            with self._begun(micro_batch, chunk, num_elements, asks_for_cache):
                yield
        finally:
            self._inside = None

    def _begins(self, running: _Forward) -> bool:
        """Whether no other forward runs; from now on this one does."""
        with self._cache.lock:  # two threads may ask at once
            if self._inside is not None and self._inside() is not None:
                return False
            self._inside = weakref.ref(running)
            return True

    @contextmanager
    def _begun(
        self,
        micro_batch: int | None,
        chunk: str | None,
        num_elements: int,
        asks: bool,
    ) -> Iterator[None]:
        """Around the one forward that runs."""
        transformed = is_transformed()
        self._steps.monitor.forward_begins(transformed=transformed)
        if transformed:
            self._cache.offloader.fall_back(Fallback.KEPT_TRANSFORMED)
            yield
            return
        if self._cache.device.is_capturing():
            with self._captured(chunk or self._chunk, micro_batch):
                yield
            return
        self._steps.forward_begins()
        bypass = self._cache.bypass
        if bypass is not None and bypass.serves(num_elements):
            try:
                with bypass.forward():
                    yield
            finally:
                if not self._cache.owner.is_elsewhere:
                    self._cache.ledger.backward_starts()  # so that the step is one
            return
        # What `set_stage` announced names the lane, unless the caller does.
        chunk = chunk or self._chunk
        micro_batch = self._micro_batch if micro_batch is None else micro_batch
        self._micro_batch = None
        self._cache.forward_ends()
        lane = self._cache.lanes.begin(chunk, micro_batch)
        lane.num_elements = num_elements
        self._lanes[(chunk, micro_batch)] = lane
        self._cache.recipes.forward_begins()
        try:
            with self._cache.timed(), self._cache.hooks(gives_caches=asks):
                yield
        finally:
            self._cache.forward_ends()

    @contextmanager
    def _captured(self, chunk: str, micro_batch: int | None) -> Iterator[None]:
        """Around a forward that is captured into a CUDA graph: not part of a step."""
        cache = self._cache
        if cache.captures.keeps_all:
            yield
            return
        # Before the lane begins, whose kind counts those in flight.
        cache.captures.check()
        lane = cache.lanes.begin(chunk, micro_batch)
        cache.recipes.forward_begins()
        try:
            with cache.captures.forward(lane):
                yield
        finally:
            cache.lanes.end(lane)

    def set_stage(
        self, stage: Stage, *, micro_batch: int | None = None, chunk: str = "model"
    ) -> None:
        """What begins now; a FORWARD names the lane that the next forward fills."""
        if stage is Stage.FORWARD:
            self._micro_batch, self._chunk = micro_batch, chunk

    def set_next_stage(
        self, stage: Stage, *, micro_batch: int | None = None, chunk: str = "model"
    ) -> None:
        """What follows the present stage."""
        self._next = (stage, micro_batch, chunk)

    def prefetch_last_module(self) -> None:
        """If a backward follows, load what it will ask for first.

        To be called before a communication, whose wait then hides the transfer.
        """
        stage, micro_batch, chunk = self._next
        lane = self._lanes.get((chunk, micro_batch))
        if stage is Stage.BACKWARD and lane is not None and lane.num_live:
            self._cache.prefetch(lane)

    def wait_io(self) -> None:
        """Settle the I/O of backward passes that ended: buffers become free."""
        if self._inside is None or self._inside() is None:
            self._cache.forward_ends()
        self._cache.collect_now()

    def step_end(self) -> None:
        """The optimizer step is done."""
        self._lanes.clear()
        self._steps.end()

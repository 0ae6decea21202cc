"""How long rebuilding took, by recipe, without waiting for the device."""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from ssdtrain.remat.budget import Budget, NoBudget, Span
from ssdtrain.transfer.device import is_timed_step


class Begun(NamedTuple):
    """A rebuild that is being timed."""

    start: Any
    high_bytes: int


class _Rebuild(NamedTuple):
    recipe: str
    place: Hashable
    num_bytes: int
    start: Any
    end: Any
    high_bytes: int


class Clock:
    """Wall time on a CPU; device time between two events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._index = device.index
        self._rebuilds: list[_Rebuild] = []
        self._last: list[_Rebuild] = []
        self._step_start: Any = None
        self._budget: Budget = NoBudget()
        self.is_watching = False
        """Whether the budget wants to know the memory in use."""
        self._device = device
        self._high_bytes = 0
        self._last_high_bytes = 0
        self.keep_spans = False
        """Whether `last_spans` can tell of the steps that end from now on."""
        self._kept: list[_Rebuild] = []
        self._num_cuts = 0
        self.num_begun = 0
        """Rebuilds so far, timed or not."""
        self.before_rebuild: Callable[[], None] | None = None
        """Called before each rebuild that is timed: holds the device, so that the
        rebuild's time is its own and not that of its launches."""
        self.after_rebuild: Callable[[], None] | None = None
        """Likewise, behind it."""
        self._sums: dict[str, float] = {}
        """Of the last timed step whose account was asked for."""

    def begin(self) -> Begun | None:
        """Start to time a rebuild; None: those of this step are not.

        On a GPU two events cost the host as much as the launch of a small kernel, so
        `is_timed_step` says which steps are, unless somebody must know.
        """
        self.num_begun += 1
        if self._cuda:
            if not self._times_all() or torch.cuda.is_current_stream_capturing():
                return None  # no time passes while a graph is written down
            self.sample()
        if self.before_rebuild is not None:
            self.before_rebuild()
        return Begun(self.now(), self._high_bytes)

    def end(
        self,
        begun: Begun,
        recipe: str,
        place: Hashable,
        num_bytes: int,
        gradient_bytes: int = 0,
    ) -> None:
        """It has been rebuilt.

        Args:
            begun: what `begin` gave.
            recipe: its name.
            place: where in a step.
            num_bytes: of the tensor.
            gradient_bytes: of its gradient, which the operator that asked for the
                tensor is about to make while it still holds it; 0: it makes none.
        """
        self.sample(gradient_bytes)
        start, high_bytes = begun
        self._rebuilds.append(
            _Rebuild(recipe, place, num_bytes, start, self.now(), high_bytes)
        )
        if self.after_rebuild is not None:
            self.after_rebuild()

    def measure(self, recipe: str, place: Hashable, num_bytes: int) -> "Measured":
        """Around one rebuild: `begin` and `end`."""
        return Measured(self, recipe, place, num_bytes)

    def _times_all(self) -> bool:
        """Whether every rebuild of the running step is timed."""
        timed = not self._cuda or is_timed_step(self._num_cuts)
        return timed or self.times_each

    @property
    def times_each(self) -> bool:
        """Whether somebody wants to know of every rebuild by itself."""
        return self.keep_spans or self.is_watching

    def sample(self, soon_bytes: int = 0) -> None:
        """Look at the memory in use, while the budget is watching.

        Not the allocator's own peak: its reset belongs to the user.

        Args:
            soon_bytes: what will be allocated before any of it is freed.
        """
        if self.is_watching and self._cuda:
            used = torch.cuda.memory_allocated(self._device) + soon_bytes
            self._high_bytes = max(self._high_bytes, used)

    def now(self) -> Any:
        """A moment in compute order, for `ms_between`."""
        if not self._cuda:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._index))
        return event

    def cut(self) -> Callable[[], dict[str, float]]:
        """Start a new account.

        Returns:
            Gives the old account in ms by recipe; calling it waits for the device. A
            step that was not timed has the sums of the last one that was.
        """
        rebuilds, self._rebuilds = self._rebuilds, []
        timed = self._times_all()
        self._num_cuts += 1
        self._last = rebuilds if self.is_watching else []
        self.sample()
        self._last_high_bytes = self._high_bytes
        self._kept = rebuilds if self.keep_spans else []

        def total_ms() -> dict[str, float]:
            if timed:
                sums: defaultdict[str, float] = defaultdict(float)
                for rebuild in rebuilds:
                    sums[rebuild.recipe] += self.ms_between(rebuild.start, rebuild.end)
                self._sums = dict(sorted(sums.items()))
            return self._sums

        return total_ms

    def last_spans(self) -> list[Span]:
        """Every rebuild of the last step that was kept; waits for the device."""
        return self.kept_spans()()

    def kept_spans(self) -> Callable[[], list[Span]]:
        """Likewise, for later; calling what is returned waits for the device."""
        kept = self._kept
        return lambda: [self._span(each) for each in kept]

    def _span(self, each: _Rebuild) -> Span:
        ms = self.ms_between(each.start, each.end)
        return Span(each.recipe, each.place, each.num_bytes, ms, each.high_bytes)

    def watch(self, budget: Budget) -> None:
        """Tell the budget of every step until it knows enough."""
        self._budget = budget
        self.is_watching = budget.is_watching

    def step_starts(self) -> None:
        """The first forward of a step is about to run.

        While the budget is watching this waits for the step before: the only time
        that the host waits for recipes, and over after a few steps.
        """
        if not self.is_watching:
            return
        self._high_bytes = 0
        start, before = self.now(), self._step_start
        self._step_start = start
        if before is None or not self._last:
            return
        step_ms = self.ms_between(before, start)
        spans = [self._span(each) for each in self._last]
        self._last = []
        self._budget.observe(step_ms, spans, self._last_high_bytes)
        self.is_watching = self._budget.is_watching

    def ms_between(self, start: Any, end: Any) -> float:
        """Milliseconds between two moments; waits until the second is reached."""
        if not self._cuda:
            return (end - start) / 1e6  # type: ignore[no-any-return]
        end.synchronize()
        return float(start.elapsed_time(end))


class Measured:
    """Around one rebuild: `Clock.begin` and `Clock.end`."""

    __slots__ = ("_begun", "_clock", "_what")

    def __init__(self, clock: Clock, *what: Any) -> None:
        self._clock = clock
        self._what = what

    def __enter__(self) -> None:
        self._begun = self._clock.begin()

    def __exit__(self, *error: object) -> None:
        if self._begun is not None:
            self._clock.end(self._begun, *self._what)

"""How long rebuilding took, by recipe, without waiting for the device."""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from ssdtrain.transfer.device import is_timed_step


class RebuildTime(NamedTuple):
    """One measured rebuild."""

    recipe: str
    place: Hashable
    """Where in a step: the lane's name and a number within it."""
    num_bytes: int
    ms: float


class _Rebuild(NamedTuple):
    recipe: str
    place: Hashable
    num_bytes: int
    start: Any
    end: Any


class Clock:
    """Wall time on a CPU; device time between two events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._index = device.index
        self._rebuilds: list[_Rebuild] = []
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
        """The same, after it."""
        self._sums: dict[str, float] = {}
        """Of the last timed step whose account was asked for."""

    def begin(self) -> Any:
        """Start to time a rebuild: its moment; None: those of this step are not timed.

        On a GPU two events cost the host as much as the launch of a small kernel, so
        `is_timed_step` says which steps are, unless somebody must know.
        """
        self.num_begun += 1
        if self._cuda:
            if not self._times_all() or torch.cuda.is_current_stream_capturing():
                return None  # no time passes while a graph is written down
        if self.before_rebuild is not None:
            self.before_rebuild()
        return self.now()

    def end(self, start: Any, recipe: str, place: Hashable, num_bytes: int) -> None:
        """It has been rebuilt. start: what `begin` gave; place: where in a step."""
        self._rebuilds.append(_Rebuild(recipe, place, num_bytes, start, self.now()))
        if self.after_rebuild is not None:
            self.after_rebuild()

    def _times_all(self) -> bool:
        """Whether every rebuild of the running step is timed."""
        return not self._cuda or is_timed_step(self._num_cuts) or self.keep_spans

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
        self._kept = rebuilds if self.keep_spans else []

        def total_ms() -> dict[str, float]:
            if timed:
                sums: defaultdict[str, float] = defaultdict(float)
                for rebuild in rebuilds:
                    sums[rebuild.recipe] += self.ms_between(rebuild.start, rebuild.end)
                self._sums = dict(sorted(sums.items()))
            return self._sums

        return total_ms

    def last_spans(self) -> list[RebuildTime]:
        """Every rebuild of the last step that was kept; waits for the device."""
        return self.kept_spans()()

    def kept_spans(self) -> Callable[[], list[RebuildTime]]:
        """As `last_spans`, for later; calling what is returned waits for the device."""
        kept, ms = self._kept, self.ms_between
        return lambda: [
            RebuildTime(
                each.recipe, each.place, each.num_bytes, ms(each.start, each.end)
            )
            for each in kept
        ]

    def ms_between(self, start: Any, end: Any) -> float:
        """Milliseconds between two moments; waits until the second is reached."""
        if not self._cuda:
            return (end - start) / 1e6  # type: ignore[no-any-return]
        end.synchronize()
        return float(start.elapsed_time(end))

"""Time and memory of a device: the GPU's own events, the host's clock without one."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


def wait(device: torch.device | None = None) -> float:
    """Wall seconds, once the device (any, if none is named) has done its work."""
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Clock:
    """Marks on the device's own time line (wall time without a GPU)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """A point in time, in compute order."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Between two marks, in ms."""
        if not self._cuda:
            return float(end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))

    def between(self, marks: Sequence[Any]) -> list[float]:
        """Of each two marks in a row, in ms."""
        return [self.ms(start, end) for start, end in itertools.pairwise(marks)]

    def once(self, work: Callable[[], object]) -> float:
        """Of one run, in ms."""
        start = self.mark()
        work()
        return self.ms(start, self.mark())

    def times(self, steps: Sequence[Sequence[Any]]) -> dict[str, float]:
        """Medians, each step marked at begin, behind forward, behind backward, end."""
        times = [self.between(marks) for marks in steps]
        forward_ms, backward_ms, _ = map(statistics.median, zip(*times, strict=True))
        return {
            "step_ms": statistics.median(sum(parts) for parts in times),
            "forward_ms": forward_ms,
            "backward_ms": backward_ms,
        }


def times_ms(
    step: Callable[[], object], device: torch.device, count: int
) -> list[float]:
    """Of each of `count` steps that follow one another without a wait."""
    if device.type != "cuda":
        return [Clock(device).once(step) for _ in range(count)]
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    wait(device)
    for start, end in zip(starts, ends, strict=True):
        start.record()
        step()
        end.record()
    wait(device)
    return [a.elapsed_time(b) for a, b in zip(starts, ends, strict=True)]


def link_gb_per_s(num_bytes: int, device: torch.device, *, back: bool = False) -> float:
    """A copy from pinned memory to the device, or back: the best of five."""
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    near = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    here, there = (near, host) if back else (host, near)
    copy, clock = partial(there.copy_, here, non_blocking=True), Clock(device)
    return num_bytes / min([clock.once(copy) for _ in range(6)][1:]) / 1e6


class Peak:
    """Bytes allocated above the level where this began; 0 without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        self.base = self._now()

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else 0

    @property
    def now(self) -> int:
        """At this moment."""
        return self._now() - self.base

    @property
    def most(self) -> int:
        """Since the beginning."""
        return torch.cuda.max_memory_allocated() - self.base if self._cuda else 0

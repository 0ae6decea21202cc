"""Where a step's time went, by the kernel's clocks of this thread and the machine."""

import time
from pathlib import Path
from typing import NamedTuple

import psutil

SCHEDULED = Path("/proc/thread-self/schedstat")
"""Nanoseconds of this thread: on a processor, ready to run, then a count."""


class Spent(NamedTuple):
    """Between two moments, in ms."""

    worked_ms: float
    """This thread was on a processor."""
    queued_ms: float | None
    """This thread was ready, and no processor was free; None: the kernel is silent."""
    own_ms: float
    """Processor time of this process, all threads."""
    idle_ms: float
    """Of all processors of the machine together."""


class Processors:
    """Tells what was spent since it was asked before. Ask it on one thread."""

    def __init__(self, scheduled: Path = SCHEDULED) -> None:
        """scheduled: the kernel's counters of this thread."""
        self._scheduled = scheduled
        self._last = self._now()

    def take(self) -> Spent:
        """Return what was spent since the last call, or since the start."""
        last, self._last = self._last, self._now()
        now, queued_ms = self._last, None
        if now.queued_ms is not None and last.queued_ms is not None:
            queued_ms = now.queued_ms - last.queued_ms
        own_ms, idle_ms = now.own_ms - last.own_ms, now.idle_ms - last.idle_ms
        return Spent(now.worked_ms - last.worked_ms, queued_ms, own_ms, idle_ms)

    def _now(self) -> Spent:
        machine = psutil.cpu_times()
        return Spent(
            worked_ms=1e3 * time.thread_time(),
            queued_ms=_queued_ms(self._scheduled),
            own_ms=1e3 * time.process_time(),
            idle_ms=1e3 * (machine.idle + getattr(machine, "iowait", 0.0)),
        )


def _queued_ms(scheduled: Path) -> float | None:
    try:
        return int(scheduled.read_text().split()[1]) / 1e6
    except (OSError, IndexError):
        return None


def num_processors() -> int:
    """Return how many processors the machine has."""
    return psutil.cpu_count() or 1

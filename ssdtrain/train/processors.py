"""What the processors did in a step, by the kernel's counters: this process's work, and
how long they had nothing to do."""

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
IDLE = slice(3, 5)
"""Of its first line: idle, and waiting for a disk."""


class Spent(NamedTuple):
    """Between two moments."""

    own_ms: float
    """Processor time of this process, all threads."""
    idle_ms: float
    """Of all processors of the machine together; 0.0: the kernel does not say."""


class Processors:
    """Tells what was spent since it was asked before."""

    def __init__(self, stat: Path = STAT) -> None:
        """stat: the kernel's counters of all processors."""
        self._stat = stat
        self._last = self._now()

    def take(self) -> Spent:
        """Return what was spent since the last call, or since the start."""
        last, self._last = self._last, self._now()
        return Spent(self._last.own_ms - last.own_ms, self._last.idle_ms - last.idle_ms)

    def _now(self) -> Spent:
        return Spent(1e3 * time.process_time(), _idle_ms(self._stat))


def _idle_ms(stat: Path) -> float:
    try:
        fields = stat.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    ticks = sum(int(field) for field in fields[IDLE])
    return 1e3 * ticks / os.sysconf("SC_CLK_TCK")


def num_processors() -> int:
    """Return how many the kernel's counters are of."""
    return os.cpu_count() or 1

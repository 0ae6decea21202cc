"""What gathers did, so that no path is taken silently."""

import threading
from collections import Counter
from dataclasses import dataclass

from pydirect.gather.request import Path


@dataclass(frozen=True, kw_only=True)
class GatherStats:
    """Counts since the process started (or the last reset)."""

    calls: dict[Path, int]
    """Gathers onto a GPU, by the path that carried them."""

    useful_bytes: int
    """Bytes of the rows gathered onto GPUs."""

    num_unpinned: int
    """Gathers that had to take the CPU path because the table was not pinned."""


class Counters:
    """Thread-safe counts behind `GatherStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[Path] = Counter()
        self._useful_bytes = 0
        self._num_unpinned = 0

    def count(self, path: Path, useful_bytes: int, *, unpinned: bool) -> None:
        with self._lock:
            self._calls[path] += 1
            self._useful_bytes += useful_bytes
            self._num_unpinned += unpinned

    def read(self) -> GatherStats:
        with self._lock:
            return GatherStats(
                calls=dict(self._calls),
                useful_bytes=self._useful_bytes,
                num_unpinned=self._num_unpinned,
            )

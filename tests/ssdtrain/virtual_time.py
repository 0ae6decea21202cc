"""Time that passes only where somebody sleeps, so that no test depends on the load.

[Note: virtual time]
Every thread has a time of its own: `sleep` moves it, and nothing else does, so that
four threads that sleep for a second each end one second later, however they were
scheduled. A thread that is new, or has slept less, starts at the time that the first
thread saw last; the first thread, which waits for the others, sees the latest of all.
With `tick_s` each look at the clock takes that long, for code that divides by times.
"""

import sys
import threading
import time
from types import ModuleType

import pytest


class VirtualTime:
    """Stands in for the module `time`, whole or as a clock and a sleep."""

    # Dates stay those of the calendar.
    gmtime = staticmethod(time.gmtime)
    strftime = staticmethod(time.strftime)

    def __init__(self, tick_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._first = threading.get_ident()
        self._seen_s = 0.0
        self._now_s: dict[int, float] = {}
        self._tick_s = tick_s

    def monotonic(self) -> float:
        """Seconds of the calling thread."""
        with self._lock:
            own = threading.get_ident()
            now = max(self._now_s.get(own, 0.0), self._seen_s)
            if own == self._first:
                now = max([now, *self._now_s.values()]) + self._tick_s
                self._seen_s = now
            self._now_s[own] = now
            return now

    def sleep(self, seconds: float) -> None:
        """Move the calling thread's time."""
        now = self.monotonic()
        with self._lock:
            self._now_s[threading.get_ident()] = now + seconds

    def monotonic_ns(self) -> int:
        """Nanoseconds."""
        return round(self.monotonic() * 1e9)

    perf_counter = monotonic
    perf_counter_ns = monotonic_ns


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """All of ssdtrain in virtual time, 10 us a look at the clock."""
    virtual = VirtualTime(tick_s=1e-5)
    for name, module in list(sys.modules.items()):
        if name.startswith("ssdtrain.") and isinstance(module, ModuleType):
            if getattr(module, "time", None) is time:
                monkeypatch.setattr(module, "time", virtual)
    return virtual

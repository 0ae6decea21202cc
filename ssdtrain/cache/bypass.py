"""How long forwards take, and forwards that run as if there were no ssdtrain."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ssdtrain.plan.calibrate import PlainTimes
from ssdtrain.rebuild.clock import Clock


class Bypass:
    """Times the forwards of one step, and stands in for the hooks where it is the
    cache's `bypass`. See [Note: the plain step] in plan/calibrate.py.

    Args:
        ours_ns: host time so far that is none of the program's.
    """

    def __init__(self, clock: Clock, ours_ns: Callable[[], int] = lambda: 0) -> None:
        self._clock = clock
        self._ours_ns = ours_ns
        self._forwards: list[tuple[Any, Any]] = []
        self._host_ns: list[tuple[int, int]] = []

    def serves(self, num_elements: int) -> bool:
        """Whether a forward with so many elements of arguments is one of these."""
        return True

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward."""
        start, start_ns = self._clock.now(), time.monotonic_ns()
        before_ns = self._ours_ns()
        yield
        own_ns = self._ours_ns() - before_ns
        self._host_ns.append((start_ns, time.monotonic_ns() - own_ns))
        self._forwards.append((start, self._clock.now()))

    @property
    def host_forward_ms(self) -> float:
        """Host time of its forwards."""
        return sum(end - start for start, end in self._host_ns) / 1e6

    def ms_between(self, start: Any, end: Any) -> float:
        """Time between two moments of the clock; waits for the device."""
        return self._clock.ms_between(start, end)

    def times(self, start: Any, end: Any) -> PlainTimes:
        """Of the step between two moments of the clock; waits for the device."""
        clock = self._clock
        lead_ms = 0.0
        if self._forwards:
            first_ms = self._host_ns[0][0] / 1e6
            lead_ms = max(0.0, device_ms(clock, self._forwards[0][0]) - first_ms)
        return PlainTimes(
            step_ms=clock.ms_between(start, end),
            forward_ms=sum(clock.ms_between(*both) for both in self._forwards),
            host_forward_ms=self.host_forward_ms,
            host_lead_ms=lead_ms,
        )


class Unhooked:
    """Forwards of a plan that keeps everything: there is nothing to hook.

    Args:
        most_elements: of a forward's arguments; one with more of them, or with none
            that are known, has hooks. None: all are served.
    """

    def __init__(self, most_elements: int | None = None) -> None:
        self._most_elements = most_elements

    def serves(self, num_elements: int) -> bool:
        """Whether a forward with so many elements of arguments is one of these."""
        most = self._most_elements
        return most is None or 0 < num_elements <= most

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward: no hooks."""
        yield


def device_ms(clock: Clock, moment: Any) -> float:
    """When the device came to a moment, on the host's monotonic clock.

    Waits for the device: the end of that wait is a moment that both know.
    """
    both = clock.now()
    since_ms = clock.ms_between(moment, both)
    return time.monotonic_ns() / 1e6 - since_ms

"""Forwards that run as if there were no ssdtrain, and how long they take."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ssdtrain.remat.clock import Clock


class Bypass:
    """Of one step. See [Note: the plain step] in plan/calibrate.py."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._forwards: list[tuple[Any, Any]] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward: no hooks."""
        start = self._clock.now()
        yield
        self._forwards.append((start, self._clock.now()))

    def forward_ms(self) -> float:
        """Time of all its forwards; waits for the device."""
        return sum(self._clock.ms_between(*both) for both in self._forwards)

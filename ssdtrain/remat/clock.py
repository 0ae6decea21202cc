"""How long rebuilding took, by recipe, without waiting for the device."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Wall time on a CPU; device time between two events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, recipe: str) -> Iterator[None]:
        """Around one rebuild."""
        start = self._mark()
        try:
            yield
        finally:
            self._spans.append((recipe, start, self._mark()))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def cut(self) -> Callable[[], dict[str, float]]:
        """Start a new account.

        Returns:
            Gives the old account in ms by recipe; calling it waits for the device.
        """
        spans, self._spans = self._spans, []

        def total_ms() -> dict[str, float]:
            sums: defaultdict[str, float] = defaultdict(float)
            for recipe, start, end in spans:
                sums[recipe] += self._ms(start, end)
            return dict(sorted(sums.items()))

        return total_ms

    def _ms(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return (end - start) / 1e6  # type: ignore[no-any-return]
        end.synchronize()
        return float(start.elapsed_time(end))

"""How many multiprocessors fetching may take from training, learnt while both run.

Too few, and training waits for rows; too many, and training itself is slower. What
training waits is measured on its own stream, between two events; nothing else waits.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

_LEAST, _FIRST, _MOST = 4, 16, 32
_WINDOW, _AHEAD = 4, 2
# Shares of the time in which training waits.
_MUCH, _LITTLE = 0.08, 0.01


class Timer(Protocol):
    """`torch.cuda.Event` with timing, or a test's."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any, /) -> float: ...


class SmBudget:
    """Doubles while training waits, halves while it does not, and settles."""

    def __init__(self, new_timer: Callable[[], Timer]) -> None:
        """``new_timer``: makes events of the training stream."""
        self._new_timer = new_timer
        self._pending: deque[tuple[Timer, Timer]] = deque()
        self._last: Timer | None = None
        self._waited: list[tuple[float, float]] = []
        self._floor = _LEAST
        self._stale = 0
        self.sms = _FIRST
        """Multiprocessors for the next gather."""

    def waiting(self) -> Timer:
        """Call before training waits for a batch, and `waited` with the result behind
        the wait."""
        timer = self._new_timer()
        timer.record()
        return timer

    def waited(self, before: Timer) -> None:
        """The wait has been enqueued; look at those that are over."""
        after = self._new_timer()
        after.record()
        self._pending.append((before, after))
        while self._pending and self._pending[0][1].query():
            self._note(*self._pending.popleft())

    def _note(self, before: Timer, after: Timer) -> None:
        if self._last is not None:
            trained = self._last.elapsed_time(before)
            self._waited.append((before.elapsed_time(after), trained))
        self._last = after
        if self._stale:
            self._stale -= 1
            self._waited.clear()
        if len(self._waited) < _WINDOW:
            return
        waits, steps = (sum(part) for part in zip(*self._waited, strict=True))
        self._waited.clear()
        share = waits / max(waits + steps, 1e-9)
        if share > _MUCH and self.sms < _MOST:
            self._change(self.sms * 2)
            self._floor = self.sms
        elif share < _LITTLE and self.sms > self._floor:
            self._change(self.sms // 2)

    def _change(self, sms: int) -> None:
        self.sms = sms
        # Batches that are fetched already, or on their way, had the budget before.
        self._stale = len(self._pending) + _AHEAD

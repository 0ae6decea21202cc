"""How many multiprocessors fetching may take from training, learnt while both run.

Too few, and training waits for rows; too many, and training itself is slower. The first
gathers take turns on several budgets, each between two events on the fetching stream:
the fewest multiprocessors that fill the link are the start, and no more than those are
ever taken. From then on what training waits is measured on its own stream. Nothing
waits for a measurement.
"""

from collections import deque
from collections.abc import Callable

from pydirect.gather.trials import Timer

_LEAST, _FIRST, _MOST = 4, 16, 32
# Budgets that the first gathers try, and how often; the first ones set memory up.
_TRIED, _SAMPLES, _SKIPPED = (32, 16, 8, 4), 3, 2
# A gather may take so much longer than with the most multiprocessors.
_FILLS = 1.05
_WINDOW, _AHEAD = 4, 2
# Shares of the time in which training waits.
_MUCH, _LITTLE = 0.08, 0.01


class SmBudget:
    """Doubles while training waits, halves while it does not, and settles.

    `gathering` and `gathered` are called by the thread that fetches, the others by the
    one that trains; `sms` is only read across.
    """

    def __init__(self, new_timer: Callable[[], Timer]) -> None:
        """``new_timer``: makes events of the training stream."""
        self._new_timer = new_timer
        self._pending: deque[tuple[Timer, Timer]] = deque()
        self._last: Timer | None = None
        self._waited: list[tuple[float, float]] = []
        self._floor, self._most = _LEAST, _MOST
        self._stale = 0
        self._num_gathers = 0
        self._gathers: deque[tuple[int, Timer, Timer, int]] = deque()
        self.gather_ns: dict[int, float] = {}
        """Nanoseconds a row of the first gathers, by their budget: the fastest of a
        few."""
        self.waited_share: dict[int, float] = {}
        """The share of its time that training waited lately, by the budget then."""
        self.sms = _FIRST
        """Multiprocessors for the next gather, once the first ones are measured."""

    @property
    def tries(self) -> bool:
        """Whether first gathers are still to be measured."""
        return len(self.gather_ns) < len(_TRIED)

    def gathering(self) -> int:
        """Return the budget of the next gather."""
        if not self.tries or self._num_gathers < _SKIPPED:
            return self.sms
        return _TRIED[(self._num_gathers - _SKIPPED) % len(_TRIED)]

    def gathered(self, before: Timer, sms: int, num_rows: int) -> None:
        """Note that a gather which began at ``before`` is enqueued; look at those that
        are over."""
        if not self.tries:
            return
        self._num_gathers += 1
        after = self._new_timer()
        after.record()
        if self._num_gathers > _SKIPPED and num_rows:
            self._gathers.append((sms, before, after, num_rows))
        if len(self._gathers) < _SAMPLES * len(_TRIED):
            return
        if not self._gathers[-1][2].query():
            return
        found: dict[int, float] = {}
        for tried, begun, over, rows in self._gathers:
            ns = begun.elapsed_time(over) * 1e6 / rows
            found[tried] = min(ns, found.get(tried, ns))
        self._gathers.clear()
        fill = _FILLS * min(found.values())
        self._most = min(tried for tried, ns in found.items() if ns <= fill)
        self.sms = max(_LEAST, self._most)
        self.gather_ns = found

    def __str__(self) -> str:
        lines = [
            f"max_sms {self.sms} ({'first gathers' if self.tries else 'measured'})"
        ]
        for tried, ns in sorted(self.gather_ns.items()):
            lines.append(f"  {tried:3} multiprocessors: {ns:.2f} ns a row")
        for tried, share in sorted(self.waited_share.items()):
            lines.append(f"  {tried:3} multiprocessors: training waited {share:.1%}")
        return "\n".join(lines)

    def waiting(self) -> Timer:
        """Call before training waits for a batch, and `waited` with the result after
        the wait."""
        timer = self._new_timer()
        timer.record()
        return timer

    def waited(self, before: Timer) -> None:
        """Note that the wait is enqueued; look at those that are over."""
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
        if self.tries:
            self._waited.clear()
            return
        if self._stale:
            self._stale -= 1
            self._waited.clear()
        if len(self._waited) < _WINDOW:
            return
        waits, steps = (sum(part) for part in zip(*self._waited, strict=True))
        self._waited.clear()
        share = waits / max(waits + steps, 1e-9)
        self.waited_share[self.sms] = share
        if share > _MUCH and self.sms < self._most:
            self._change(self.sms * 2)
            self._floor = self.sms
        elif share < _LITTLE and self.sms > self._floor:
            self._change(self.sms // 2)

    def _change(self, sms: int) -> None:
        self.sms = sms
        # Batches that are fetched already, or on their way, had the budget before.
        self._stale = len(self._pending) + _AHEAD

"""SIGINT and SIGTERM: the running step is finished, then the run ends in order.

[Note: who gets the signal] Ctrl-C reaches every process of the terminal, a scheduler's
SIGTERM perhaps one rank only; the ranks agree behind each step, or those that go on
would wait for the others. A second SIGINT ends the process at once.
"""

import signal
import threading
import time
from types import FrameType
from typing import Any

from ssdtrain.train.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)
IMPATIENT_S = 1.0
"""A launcher forwards the terminal's SIGINT within this time; a person is slower."""


class StoppedError(Exception):
    """A signal ended the run behind a finished step."""

    def __init__(self, signum: int, leg: str, steps: int, checkpoint: bool) -> None:
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name} after step {steps}, {leg}")
        self.signum = signum
        self.checkpoint = checkpoint
        """Whether there is a checkpoint to go on from."""


class Stop:
    """A context manager that turns the first signal into a flag; restores the handlers.

    Outside the main thread it stays out of the way: signals do what they did.
    """

    def __init__(self) -> None:
        self._signum = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def agreed(self, ranks: Ranks) -> int:
        """Return the signal that any rank got, 0 for none; every rank gets the same
        answer."""
        return ranks.largest(self._signum)

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *failure: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signum:
            self._signum, self._since = signum, now
        elif signum == signal.SIGINT and now - self._since > IMPATIENT_S:
            raise KeyboardInterrupt

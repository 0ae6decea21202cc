"""SIGINT and SIGTERM: the running step is finished, then the run ends in order.

[Note: who gets the signal] Ctrl-C reaches every process of the terminal, a scheduler's
SIGTERM perhaps one rank only; the ranks agree after each step, or those that go on
would wait for the others. A second SIGINT ends the process at once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ssdtrain.train.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STDERR = 2
IMPATIENT_S = 1.0
"""A launcher forwards the terminal's SIGINT within this time; a person is slower."""


class StoppedError(Exception):
    """A signal ended the run after a finished step."""

    def __init__(self, signum: int, leg: str, steps: int, checkpoint: bool) -> None:
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name} after step {steps}, {leg}")
        self.signum = signum
        self.checkpoint = checkpoint
        """Whether there is a checkpoint to go on from."""


class Stop:
    """Turns the first signal into a flag, and restores the handlers; outside the main
    thread signals do what they did."""

    def __init__(
        self, *, told_fd: int | None = None, beside: Callable[[str], str] = str
    ) -> None:
        """`told_fd`: where a line says at once that the step is finished first;
        `beside`: how it is written where a live line stands (`Terminal.beside`)."""
        self._told_fd = told_fd
        self._beside = beside
        self._signum = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def agreed(self, ranks: Ranks) -> int:
        """Return the signal that any rank got, 0 for none, on every rank."""
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
            self._tell(signum)
        elif signum == signal.SIGINT and now - self._since > IMPATIENT_S:
            raise KeyboardInterrupt

    def _tell(self, signum: int) -> None:
        if self._told_fd is None:
            return
        again = ", again ends it at once" if signum == signal.SIGINT else ""
        text = f"ssdtrain: {signal.Signals(signum).name}: finishing the step{again}\n"
        # Unbuffered: the signal may have come in the middle of a print.
        os.write(self._told_fd, self._beside(text).encode())

"""Processes that simulate what a search will ask for, before it asks.

[Note: helpers]
A search decides by what it has simulated, one candidate after the other, so that the
same profile gives the same plan. But it often knows what it will probably ask for next:
the neighbours of a point, the next point of a grid, the change after this one. Helpers
are forked from the search's process, which has one thread, and work on that on other
cores. What they find is remembered as if it had been simulated here, and what is not
there yet is simulated here: neither their number nor their speed changes a plan.
(tests/ssdtrain/plan/test_helpers.py)
"""

import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any

NUM_AHEAD = 2
"""Tasks that a helper has at one time: it begins the next one by itself."""
MOST_HELPERS = 6
CORES_EACH = 3
"""Of the cores, one in so many gets a helper: training needs the others."""


def num_helpers() -> int:
    """Return how many helpers this machine has room for."""
    cores = len(os.sched_getaffinity(0))
    return min(MOST_HELPERS, max(0, cores // CORES_EACH - 1))


class _Helper:
    """One process, as its parent sees it."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self.pipe = pipe
        self.tasks: deque[Hashable] = deque()
        """That it has, in order."""


class Helpers:
    """Works on tasks beside this process. With a count of 0 it does nothing."""

    def __init__(
        self,
        work: Callable[[Any], Any],
        take: Callable[[Any], None],
        count: int,
    ) -> None:
        """
        Args:
            work: does a task, in a helper; what it returns must be small.
            take: is given that, here.
            count: number of processes.
        """
        self._work = work
        self._take = take
        self._helpers: list[_Helper] = []
        self._begun: set[Hashable] = set()
        self._waiting: deque[Hashable] = deque()
        for _ in range(count):
            try:
                self._helpers.append(self._fork())
            except OSError:  # no more processes, or files, may be had here
                break

    @property
    def num_tasks(self) -> int:
        """Number of tasks that keep all of them busy."""
        return NUM_AHEAD * len(self._helpers)

    def __enter__(self) -> "Helpers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        while self._helpers:
            self._end(self._helpers[-1])

    def ask(self, tasks: Iterable[Hashable]) -> None:
        """Have these done, the first ones first, and nothing else that is not begun."""
        if self._helpers:
            self._waiting = deque(tasks)
            self._receive(0.0)
            self._send()

    def settle(self, task: Hashable) -> None:
        """Wait for a task if a helper works on it; else see that none begins it."""
        if not self._helpers:
            return
        self._receive(0.0)
        while any(task in helper.tasks for helper in self._helpers):
            self._send()
            self._receive(None)
        self._begun.add(task)
        self._send()

    def _send(self) -> None:
        for helper in [*self._helpers]:
            while self._waiting and len(helper.tasks) < NUM_AHEAD:
                task = self._waiting.popleft()
                if task in self._begun:
                    continue
                try:
                    helper.pipe.send(task)
                except OSError:
                    self._end(helper)
                    break
                self._begun.add(task)
                helper.tasks.append(task)

    def _receive(self, timeout_s: float | None) -> None:
        busy = {helper.pipe: helper for helper in self._helpers if helper.tasks}
        for pipe in wait([*busy], timeout_s) if busy else ():
            helper = busy[pipe]  # type: ignore[index]
            try:
                self._take(helper.pipe.recv())
            except (EOFError, OSError):
                self._end(helper)
                continue
            helper.tasks.popleft()

    def _end(self, helper: _Helper) -> None:
        """It ends, or has ended; what it had is done here."""
        self._helpers.remove(helper)
        helper.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(helper.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(helper.pid, 0)

    def _fork(self) -> _Helper:
        ours, theirs = Pipe()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid:
            theirs.close()
            return _Helper(pid, ours)
        try:
            ours.close()
            # A pipe of an earlier one is open here, too: they end one by one, the
            # youngest first, when their parent has ended.
            self._helpers.clear()
            self._serve(theirs)
        finally:
            os._exit(0)

    def _serve(self, pipe: Connection) -> None:
        """Do tasks until the parent ends."""
        # Whoever waits for the end of the parent's standard error does not wait for us.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(EOFError, OSError):
            while True:
                pipe.send(self._work(pipe.recv()))

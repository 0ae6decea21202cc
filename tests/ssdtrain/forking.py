"""Forked children that end by themselves, and threads that hold a lock meanwhile."""

import contextlib
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

LIMIT_S = 120
"""Reached by what hangs alone, however busy the machine."""
OK, WRONG, RAISED = 0, 3, 4


def end_soon() -> None:
    """End this child by a signal if it hangs."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)


def started(run: Callable[[], int], fork: Callable[[], int] = os.fork) -> int:
    """The number of a fork that calls `run`; killed if it takes too long."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = fork()
    if child == 0:
        code = 70
        end_soon()
        try:
            code = run()
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return child


def ended(child: int) -> int:
    """Its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(run: Callable[[], int], fork: Callable[[], int] = os.fork) -> int:
    """The exit code of a fork that calls `run`."""
    return ended(started(run, fork))


@contextlib.contextmanager
def held_by_a_thread(lock: Any) -> Iterator[None]:
    taken, go, parent = threading.Event(), threading.Event(), os.getpid()

    def hold() -> None:
        with lock:
            taken.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        if os.getpid() == parent:  # the child has no such thread
            go.set()
            thread.join()

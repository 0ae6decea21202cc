"""Which process made something, asked before its locks, threads and files are used.

[Note: after a fork]
`os.fork` copies the memory of a process and one of its threads. In the child the
others are gone, while their pools believe them idle; locks that they held stay held;
and files are shared with the parent, slots and all. So whatever works with threads,
locks or slots compares the process id first, before any lock, and a child of the
session's process keeps its tensors: it trains as if ssdtrain were not there, and what
was moved before the fork cannot be had in it. The few locks that a child must take are
new ones in it. The id is compared, and no hook of `os.fork` used, because C forks too.
(tests/ssdtrain/transfer/test_fork.py)
"""

import os
import threading

from ssdtrain.errors import ForkedError


class Owner:
    """The process that made something."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is another process: a forked child."""
        return os.getpid() != self.pid

    def check(self, what: str) -> None:
        """Raise unless this process made it.

        Raises:
            ForkedError: names both processes.
        """
        if self.is_elsewhere:
            raise ForkedError(
                f"{what} belongs to process {self.pid}, this is process "
                f"{os.getpid()}, a fork of it; call ssdtrain.offload() in the child, "
                "or fork before it."
            )


class ForkedLock:
    """A lock that is free in a forked child, whoever held it at the fork."""

    def __init__(self) -> None:
        self._owner, self._lock = Owner(), threading.Lock()

    def here(self) -> threading.Lock:
        """The lock of this process, to be taken by `with`."""
        if self._owner.is_elsewhere:
            self._owner, self._lock = Owner(), threading.Lock()
        return self._lock

"""Threads that know which process they belong to: see [Note: after a fork]."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ssdtrain.forks import Owner

P = ParamSpec("P")
T = TypeVar("T")


class Workers(ThreadPoolExecutor):
    """A pool of threads that a forked child can neither use nor wait for."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, thread_name_prefix=name)
        self._owner = Owner()

    def submit(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """As the base class.

        Raises:
            ForkedError: the threads are in another process.
        """
        self._owner.check("a transfer")
        return super().submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As the base class; in a forked child there is nothing to end."""
        if not self._owner.is_elsewhere:
            super().shutdown(wait, cancel_futures=cancel_futures)

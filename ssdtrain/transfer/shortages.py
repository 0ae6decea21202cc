"""Who hears of it before torch's caching allocator says that there is no memory left.

Torch lets an observer be attached that is called behind the last try, in whichever
thread asked for memory, and never takes it off. So one is attached for the process,
once somebody wants to hear, and it asks who still does. What a listener raises takes
the place of torch's own error, in a backward as well.
(tests/ssdtrain/transfer/test_shortages.py)
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

Observer = Callable[[int, int, int, int], None]
"""Device, bytes that were asked for, bytes that the device has, bytes free on it."""


def attach(observer: Observer) -> None:
    """Attach it to torch's allocator; nothing where this torch cannot."""
    own: Any = torch._C
    to = getattr(own, "_cuda_attach_out_of_memory_observer", None)
    if to is not None:
        to(observer)


class Shortages:
    """The listeners of one process."""

    def __init__(self, attach: Callable[[Observer], None] = attach) -> None:
        self._attach = attach
        self._is_attached = False
        self._lock = threading.Lock()
        self._listeners: dict[int, tuple[int, Callable[[int], None]]] = {}
        self._numbers = itertools.count()

    def listen(self, device: int, hear: Callable[[int], None]) -> Callable[[], None]:
        """Have `hear` called with the bytes that were asked for on this device and are
        not there. It may raise.

        Returns:
            What ends it. Idempotent.
        """
        with self._lock:
            if not self._is_attached:
                self._attach(self._observe)
                self._is_attached = True
            number = next(self._numbers)
            self._listeners[number] = device, hear
        return lambda: self._listeners.pop(number, None) and None

    def _observe(self, device: int, asked: int, total: int, free: int) -> None:
        for own, hear in list(self._listeners.values()):
            if own == device:
                hear(asked)


SHORTAGES = Shortages()
"""Of this process."""

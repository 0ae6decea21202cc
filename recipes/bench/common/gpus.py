"""The GPUs of a host, which share what is to be measured."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


def visible_gpus() -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` calls those that this process sees."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [each.strip() for each in told.split(",") if each.strip()]
    return named or [str(each) for each in range(torch.cuda.device_count())]


class Gpus:
    """Those that several things share, each of which has its own while it runs."""

    def __init__(self, names: Sequence[str]) -> None:
        """names: as of `visible_gpus`; one that is named twice does two at a time."""
        self._num = len(names)
        self._free = list(names)
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lent(self, num: int) -> Iterator[list[str]]:
        """So many, once they are free.

        Raises:
            ValueError: there are not so many.
        """
        if num > self._num:
            raise ValueError(f"expects {num} GPUs, has {self._num}")
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= num)
            taken = [self._free.pop(0) for _ in range(num)]
        try:
            yield taken
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


def on_gpus(
    names: Sequence[str], work: Callable[[str, str], None], gpus: Sequence[str]
) -> None:
    """Call `work` with every name and the GPU that is free for it; "": a CPU.

    gpus: one that is named twice does two things at a time.
    """
    shared = Gpus(gpus)

    def one(name: str) -> None:
        with shared.lent(1) as (gpu,):
            work(name, gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(one, names))

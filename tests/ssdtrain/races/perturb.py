"""Random delays wherever order could matter, and poison where memory is let go.

Nothing of this is product code: it patches the facade of a device for the length of a
`with` block. Also used on a GPU by `recipes/bench/safety/sanitize.py`.
"""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from ssdtrain.cache.window import ReleaseWindow
from ssdtrain.storage.posix import PosixStorage
from ssdtrain.transfer.cuda import CudaDevice
from ssdtrain.transfer.device import CpuDevice, CpuEvent

POISON = 0xCC
# Clock cycles of a GPU in a second, roughly: no sleep has to be exact.
CYCLES_PER_S = 2_000_000_000
# Longest random sleep of a GPU stream.
LONGEST_ON_GPU_S = 0.001


class Delays:
    """Draws a delay at every point; most are none, some are long."""

    def __init__(self, seed: int, longest_s: float = 0.003) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._longest_s = longest_s
        self.num = 0

    def draw(self) -> float:
        with self._lock:
            self.num += 1
            return self._random.choice((0, 0, 0.1, 1)) * self._random.random()

    def sleep(self) -> None:
        seconds = self.draw() * self._longest_s
        if seconds:
            time.sleep(seconds)


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def perturbed(
    seed: int, longest_s: float = 0.003, always_on_gpu_s: float = 0.0
) -> Iterator[Delays]:
    """Delays in every copy, every event, every read and write of a storage.

    Args:
        always_on_gpu_s: the copy streams of a GPU sleep so long before every copy, on
            top of the random delay. Tens of milliseconds: compute that does not wait
            for a copy is certainly ahead of it.
    """
    delays = Delays(seed, longest_s)
    reach = CpuEvent.reach
    write, read = PosixStorage.write, PosixStorage.read

    def late_copy(call: Any, row: str) -> Any:
        def copy(self: Any, *args: Any) -> Any:
            getattr(self, row).submit(delays.sleep)
            return call(self, *args)

        return copy

    def late_copy_on_gpu(call: Any, row: str) -> Any:
        def copy(self: Any, *args: Any) -> Any:
            with torch.cuda.stream(getattr(self, row)):
                seconds = always_on_gpu_s + delays.draw() * LONGEST_ON_GPU_S
                torch.cuda._sleep(1 + int(seconds * CYCLES_PER_S))
            return call(self, *args)

        return copy

    def reached(self: CpuEvent) -> None:
        delays.sleep()
        reach(self)

    def slow(call: Any) -> Any:
        def late(self: PosixStorage, *args: Any) -> None:
            delays.sleep()
            call(self, *args)
            delays.sleep()

        return late

    with contextlib.ExitStack() as stack:
        for name, row in (("copy_out", "_store"), ("copy_in", "_load")):
            for kind, late in ((CpuDevice, late_copy), (CudaDevice, late_copy_on_gpu)):
                made = late(getattr(kind, name), row)
                stack.enter_context(patched(kind, name, made))
        stack.enter_context(patched(CpuEvent, "reach", reached))
        stack.enter_context(patched(PosixStorage, "write", slow(write)))
        stack.enter_context(patched(PosixStorage, "read", slow(read)))
        yield delays


def num_holders(data: torch.Tensor) -> int:
    """References to a tensor's storage, this call's own not counted."""
    storage = data.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


@contextlib.contextmanager
def poisoned() -> Iterator[list[int]]:
    """What the window lets go of, and nobody else holds, is overwritten first.

    On a GPU the overwriting stands in compute order, as a new owner's would.
    """
    release = ReleaseWindow._release
    counts: list[int] = []

    def poisoning(self: ReleaseWindow, number: int) -> int:
        data = self._leavers[number].data
        freed = release(self, number)
        if num_holders(data) == 1:
            data.fill_(POISON)
            counts.append(data.numel())
        return freed

    with patched(ReleaseWindow, "_release", poisoning):
        yield counts


@contextlib.contextmanager
def missing_event() -> Iterator[None]:
    """The bug of Megatron#7398 planted: compute does not wait for a copy."""

    def forget(self: Any, event: Any, order: object = None, **_: object) -> None:
        """The edge is gone."""

    with patched(CpuDevice, "wait", forget), patched(CudaDevice, "wait", forget):
        yield

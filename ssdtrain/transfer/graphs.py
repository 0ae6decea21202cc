"""Copies that are nodes of a CUDA graph.

[Note: captured copies]
What runs in a capture is written down, and done at every replay without our Python. So
a captured copy goes to pinned memory of its own, which lives as long as the model. The
graph's edges alone keep the order: compute waits for the copy out before the memory is
used again, and for the copy in before it is read. Both copy streams are joined with
compute where a captured backward ends, and where the capture does (engines/graphs.py).
Each edge takes microseconds in every replay. So compute does not wait for a copy if it
has waited for a later one of its direction, and copies in that start together have one.
An event that was recorded before a capture may be neither asked nor waited for.
(tests/ssdtrain/engines/test_graphs.py)
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ssdtrain.storage.slots import round_up
from ssdtrain.transfer.device import Device, GraphEvent
from ssdtrain.transfer.native import library
from ssdtrain.transfer.pinned import GRAIN_BYTES
from ssdtrain.transfer.transfers import TransferState

SLAB_BYTES = 256 * 1024 * 1024
RELAXED = 2
"""cudaStreamCaptureModeRelaxed"""


class GraphTransfer:
    """The pinned memory of one tensor of one graph."""

    state = TransferState.STAGED
    """It goes nowhere else."""

    def __init__(self, name: str, memory: Tensor, copied: GraphEvent) -> None:
        self.name = name
        self.memory = memory
        self.copied = copied

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.memory.numel()


class GraphLoad:
    """A copy in, inside a graph; keeps the memory that it fills until somebody waits,
    or the capture is over."""

    def __init__(self, event: GraphEvent, target: Tensor) -> None:
        self._event = event
        self.target = target

    def wait(self, device: Device) -> None:
        """Order compute after it."""
        device.wait(self._event)

    settle = wait


class GraphCopies:
    """Stores and loads of all captures of a session, and the memory they go to."""

    def __init__(self, device: Device, cap_bytes: int) -> None:
        self._device = device
        self._cap_bytes = cap_bytes
        self._turn = 0
        """Rises where the copy streams are joined."""
        self._pending: dict[bool, GraphEvent] = {}
        """The last copy out, and in, since then."""
        self._num_copies = 0
        self._passed: dict[bool, dict[object, int]] = {True: {}, False: {}}
        """By direction and compute order: the last copy that it has waited for."""
        self.slabs: list[Tensor] = []
        """Pinned memory, torch's own: it is given back when nobody holds it."""
        self._left = 0
        self.used_bytes = 0

    def store(self, source: Tensor, name: str) -> GraphTransfer | None:
        """Copy bytes (1-D uint8) out; None where no memory can be had."""
        memory = self._take(source.numel())
        if memory is None:
            return None
        event = self._device.copy_out(source, memory, [self._device.now()])
        return GraphTransfer(name, memory, self._noted(event, outwards=True))

    def load(
        self, transfers: Sequence[GraphTransfer], targets: Sequence[Tensor]
    ) -> list[GraphLoad]:
        """Copy the bytes into the targets, after compute; whoever waits for one of
        these loads waits for all."""
        after = [self._device.now()]
        order = self._device.order()
        for transfer, target in zip(transfers, targets, strict=True):
            if not transfer.copied.is_behind(order):
                after.append(transfer.copied.event)
            event = self._device.copy_in(transfer.memory, target, after)
            after = []  # the copies follow one another
        noted = self._noted(event, outwards=False)
        return [GraphLoad(noted, target) for target in targets]

    def join(self) -> None:
        """Order compute after all copies; no event is waited for any more."""
        pending, self._pending = self._pending, {}
        try:
            for event in pending.values():
                self._device.wait(event)
        finally:
            self._turn += 1
            for passed in self._passed.values():
                passed.clear()

    def _noted(self, event: Any, *, outwards: bool) -> GraphEvent:
        turn = self._turn
        self._num_copies += 1
        passed = self._passed[outwards]
        found = GraphEvent(event, lambda: self._turn != turn, self._num_copies, passed)
        self._pending[outwards] = found
        return found

    def _take(self, num_bytes: int) -> Tensor | None:
        size = round_up(num_bytes, GRAIN_BYTES)
        if self.used_bytes + size > self._cap_bytes:
            return None
        if size > self._left:
            slab = self._pinned(max(size, min(SLAB_BYTES, self._cap_bytes)))
            if slab is None:
                return None
            self.slabs.append(slab)
            self._left = slab.numel()
        slab = self.slabs[-1]
        start = slab.numel() - self._left
        self._left -= size
        self.used_bytes += size
        return slab[start : start + num_bytes]

    def _pinned(self, num_bytes: int) -> Tensor | None:
        pins = self._device.torch_device.type == "cuda"
        try:
            with relaxed_capture():
                return torch.empty(
                    num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pins
                )
        except RuntimeError:  # there is no more
            return None


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """While a graph is captured, CUDA refuses this thread whatever might wait for the
    device, pinning memory and looking at older events among it. Neither does here."""
    exchange = _exchange() if torch.cuda.is_initialized() else None
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _exchange() -> Callable[..., int] | None:
    """The runtime's function; torch binds it for its own allocators only (2.11 to
    2.13)."""
    found = library()
    if found is None:
        return None
    function = found.cudaThreadExchangeStreamCaptureMode
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return function

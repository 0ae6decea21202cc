"""Copies to pinned buffers that the same tensor of every step uses again.

The offloader's transfers serve any tensor, any target and any failure, at some hundred
Python calls each. Under a compiled plan the same tensors leave in every step. So each
has a pinned buffer of its own, shaped like the tensor, with the events of its way
there and back. What is left for a step is the calls into CUDA.

[Note: a buffer used again]
The copy out of a new tensor into an old buffer must not overtake the last copy in from
it, nor a copy in its own copy out. All copies of a way follow one another in one order,
the store's or the load's, and are numbered in it. So an order that has waited for a
copy of the other one has waited for all before it. In a settled step the first copy out
waits for the last copy in of the step before, the first copy in for the last copy out,
and the others for nothing.
(tests/ssdtrain/transfer/test_places.py, tests/pitfalls/test_order.py)

[Note: batches]
What compute records or waits for costs it microseconds. So copies in that a plan starts
at one moment are a batch: memory for all is taken first, then one event is recorded
that the load order waits for, and one more after the last copy. They end in the order
of their starts, so a stream that has waited for a batch has waited for all before it.
That is remembered of the stream that waited last, and until the next copy out: a stream
that was destroyed may leave its number to another. An event that buffers share may be
recorded again by one of them; whoever waits for it waits for a later copy of the order.
(tests/pitfalls/test_order.py)
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ssdtrain.counters import Fallback
from ssdtrain.errors import ConfigError
from ssdtrain.storage.clibrary import BuildError
from ssdtrain.transfer.cuda import CudaDevice
from ssdtrain.transfer.device import Device, Event
from ssdtrain.transfer.graphs import GraphTransfer
from ssdtrain.transfer.native import (
    IN_BYTES,
    TO_DEVICE,
    TO_HOST,
    Native,
    Ordering,
    library,
)
from ssdtrain.transfer.offloader import Offloader
from ssdtrain.transfer.pinned import Buffer, PinnedPool
from ssdtrain.transfer.transfers import Transfer


class PinnedBuffer:
    """Pinned memory for one tensor of every step, and the events of its copies."""

    __slots__ = (
        "batch",
        "buffer",
        "copied",
        "copied_id",
        "loaded",
        "loaded_id",
        "memory",
        "number",
    )

    def __init__(self, buffer: Buffer, memory: Tensor) -> None:
        self.buffer = buffer
        self.memory = memory
        """The buffer's bytes, with dtype, shape and strides of the tensor."""
        self.copied: Any = None
        """End of the last copy out."""
        self.loaded: Any = None
        """End of the last copy in, or of a later one; None before the first."""
        self.number = 0
        """Of the last copy out in the store's order."""
        self.batch = 0
        """Number of the batch of the last copy in: [Note: batches]."""
        self.copied_id = self.loaded_id = 0
        """CUDA's numbers of these events; 0: there are none."""


class PinnedCopy:
    """One tensor in a pinned buffer, from its copy out until nobody needs the bytes."""

    __slots__ = ("free", "pinned")

    def __init__(self, pinned: PinnedBuffer, free: list[PinnedBuffer]) -> None:
        self.pinned = pinned
        self.free = free
        """Where the buffer goes when nobody needs the bytes."""

    @property
    def copied(self) -> Event:
        """End of the copy out."""
        return self.pinned.copied  # type: ignore[no-any-return]


class Arrival:
    """A copy in that nobody has waited for; keeps the memory that it fills."""

    __slots__ = ("_copies", "_pinned", "target")

    def __init__(self, target: Tensor, pinned: PinnedBuffer, copies: "Copies") -> None:
        self.target = target
        self._pinned = pinned
        self._copies = copies

    def wait(self, device: Device) -> None:
        """Order the caller's compute after the copy."""
        self._copies.arrive(self._pinned)

    settle = wait


class Copies:
    """Copies between a device and buffers, by the device's own calls: on a CPU, and
    where there is no C compiler."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._reached = device.now()

    def out(self, pinned: PinnedBuffer, source: Tensor) -> object:
        """Start to copy a tensor out, after the caller's present compute. Return where
        that is: `Device.order`."""
        device = self._device
        order, after = device.order(), [device.now()]
        if pinned.loaded is not None:
            after.append(pinned.loaded)
        pinned.copied = device.copy_out(source, pinned.memory, after)
        return order

    def back(self, buffers: Sequence[PinnedBuffer]) -> list[Tensor]:
        """Start to copy the bytes into new tensors on the device, as one batch."""
        device = self._device
        targets = [room_for(pinned, device.torch_device) for pinned in buffers]
        now = device.now()
        for pinned, target in zip(buffers, targets, strict=True):
            pinned.loaded = device.copy_in(pinned.memory, target, [pinned.copied, now])
        return targets

    def arrive(self, pinned: PinnedBuffer) -> None:
        """Order the caller's compute after the copy in."""
        if pinned.loaded is None:
            return  # it has: an interrupt has what is dead buried once more
        self._device.wait(pinned.loaded)
        if not self._device.is_capturing() and pinned.loaded.query():
            # And so is its copy out. A buffer outlives many steps; events are some
            # objects each that Python's collector would count as old.
            pinned.copied, pinned.loaded = self._reached, None

    def quiesce(self) -> None:
        """Wait until no copy is under way."""
        self._device.quiesce()


class CudaCopies(Copies):
    """In C, with as few calls as CUDA needs, and events that are recorded again and
    again. A copy that is watched goes the device's own way."""

    _device: CudaDevice

    def __init__(self, device: CudaDevice, native: Native) -> None:
        super().__init__(device)
        self._torch_device = device.torch_device
        self._native = native
        self._store_id: int = device.store_stream.cuda_stream
        self._load_id: int = device.load_stream.cuda_stream
        self._current: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        # Compute, where a copy out or in may start. Whoever waits for an event waits
        # for what it was recorded behind then, so one serves all copies of a way.
        self._ready, self._ready_id = device.event()
        self._wanted, self._wanted_id = device.event()
        self._number = 0
        """Of the last copy out."""
        self._load_behind = 0
        """Of the last copy out that the load order is after."""
        self._batch = 0
        """Number of the last batch in."""
        self._store_behind = 0
        """Of the last batch in that the store order is after."""
        self._behind = 0, 0
        """CUDA's number of the stream that waited last, and for which batch."""

    def out(self, pinned: PinnedBuffer, source: Tensor) -> object:
        """See `Copies`."""
        device = self._device
        order = device.order()
        self._behind = 0, 0
        self._number = pinned.number = self._number + 1
        if device.is_watching or not device.is_current:
            super().out(pinned, source)
            pinned.copied_id = pinned.copied.cuda_event
            return order
        if not pinned.copied_id:
            pinned.copied, pinned.copied_id = device.event()
        memory, behind = pinned.memory, pinned.batch
        between = Ordering(
            TO_HOST,
            self._ready_id,
            self._current(device.index),
            self._store_id,
            pinned.loaded_id if behind > self._store_behind else 0,
            pinned.copied_id,
        )
        part = memory.data_ptr(), source.data_ptr(), memory.nbytes
        self._native.batch(between, (part,))
        self._store_behind = max(self._store_behind, behind)
        return order

    def back(self, buffers: Sequence[PinnedBuffer]) -> list[Tensor]:
        """See `Copies`."""
        device, last = self._device, buffers[-1]
        self._batch = batch = self._batch + 1
        if device.is_watching or not device.is_current:
            targets = super().back(buffers)
            done = last.loaded  # it stands for the batch
            for pinned in buffers:
                pinned.loaded, pinned.loaded_id = done, done.cuda_event
                pinned.batch = batch
            return targets
        targets = [room_for(pinned, self._torch_device) for pinned in buffers]
        if not last.loaded_id:
            last.loaded, last.loaded_id = device.event()
        newest = max(buffers, key=attrgetter("number"))
        parts = [
            (target.data_ptr(), pinned.memory.data_ptr(), pinned.memory.nbytes)
            for pinned, target in zip(buffers, targets, strict=True)
        ]
        between = Ordering(
            TO_DEVICE,
            self._wanted_id,
            self._current(device.index),
            self._load_id,
            newest.copied_id if newest.number > self._load_behind else 0,
            last.loaded_id,
        )
        self._native.batch(between, parts)
        self._load_behind = max(self._load_behind, newest.number)
        for pinned in buffers:
            pinned.loaded, pinned.loaded_id = last.loaded, last.loaded_id
            pinned.batch = batch
        return targets

    def arrive(self, pinned: PinnedBuffer) -> None:
        """See `Copies`."""
        device = self._device
        stream = self._current(device.index)
        if self._behind[0] == stream and pinned.batch <= self._behind[1]:
            return
        device.wait(pinned.loaded)
        if not device.has_captured:  # waits inside a capture are left out
            self._behind = stream, pinned.batch


def room_for(pinned: PinnedBuffer, device: torch.device) -> Tensor:
    """A new tensor like the one that is in the buffer."""
    memory = pinned.memory
    return torch.empty_strided(
        memory.shape, memory.stride(), dtype=memory.dtype, device=device
    )


def copies_of(
    device: Device,
    fall_back: Callable[[Fallback, str], None],
    *,
    loads_in_pieces: bool = False,
) -> Copies:
    """The copies of a device.

    Args:
        device: whose copies.
        fall_back: told why they are not made in C.
        loads_in_pieces: whether others copy to the device while plans do, and wait: see
            [Note: others' small copies] in native.py.
    """
    runtime = library() if isinstance(device, CudaDevice) else None
    if not isinstance(device, CudaDevice) or runtime is None:
        return Copies(device)
    try:
        native = Native(runtime, device, IN_BYTES if loads_in_pieces else None)
    except (BuildError, ConfigError, OSError) as error:
        fall_back(Fallback.COPIES_FROM_PYTHON, f": {error}")
        return Copies(device)
    return CudaCopies(device, native)


def buffer_for(pool: PinnedPool, tensor: Tensor) -> PinnedBuffer | None:
    """A new buffer for tensors like this dense one; None when the pool is full."""
    buffer = pool.take(tensor.nbytes)
    if buffer is None:
        return None
    flat = buffer.memory[: tensor.nbytes].view(tensor.dtype)
    pinned = PinnedBuffer(buffer, flat.as_strided(tensor.shape, tensor.stride()))
    if buffer.busy:
        buffer.settle()
    return pinned


def discard(
    offloader: Offloader, transfer: Transfer | PinnedCopy | GraphTransfer
) -> None:
    """Nobody needs the bytes any more. A graph's replays do."""
    if type(transfer) is PinnedCopy:
        transfer.free.append(transfer.pinned)
    elif type(transfer) is not GraphTransfer:
        offloader.discard(transfer)  # type: ignore[arg-type]


def fits_buffer(pinned: PinnedBuffer, tensor: Tensor) -> bool:
    """Whether a tensor can be copied into the buffer byte for byte."""
    memory = pinned.memory
    return (
        memory.dtype is tensor.dtype
        and memory.shape == tensor.shape
        and memory.stride() == tensor.stride()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def refitted(
    pool: PinnedPool, pinned: PinnedBuffer, tensor: Tensor
) -> PinnedBuffer | None:
    """The buffer for a tensor of another size; a larger one where it is too small, and
    None, with the buffer given back, where there is no room or the tensor has gaps."""
    num_bytes = tensor.nbytes
    dense = bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
    if not dense or tensor.is_conj() or tensor.is_neg():
        give_back(pool, pinned)
        return None
    if num_bytes > pinned.buffer.capacity_bytes:
        give_back(pool, pinned)
        return buffer_for(pool, tensor)
    flat = pinned.buffer.memory[:num_bytes].view(tensor.dtype)
    pinned.memory = flat.as_strided(tensor.shape, tensor.stride())
    return pinned


def give_back(pool: PinnedPool, pinned: PinnedBuffer) -> None:
    """The buffer's memory is the pool's again."""
    busy = [event for event in (pinned.copied, pinned.loaded) if event is not None]
    pinned.buffer.busy.extend(busy)
    pool.give(pinned.buffer)

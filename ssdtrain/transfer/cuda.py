"""A GPU: the three orders of device.py as CUDA streams.

The small contexts here stand in for generators at every wait. There the host's time
counts: a GPU with small layers waits for it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ssdtrain.transfer.allocator import GROWING, SHORTAGES
from ssdtrain.transfer.device import (
    TRIMMED_SHARE,
    Copy,
    CpuDevice,
    CpuEvent,
    Device,
    Event,
    GraphEvent,
    MemoryLevel,
    Stalled,
    is_timed_step,
)

Timed = tuple[torch.cuda.Event, torch.cuda.Event]


class CurrentStream:
    """Looks up the current stream of a device without making an object each time."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._known: dict[int, torch.cuda.Stream] = {}

    def get(self) -> torch.cuda.Stream:
        """The current stream."""
        number, device, kind = torch._C._cuda_getCurrentStream(self._index)
        stream = self._known.get(number)
        if stream is None:
            stream = torch.cuda.Stream(
                stream_id=number, device_index=device, device_type=kind
            )
            self._known[number] = stream
        return stream


class Stall:
    """Two timed events on a stream, around what may leave it idle."""

    __slots__ = ("_before", "_stalls", "_stream")

    def __init__(self, stream: torch.cuda.Stream, stalls: "Stalls") -> None:
        self._stream = stream
        self._stalls = stalls

    def __enter__(self) -> None:
        self._before = self._stalls.event()
        self._before.record(self._stream)

    def __exit__(self, *error: object) -> None:
        behind = self._stalls.event()
        behind.record(self._stream)
        self._stalls.pairs.append((self._before, behind))


class Stalls:
    """The account that stalls of any thread go to."""

    def __init__(self) -> None:
        self.pairs: list[Timed] = []
        self._free: list[torch.cuda.Event] = []

    def event(self) -> torch.cuda.Event:
        """A timed event; one that was read before, if there is any."""
        try:
            return self._free.pop()
        except IndexError:  # not asked first: another thread may take the last one
            return torch.cuda.Event(enable_timing=True)

    def cut(self) -> list[Timed]:
        """The account so far; a new one begins."""
        pairs, self.pairs = self.pairs, []
        return pairs

    def sum_ms(self, pairs: list[Timed]) -> float:
        """Device time between the events of each pair, which are then used again."""
        for _, behind in pairs:
            behind.synchronize()
        found = sum(before.elapsed_time(behind) for before, behind in pairs)
        self.reuse(pairs)
        return float(found)

    def reuse(self, pairs: list[Timed]) -> None:
        """These have been read."""
        for pair in pairs:
            self._free.extend(pair)
        pairs.clear()


CYCLES_PER_MS = 1.8e6
"""Of a device's clock, more or less."""


class CudaDevice(Device):
    """CUDA streams of its own; the compute stream is whatever is current at the
    call."""

    runs_beside = True

    def __init__(self, device: torch.device) -> None:
        # An index costs torch far less to look up than a device.
        self.index: int = (
            torch.cuda.current_device() if device.index is None else device.index
        )
        self.torch_device = torch.device("cuda", self.index)
        self._store = self.store_stream = torch.cuda.Stream(self.torch_device)
        self._load = self.load_stream = torch.cuda.Stream(self.torch_device)
        self.store_side = torch.cuda.Stream(self.torch_device)
        self.load_side = torch.cuda.Stream(self.torch_device)
        """Of pieces of copies: [Note: others' small copies] in native.py."""
        self._compute = CurrentStream(self.index)
        # Past the wrappers in Python, which cost more than the call.
        self._wait_for: Callable[[Any, Any], None] = torch._C._CudaEventBase.wait
        self._stalls, self._out_stalls = Stalls(), Stalls()
        self._runtime = torch.cuda.cudart()
        self._copies: list[tuple[bool, int, torch.cuda.Event, torch.cuda.Event]] = []
        self.is_watching = False
        """Whether copies are measured."""
        self._num_cuts = 0
        self._times_waits = True
        self._stalled = Stalled(0.0, 0.0)
        self.has_captured = False
        """Whether a graph was ever captured."""

    def now(self) -> torch.cuda.Event:
        """An event recorded on the current stream."""
        event = torch.cuda.Event()
        event.record(self._compute.get())
        return event

    @property
    def is_current(self) -> bool:
        """Whether the calling thread works on this device."""
        return torch._C._cuda_getDevice() == self.index

    def order(self) -> torch.cuda.Stream:
        """The current stream."""
        return self._compute.get()

    def event(self) -> tuple[torch.cuda.Event, int]:
        """An event that was recorded, and its number in CUDA."""
        event = self.now()
        return event, event.cuda_event

    def wait(
        self, event: Event, order: object = None, *, outwards: bool = False
    ) -> None:
        """Make the compute stream wait, with its idle time measured on the device."""
        if isinstance(event, CpuEvent):  # ended by a thread: see transfer/direct.py
            with self.stall():
                event.synchronize()
            return
        stream: Any = self._compute.get() if order is None else order
        if type(event) is GraphEvent:
            if not event.is_behind(stream):
                self._wait_for(event.event, stream)
                event.passes(stream)
            return
        if self.has_captured and self.is_capturing():
            return  # of before the capture, which began behind a synchronization
        if not self._times_waits:
            self._wait_for(event, stream)
            return
        with Stall(stream, self._out_stalls if outwards else self._stalls):
            stream.wait_event(event)

    def ends_in_order(self, copied: Event) -> bool:
        """True of events of the store stream, which no capture nor thread has made."""
        return not (isinstance(copied, CpuEvent | GraphEvent) or self.has_captured)

    def hold(self, ms: float) -> None:
        """A kernel that waits: torch has no public one (2.11 to 2.13)."""
        torch.cuda._sleep(int(ms * CYCLES_PER_MS))

    def is_capturing(self) -> bool:
        """Whether the current stream is captured; True at least once: captures count
        from then on."""
        found: bool = torch.cuda.is_current_stream_capturing()
        self.has_captured |= found
        return found

    def quiesce(self) -> None:
        """Wait for all streams of copies."""
        self._store.synchronize()
        self._load.synchronize()
        # An interrupt may have kept those streams from waiting for a piece.
        self.store_side.synchronize()
        self.load_side.synchronize()

    def stall(self) -> AbstractContextManager[None]:
        """Device time between the two ends of the block on the compute stream."""
        return Stall(self._compute.get(), self._stalls)

    def pin(self, buffer: torch.Tensor) -> bool:
        """cudaHostRegister the whole buffer.

        It is filled before, by all of torch's threads: the driver would have one thread
        make the pages that nobody has touched.
        """
        buffer.zero_()
        num_bytes = buffer.untyped_storage().nbytes()
        with torch.cuda.device(self.index):  # a thread begins on the first device
            result = self._runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0)
        return int(result) == 0

    def unpin(self, address: int) -> None:
        """cudaHostUnregister, which waits for the copies that are under way (seen on an
        H100)."""
        self._runtime.cudaHostUnregister(address)

    def cut_stalls(self) -> Callable[[], Stalled]:
        """Device time between the two events around each wait.

        The events cost the host as much as the wait. So after the first steps one in
        `TIMED_STEPS` is measured, and its sum stands for those until the next.
        """
        own, out = self._stalls.cut(), self._out_stalls.cut()
        timed = self._times_waits
        self._num_cuts += 1
        self._times_waits = is_timed_step(self._num_cuts)

        def total() -> Stalled:
            if timed:
                out_ms = self._out_stalls.sum_ms(out)
                self._stalled = Stalled(self._stalls.sum_ms(own) + out_ms, out_ms)
            return self._stalled

        return total

    def memory(self) -> MemoryLevel:
        """Read the caching allocator."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        allocated = stats["allocated_bytes"]["all"]
        reserved = stats["reserved_bytes"]["all"]
        return MemoryLevel(
            allocated["current"],
            reserved["current"],
            allocated["peak"],
            reserved["peak"],
            stats["inactive_split_bytes"]["all"]["current"],
            stats.get("num_alloc_retries", 0),
        )

    def capacity_bytes(self) -> int:
        """What is free, and what the caching allocator has; within the fraction that
        `torch.cuda.set_per_process_memory_fraction` allows."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        own = free + torch.cuda.memory_reserved(self.torch_device)
        fraction = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        return int(min(own, fraction * total))

    def limit_memory(self, num_bytes: int) -> Callable[[], None]:
        """By `torch.cuda.set_per_process_memory_fraction`, never above its value."""
        device = self.torch_device
        before = torch.cuda.get_per_process_memory_fraction(device)
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = min(before, num_bytes / total)
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        return lambda: torch.cuda.set_per_process_memory_fraction(before, device)

    def hear_shortages(self, hear: Callable[[int], None]) -> Callable[[], None]:
        """See `Shortages`."""
        return SHORTAGES.listen(self.index, hear)

    def trim(self, share: float = TRIMMED_SHARE) -> bool:
        """Empty the cache of an allocator that has most of what it may take."""
        reserved = torch.cuda.memory_reserved(self.torch_device)
        is_short = reserved > share * self.capacity_bytes()
        if not is_short or torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.empty_cache()
        return True

    def grow_segments(self) -> tuple[str, Callable[[], None]]:
        """See [Note: growing segments] in allocator.py."""
        if self.has_captured or torch.cuda.is_current_stream_capturing():
            return "a CUDA graph was captured", lambda: None
        return GROWING.use()

    def reset_peak(self) -> None:
        """Reset the caching allocator's peak statistics."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def watch_copies(self) -> None:
        """Time each copy on its stream from now on."""
        self.is_watching = True
        self._copies = []

    def watched_copies(self) -> list[Copy]:
        """Device time of the copies since `watch_copies`."""
        copies, self._copies, self.is_watching = self._copies, [], False
        found = []
        for outwards, num_bytes, start, done in copies:
            done.synchronize()
            found.append(Copy(outwards, num_bytes, start.elapsed_time(done)))
        return found

    def _copy(
        self,
        outwards: bool,
        source: torch.Tensor,
        target: torch.Tensor,
        after: Sequence[Event],
    ) -> torch.cuda.Event:
        """By torch. Planned copies to host memory and back have a shorter way in C:
        `CudaCopies` in copies.py."""
        stream = self._store if outwards else self._load
        done = torch.cuda.Event(enable_timing=self.is_watching)
        with torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(event)  # type: ignore[arg-type]
            if self.is_watching:
                start = torch.cuda.Event(enable_timing=True)
                start.record(stream)
                self._copies.append((outwards, source.numel(), start, done))
            target.copy_(source, non_blocking=True)
            done.record(stream)
        return done


def open_device(device: torch.device) -> Device:
    """The facade for a torch device.

    Raises:
        ValueError: neither a CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise ValueError(
        f"ssdtrain moves activations of cpu and cuda devices, got {device}; "
        "move the model to one of them."
    )

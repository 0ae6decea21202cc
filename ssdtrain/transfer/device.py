"""A device as the cache sees it: one compute order, one store and one load order.

`CudaDevice` maps the three orders to CUDA streams; `CpuDevice` to the calling
thread and two worker threads, under the same contract, so that everything above
runs and is tested without a GPU.

[Note: stream-ordered release]
The host runs far ahead of a GPU. A tensor released when the host *sees* its copy
done is released after the whole forward was enqueued, and frees nothing. So the
compute order itself waits for the copy (`wait`), and the reference is dropped right
behind that wait: the caching allocator hands the block to later compute work, which
by then is ordered after the copy. No host wait, no `record_stream`.
(tests/ssdtrain/transfer/test_places.py, tests/ssdtrain/cache/test_window.py)
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ssdtrain.forks import Owner
from ssdtrain.transfer.segments import GROWING
from ssdtrain.transfer.shortages import SHORTAGES
from ssdtrain.transfer.streams import CurrentStream, OnStream, Stall, Stalls
from ssdtrain.transfer.workers import Workers

FIRST_TIMED_STEPS = 6
TIMED_STEPS = 8
"""Of so many steps one has its waits timed on the device."""
TRIMMED_SHARE = 0.7
"""Of the memory that the process may take: below it, what is cached harms nobody."""


class Event(Protocol):
    """A point in one of the three orders."""

    def query(self) -> bool:
        """Whether it has been reached."""

    def synchronize(self) -> None:
        """Block the calling thread until it has been reached."""


class MemoryLevel(NamedTuple):
    """What the caching allocator holds now and held at most, in bytes."""

    allocated_bytes: int
    reserved_bytes: int
    max_allocated_bytes: int
    max_reserved_bytes: int
    torn_bytes: int = 0
    """Free parts of blocks whose other parts are in use."""
    num_retries: int = 0
    """How often the allocator had to empty its cache to serve a request."""


class Copy(NamedTuple):
    """One measured copy."""

    outwards: bool
    """From the device to the host."""
    num_bytes: int
    ms: float


class GraphEvent:
    """A point inside a CUDA graph. See [Note: captured copies] in graphs.py."""

    __slots__ = ("_is_joined", "_number", "_passed", "event")

    def __init__(
        self,
        event: Any,
        is_joined: Callable[[], bool],
        number: int = 0,
        passed: dict[object, int] | None = None,
    ) -> None:
        """A point behind a copy.

        Args:
            event: the device's own.
            is_joined: whether every compute order is behind it.
            number: of its copy in the order of copies that end one after the other.
            passed: of them, by compute order: the last that it is behind.
        """
        self.event = event
        self._is_joined = is_joined
        self._number = number
        self._passed = {} if passed is None else passed

    def query(self) -> bool:
        """Whether nobody needs to wait for it any more."""
        return self._is_joined()

    def is_behind(self, order: object) -> bool:
        """Whether this compute order is behind it already: the edge would be one more
        that the graph has."""
        return self._is_joined() or self._passed.get(order, -1) >= self._number

    def passes(self, order: object) -> None:
        """This compute order now waits for it, and so for the copies before it."""
        self._passed[order] = max(self._number, self._passed.get(order, -1))

    def synchronize(self) -> None:
        """The host never waits for what is only written down."""


class Stalled(NamedTuple):
    """Compute's waits of one step, in ms."""

    ms: float
    """All of them."""
    out_ms: float
    """Of these: for copies out."""


class Device(Protocol):
    """Copies in both directions beside compute, ordered by events."""

    torch_device: torch.device
    runs_beside: bool
    """Whether compute runs beside the calling thread."""

    def now(self) -> Event:
        """The present end of the caller's compute order."""

    def order(self) -> object:
        """The caller's compute order itself, to be given back to `wait`."""

    def wait(
        self, event: Event, order: object = None, *, outwards: bool = False
    ) -> None:
        """Let compute (the caller's order, or `order`) wait for `event`.

        Args:
            event: what is waited for.
            order: whose wait it is; None: the caller's.
            outwards: it is a copy out, for the account of waits.
        """

    def ends_in_order(self, copied: Event) -> bool:
        """Whether this is the end of a copy out behind those that were started before,
        so that whoever waits for it has waited for them."""

    def hold(self, ms: float) -> None:
        """Keep compute from what comes next for about so long."""

    def is_capturing(self) -> bool:
        """Whether the caller's compute order is captured into a graph."""

    def copy_out(
        self, source: torch.Tensor, buffer: torch.Tensor, after: Sequence[Event]
    ) -> Event:
        """Copy device bytes to host bytes in store order, behind `after`."""

    def copy_in(
        self, buffer: torch.Tensor, target: torch.Tensor, after: Sequence[Event]
    ) -> Event:
        """Copy host bytes to device bytes in load order, behind `after`."""

    def pin(self, buffer: torch.Tensor) -> bool:
        """Page-lock host memory for direct transfers; False if refused."""

    def unpin(self, address: int) -> None:
        """Undo `pin` of what begins there, before the memory is given back. Called in
        any thread, wherever the last tensor on it dies."""

    def quiesce(self) -> None:
        """Wait until no copy is under way: for what an interrupt left without owner."""

    def stall(self) -> AbstractContextManager[None]:
        """Around anything that may leave compute idle: measures for how long.

        Includes waits of the host, but only the part that outlasts queued work.
        """

    def cut_stalls(self) -> Callable[[], Stalled]:
        """Start a new account of compute's waits.

        Returns:
            Gives the old account's sums; calling it waits for the device.
        """

    def memory(self) -> MemoryLevel | None:
        """The allocator's level; None where there is none."""

    def capacity_bytes(self) -> int | None:
        """Memory that this process may take; None where nobody counts it."""

    def limit_memory(self, num_bytes: int) -> Callable[[], None]:
        """Let the caching allocator take no more than this; it frees what it caches
        before it fails. Returns what undoes it."""

    def hear_shortages(self, hear: Callable[[int], None]) -> Callable[[], None]:
        """Have `hear` called with the bytes that were asked for, before the allocator
        fails for want of them; what it raises is raised instead.

        Returns:
            What ends it. Idempotent.
        """

    def trim(self, share: float = TRIMMED_SHARE) -> bool:
        """Give back what the allocator caches, if it has more of what the process may
        take than this share.

        Returns:
            Whether it has, and gave it back.
        """

    def grow_segments(self) -> tuple[str, Callable[[], None]]:
        """Have the allocator take segments that grow from now on.

        Returns:
            Why it does not, "" if it does; and what undoes it, to be called once.
        """

    def reset_peak(self) -> None:
        """Let the allocator's maxima start again from the present level."""

    def time_waits(self, num_steps: int) -> None:
        """Time compute's waits in this step and those behind it, so many in all,
        whatever `cut_stalls` would leave out."""

    def watch_copies(self) -> None:
        """Measure every copy from now on, until `watched_copies`."""

    def watched_copies(self) -> list["Copy"]:
        """What was measured since `watch_copies`; waits for the copies, and ends it."""

    def close(self) -> None:
        """Wait for all copies and stop. Idempotent."""


def is_timed_step(number: int) -> bool:
    """Whether what is timed by events on a GPU is timed in this step of a session."""
    return number < FIRST_TIMED_STEPS or number % TIMED_STEPS == 0


class CpuEvent:
    """A point in a worker thread's order; carries the failure of its copy, if any."""

    def __init__(self, done: bool = False) -> None:
        self._flag = threading.Event()
        self._owner = Owner()
        self.error: BaseException | None = None
        if done:
            self._flag.set()

    def reach(self) -> None:
        """Mark as reached."""
        self._flag.set()

    def query(self) -> bool:
        """Whether it has been reached."""
        return self._flag.is_set()

    def synchronize(self) -> None:
        """Block until reached; raise what the copy raised.

        Raises:
            ForkedError: the thread that would reach it is in another process.
        """
        if not self._flag.is_set():
            self._owner.check("a copy under way")
            self._flag.wait()
        if self.error is not None:
            raise self.error


class CpuDevice:
    """Compute is the calling thread; each copy direction is one FIFO thread."""

    runs_beside = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._store = Workers(1, "ssdtrain-store")
        self._load = Workers(1, "ssdtrain-load")
        self._stall_ns = self._out_ns = 0
        self._copies: list[Copy] | None = None

    def now(self) -> CpuEvent:
        """Reached already: CPU operators are synchronous."""
        return CpuEvent(done=True)

    def order(self) -> object:
        """The calling thread is the only compute order."""
        return None

    def wait(
        self, event: Event, order: object = None, *, outwards: bool = False
    ) -> None:
        """Block the calling thread."""
        before_ns = self._stall_ns
        try:
            with self.stall():
                event.synchronize()
        finally:
            if outwards:
                self._out_ns += self._stall_ns - before_ns

    def ends_in_order(self, copied: Event) -> bool:
        """False: each copy says by itself whether it has failed."""
        return False

    def hold(self, ms: float) -> None:
        """Nothing: the CPU computes what its program says at once."""

    def is_capturing(self) -> bool:
        """There are no graphs."""
        return False

    def copy_out(
        self, source: torch.Tensor, buffer: torch.Tensor, after: Sequence[Event]
    ) -> CpuEvent:
        """Copy on the store thread."""
        return self._copy(True, source, buffer, after)

    def copy_in(
        self, buffer: torch.Tensor, target: torch.Tensor, after: Sequence[Event]
    ) -> CpuEvent:
        """Copy on the load thread."""
        return self._copy(False, buffer, target, after)

    def pin(self, buffer: torch.Tensor) -> bool:
        """Nothing to do: the CPU reads any memory."""
        return True

    def unpin(self, address: int) -> None:
        """Nothing to undo."""

    def quiesce(self) -> None:
        """Each thread works in order: what comes last ends last."""
        for worker in (self._store, self._load):
            worker.submit(lambda: None).result()

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Wall time of the calling thread."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self._stall_ns += time.monotonic_ns() - start

    def cut_stalls(self) -> Callable[[], Stalled]:
        """Wall time spent in `stall`."""
        found = Stalled(self._stall_ns / 1e6, self._out_ns / 1e6)
        self._stall_ns = self._out_ns = 0
        return lambda: found

    def memory(self) -> None:
        """CPU tensors have no allocator statistics."""

    def capacity_bytes(self) -> None:
        """Nobody counts CPU tensors."""

    def limit_memory(self, num_bytes: int) -> Callable[[], None]:
        """CPU tensors have no caching allocator."""
        return lambda: None

    def hear_shortages(self, hear: Callable[[int], None]) -> Callable[[], None]:
        """Nobody counts CPU tensors."""
        return lambda: None

    def trim(self, share: float = TRIMMED_SHARE) -> bool:
        """Nothing is cached."""
        return False

    def grow_segments(self) -> tuple[str, Callable[[], None]]:
        """There are none."""
        return "a CPU has no segments", lambda: None

    def reset_peak(self) -> None:
        """Nothing to reset."""

    def time_waits(self, num_steps: int) -> None:
        """All are timed."""

    def watch_copies(self) -> None:
        """Wall time of each copy from now on."""
        self._copies = []

    def watched_copies(self) -> list[Copy]:
        """Copies that have ended since `watch_copies`."""
        copies, self._copies = self._copies or [], None
        return copies

    def close(self) -> None:
        """Finish queued copies and join both threads."""
        self._store.shutdown(wait=True)
        self._load.shutdown(wait=True)

    def _copy(
        self,
        outwards: bool,
        source: torch.Tensor,
        target: torch.Tensor,
        after: Sequence[Event],
    ) -> CpuEvent:
        done = CpuEvent()
        both = [source, target]

        def run() -> None:
            try:
                for event in after:
                    event.synchronize()
                start, copies = time.monotonic_ns(), self._copies
                # torch's copy, though it starts an OpenMP team for each of the two
                # threads: with copies of one thread (memmove), steps beside other work
                # on two cores took 2 to 7 times as long. Probably these teams let
                # OpenMP see that cores are short, so that compute's own sleeps at its
                # barriers instead of spinning on what a copy needs.
                both[1].copy_(both[0])
                if copies is not None:
                    ms = (time.monotonic_ns() - start) / 1e6
                    copies.append(Copy(outwards, both[0].numel(), ms))
            except BaseException as error:
                done.error = error
            # The thread holds this function a moment longer than the copy lasts.
            both.clear()
            done.reach()

        (self._store if outwards else self._load).submit(run)
        return done


CYCLES_PER_MS = 1.8e6
"""Of a device's clock, more or less."""


class CudaDevice:
    """CUDA streams of its own; the compute stream is whatever is current at the
    call."""

    runs_beside = True

    def __init__(self, device: torch.device) -> None:
        # An index costs torch far less to look up than a device.
        self._index: int = (
            torch.cuda.current_device() if device.index is None else device.index
        )
        self.torch_device = torch.device("cuda", self._index)
        self._store = self.store_stream = torch.cuda.Stream(self.torch_device)
        self._load = self.load_stream = torch.cuda.Stream(self.torch_device)
        self.store_side = torch.cuda.Stream(self.torch_device)
        self.load_side = torch.cuda.Stream(self.torch_device)
        """Of pieces of copies: [Note: others' small copies] in pieces.py."""
        self._compute = CurrentStream(self._index)
        # Past the wrappers in Python, which cost more than the call.
        self._wait_for: Callable[[Any, Any], None] = torch._C._CudaEventBase.wait
        self._stalls, self._out_stalls = Stalls(), Stalls()
        self._runtime = torch.cuda.cudart()
        self._copies: list[tuple[bool, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._watching = False
        self._num_cuts = 0
        self._times_waits = True
        self._num_timed = 0
        """Steps, this one included, in which somebody must know the waits."""
        self._stalled = Stalled(0.0, 0.0)
        self._captures = False
        """Whether a graph was ever captured."""

    def now(self) -> torch.cuda.Event:
        """An event recorded on the current stream."""
        event = torch.cuda.Event()
        event.record(self._compute.get())
        return event

    @property
    def index(self) -> int:
        """Number of the device."""
        return self._index

    @property
    def is_current(self) -> bool:
        """Whether the calling thread works on this device."""
        return torch._C._cuda_getDevice() == self._index

    @property
    def has_captured(self) -> bool:
        """Whether a graph was ever captured."""
        return self._captures

    @property
    def is_watching(self) -> bool:
        """Whether copies are measured."""
        return self._watching

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
        if self._captures and self.is_capturing():
            return  # of before the capture, which began behind a synchronization
        if not self._times_waits:
            self._wait_for(event, stream)
            return
        with Stall(stream, self._out_stalls if outwards else self._stalls):
            stream.wait_event(event)

    def ends_in_order(self, copied: Event) -> bool:
        """True of events of the store stream, which no capture nor thread has made."""
        return not (isinstance(copied, CpuEvent | GraphEvent) or self._captures)

    def hold(self, ms: float) -> None:
        """A kernel that waits: torch has no public one (2.11 to 2.13)."""
        torch.cuda._sleep(int(ms * CYCLES_PER_MS))

    def is_capturing(self) -> bool:
        """Whether the current stream is captured; True at least once: captures count
        from then on."""
        found: bool = torch.cuda.is_current_stream_capturing()
        self._captures |= found
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

    def copy_out(
        self, source: torch.Tensor, buffer: torch.Tensor, after: Sequence[Event]
    ) -> torch.cuda.Event:
        """Copy on the store stream."""
        return self._copy(True, source, buffer, after)

    def copy_in(
        self, buffer: torch.Tensor, target: torch.Tensor, after: Sequence[Event]
    ) -> torch.cuda.Event:
        """Copy on the load stream."""
        return self._copy(False, buffer, target, after)

    def pin(self, buffer: torch.Tensor) -> bool:
        """cudaHostRegister the whole buffer.

        It is filled before, by all of torch's threads: the driver would have one thread
        make the pages that nobody has touched.
        """
        buffer.zero_()
        num_bytes = buffer.untyped_storage().nbytes()
        with torch.cuda.device(self._index):  # a thread begins on the first device
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
        self._num_timed = max(0, self._num_timed - 1)
        self._times_waits = self._num_timed > 0 or is_timed_step(self._num_cuts)

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
        """See shortages.py."""
        return SHORTAGES.listen(self._index, hear)

    def trim(self, share: float = TRIMMED_SHARE) -> bool:
        """Empty the cache of an allocator that has most of what it may take."""
        reserved = torch.cuda.memory_reserved(self.torch_device)
        is_short = reserved > share * self.capacity_bytes()
        if not is_short or torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.empty_cache()
        return True

    def grow_segments(self) -> tuple[str, Callable[[], None]]:
        """See [Note: growing segments] in segments.py."""
        if self._captures or torch.cuda.is_current_stream_capturing():
            return "a CUDA graph was captured", lambda: None
        return GROWING.use()

    def reset_peak(self) -> None:
        """Reset the caching allocator's peak statistics."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def time_waits(self, num_steps: int) -> None:
        """By two events around each."""
        self._num_timed, self._times_waits = num_steps, True

    def watch_copies(self) -> None:
        """Time each copy on its stream from now on."""
        self._watching = True
        self._copies = []

    def watched_copies(self) -> list[Copy]:
        """Device time of the copies since `watch_copies`."""
        copies, self._copies, self._watching = self._copies, [], False
        found = []
        for outwards, num_bytes, start, done in copies:
            done.synchronize()
            found.append(Copy(outwards, num_bytes, start.elapsed_time(done)))
        return found

    def close(self) -> None:
        """Wait for all streams of copies."""
        self.quiesce()

    def _copy(
        self,
        outwards: bool,
        source: torch.Tensor,
        target: torch.Tensor,
        after: Sequence[Event],
    ) -> torch.cuda.Event:
        stream = self._store if outwards else self._load
        done = torch.cuda.Event(enable_timing=self._watching)
        with OnStream(stream, self._index):
            for event in after:
                stream.wait_event(event)  # type: ignore[arg-type]
            if self._watching:
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

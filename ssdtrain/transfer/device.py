"""A device as the cache sees it: one compute order, one store and one load order.

`CudaDevice` (cuda.py) maps the three orders to CUDA streams; `CpuDevice` to the calling
thread and two worker threads, under the same contract, so that everything above
runs and is tested without a GPU.

[Note: stream-ordered release]
The host runs far ahead of a GPU. A tensor released when the host *sees* its copy
done is released after the whole forward was enqueued, and frees nothing. So the
compute order itself waits for the copy (`wait`), and the reference is dropped right
after that wait: the caching allocator hands the block to later compute work, which
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
from ssdtrain.transfer.workers import Workers

FIRST_TIMED_STEPS = 6
TIMED_STEPS = 8
"""Of so many steps one has its waits timed on the device."""
TRIMMED_SHARE = 0.7
"""Of the memory that the process may take: below it, what is cached harms nobody."""


def is_timed_step(number: int) -> bool:
    """Whether what is timed by events on a GPU is timed in this step of a session."""
    return number < FIRST_TIMED_STEPS or number % TIMED_STEPS == 0


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


class Stalled(NamedTuple):
    """Compute's waits of one step, in ms."""

    ms: float
    """All of them."""
    out_ms: float
    """Of these: for copies out."""


class GraphEvent:
    """A point inside a CUDA graph. See [Note: captured copies] in graphs.py."""

    __slots__ = ("_is_joined", "_number", "_passed", "event")

    def __init__(
        self,
        event: Any,
        is_joined: Callable[[], bool],
        number: int,
        passed: dict[object, int],
    ) -> None:
        """A point after a copy.

        Args:
            event: the device's own.
            is_joined: whether every compute order has waited for it.
            number: of its copy in the order of copies that end one after the other.
            passed: of them, by compute order: the last that it has waited for.
        """
        self.event = event
        self._is_joined = is_joined
        self._number = number
        self._passed = passed

    def query(self) -> bool:
        """Whether nobody needs to wait for it any more."""
        return self._is_joined()

    def is_behind(self, order: object) -> bool:
        """Whether this compute order has waited for it already: the edge would be one
        more that the graph has."""
        return self._is_joined() or self._passed.get(order, -1) >= self._number

    def passes(self, order: object) -> None:
        """This compute order now waits for it, and so for the copies before it."""
        self._passed[order] = max(self._number, self._passed.get(order, -1))

    def synchronize(self) -> None:
        """The host never waits for what is only written down."""


class Device(Protocol):
    """Copies in both directions while compute runs, ordered by events.

    What a method does by default is right where compute is the calling thread and
    nobody counts memory.
    """

    torch_device: torch.device
    runs_beside: bool = False
    """Whether compute runs next to the calling thread."""

    def now(self) -> Event:
        """The present end of the caller's compute order."""

    def order(self) -> object:
        """The caller's compute order itself, to be given back to `wait`."""
        return None

    def wait(
        self, event: Event, order: object = None, *, outwards: bool = False
    ) -> None:
        """Let compute (the caller's order, or `order`) wait for `event`. outwards: it
        is a copy out, for the account of waits."""

    def ends_in_order(self, copied: Event) -> bool:
        """Whether this is the end of a copy out after those that were started before,
        so that whoever waits for it has waited for them."""
        return False

    def hold(self, ms: float) -> None:
        """Keep compute from what comes next for about so long."""
        return

    def is_capturing(self) -> bool:
        """Whether the caller's compute order is captured into a graph."""
        return False

    def copy_out(
        self, source: torch.Tensor, buffer: torch.Tensor, after: Sequence[Event]
    ) -> Event:
        """Copy device bytes to host bytes in store order, after these events."""
        return self._copy(True, source, buffer, after)

    def copy_in(
        self, buffer: torch.Tensor, target: torch.Tensor, after: Sequence[Event]
    ) -> Event:
        """Copy host bytes to device bytes in load order, after these events."""
        return self._copy(False, buffer, target, after)

    def _copy(
        self,
        outwards: bool,
        source: torch.Tensor,
        target: torch.Tensor,
        after: Sequence[Event],
    ) -> Event:
        """See `copy_out` and `copy_in`."""

    def pin(self, buffer: torch.Tensor) -> bool:
        """Page-lock host memory for direct transfers; False if refused."""
        return True

    def unpin(self, address: int) -> None:
        """Undo `pin` of what begins there, before the memory is given back. Called in
        any thread, wherever the last tensor on it dies."""
        return

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

    def watch_copies(self) -> None:
        """Measure every copy from now on, until `watched_copies`."""

    def watched_copies(self) -> list[Copy]:
        """What was measured since `watch_copies`; waits for the copies, and ends it."""

    def close(self) -> None:
        """Wait for all copies and stop. Idempotent."""
        self.quiesce()

    # -- the caching allocator ----------------------------------------------------

    def memory(self) -> MemoryLevel | None:
        """The allocator's level; None where there is none."""
        return None

    def reset_peak(self) -> None:
        """Let the allocator's maxima start again from the present level."""
        return

    def capacity_bytes(self) -> int | None:
        """Memory that this process may take; None where nobody counts it."""
        return None

    def limit_memory(self, num_bytes: int) -> Callable[[], None]:
        """Let the caching allocator take no more than this; it frees what it caches
        before it fails. Returns what undoes it."""
        return lambda: None

    def hear_shortages(self, hear: Callable[[int], None]) -> Callable[[], None]:
        """Have `hear` called with the bytes that were asked for, before the allocator
        fails for want of them; what it raises is raised instead.

        Returns:
            What ends it. Idempotent.
        """
        return lambda: None

    def trim(self, share: float = TRIMMED_SHARE) -> bool:
        """Give back what the allocator caches, if it has more of what the process may
        take than this share.

        Returns:
            Whether it has, and gave it back.
        """
        return False

    def grow_segments(self) -> tuple[str, Callable[[], None]]:
        """Have the allocator take segments that grow from now on.

        Returns:
            Why it does not, "" if it does; and what undoes it, to be called once.
        """
        return f"a {self.torch_device.type} device has no segments", lambda: None


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


class CpuDevice(Device):
    """Compute is the calling thread; each copy direction is one FIFO thread."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._store = Workers(1, "ssdtrain-store")
        self._load = Workers(1, "ssdtrain-load")
        self._stall_ns = self._out_ns = 0
        self._copies: list[Copy] | None = None

    def now(self) -> CpuEvent:
        """Reached already: CPU operators are synchronous."""
        return CpuEvent(done=True)

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

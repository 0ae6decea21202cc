"""Stores and loads: device > pinned buffer > storage, and back.

One class serves all targets; they differ in when a buffer is drained (`Drain`).

[Note: nothing is lost]
A buffer is given back only when its bytes are on the storage or nobody needs them.
A failed or short write leaves the parcel STAGED in its buffer for good. A failed read
raises `ActivationLostError`; no code path hands out bytes that were not read.
(tests/ssdtrain/transfer/test_faults.py)

[Note: interrupts]
KeyboardInterrupt may come between any two instructions of the main thread. What it
leaves must be found by somebody: a parcel is its owner's before it has anything, so it
is discarded with its owner; a buffer that nobody holds comes back to the pool
(pinned.py). An interrupted copy without an event is waited for with all others.
(tests/ssdtrain/transfer/test_interrupts.py)
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from enum import Enum, auto

import torch

from ssdtrain.counters import Count, Counters, Fallback, Trace
from ssdtrain.errors import ActivationLostError, StorageFullError
from ssdtrain.forks import Owner
from ssdtrain.storage.base import Slot, Storage
from ssdtrain.transfer.device import Device, Event
from ssdtrain.transfer.parcel import Load, Parcel, ParcelOwner, ParcelState
from ssdtrain.transfer.pinned import Buffer, PinnedPool, page_aligned, round_up
from ssdtrain.transfer.workers import Workers

logger = logging.getLogger(__name__)

# Share of the pool in use above which `tiered` starts to drain its oldest parcels.
DRAIN_ABOVE = 0.7
WAIT_SLICE_S = 0.0005


class Drain(Enum):
    """When staged bytes go on to the storage."""

    NEVER = auto()
    AT_ONCE = auto()
    WHEN_FULL = auto()


@dataclass(frozen=True, kw_only=True)
class Meters:
    """Where an offloader reports."""

    counters: Counters
    trace: Trace


class Offloader:
    """Moves parcels. All methods may be called from any thread."""

    def __init__(
        self,
        device: Device,
        pool: PinnedPool,
        storage: Storage | None,
        drain: Drain,
        num_threads: int,
        meters: Meters,
        path: str = "",
    ) -> None:
        """path: how bytes travel and why, one line for the report."""
        self.device = device
        self.pool = pool
        self.storage = storage
        self.drain = drain if storage is not None else Drain.NEVER
        self.path = path
        self._meters = meters
        self._owner = Owner()
        """Asked before any lock: see [Note: after a fork]."""
        self._lock = threading.RLock()
        self._staged: dict[Parcel, None] = {}  # insertion order: oldest first
        self._writing: set[Parcel] = set()  # given to a writer, not ended
        self._recalled: dict[Parcel, None] = {}
        self._gone: dict[Parcel, None] = {}  # discarded, their slots not yet free
        self._warned: set[Fallback] = set()
        self._writers = Workers(num_threads, "ssdtrain-write")
        self._readers = Workers(num_threads, "ssdtrain-read")

    def store(
        self,
        source: torch.Tensor,
        name: str,
        patient: Callable[[], bool],
        owner: ParcelOwner | None = None,
    ) -> Parcel | None:
        """Start to move device bytes (1-D uint8) away.

        While staging is full but draining, waits as long as `patient()` holds. The
        parcel is put into `owner` first: see [Note: interrupts].

        Returns:
            The parcel, or None: counted, and the caller keeps the tensor.
        """
        if self._owner.is_elsewhere:
            return None
        num_bytes, now = source.numel(), self.device.now()
        parcel = Parcel(name, num_bytes, ParcelState.STAGED, None, now)
        if owner is not None:
            owner.parcel = parcel
        buffer = parcel.buffer = self._take_for_store(num_bytes, patient)
        if buffer is None:
            if owner is not None:
                owner.parcel = None
            return None
        after = [now, *buffer.busy]
        parcel.is_starting = True
        parcel.copied = self.device.copy_out(source, buffer.memory[:num_bytes], after)
        parcel.is_starting = False
        buffer.busy.clear()
        with self._lock:
            self._staged[parcel] = None
            if self.drain is Drain.AT_ONCE:
                self._start_write(parcel)
            elif self.drain is Drain.WHEN_FULL:
                self._drain_oldest()
        return parcel

    def send_on(self, parcel: Parcel) -> None:
        """Write a staged parcel to the storage, if there is one, without waiting for
        the pool to run full."""
        if self._owner.is_elsewhere:
            return
        with self._lock:
            idle = parcel.state is ParcelState.STAGED and parcel.write is None
            if self.drain is not Drain.NEVER and idle and parcel.drainable:
                self._start_write(parcel)

    def load(self, parcel: Parcel, target: torch.Tensor) -> Load:
        """Start to bring the bytes back into `target` (1-D uint8 on the device).

        The copy is ordered behind the caller's present compute, where `target`'s
        memory was allocated.

        Raises:
            ForkedError: the bytes were moved by another process.
        """
        self._owner.check(f"the saved tensor {parcel.name}")
        load = Load(target, [self.device.now()])
        with self._lock:
            if parcel.state is ParcelState.STORED and parcel.buffer is None:
                self._recall(parcel, self._take_for_load(parcel.num_bytes))
            if parcel.state in (ParcelState.RECALLING, ParcelState.LOST):
                parcel.loads.append(load)
                if parcel.state is ParcelState.LOST:
                    self._fail_loads(parcel, None)
            else:
                self._cancel_write(parcel)
                self._enqueue(parcel, load)
        return load

    def recall(self, parcel: Parcel) -> bool:
        """Read a stored parcel into a buffer ahead of its load, if one is free."""
        if self._owner.is_elsewhere:
            return False
        with self._lock:
            if parcel.state is not ParcelState.STORED or parcel.buffer is not None:
                return parcel.state is not ParcelState.GONE
            buffer = self.pool.take(parcel.num_bytes, for_load=True)
            if buffer is None:
                return False
            self._recall(parcel, buffer)
            return True

    def discard(self, parcel: Parcel) -> None:
        """Forget the bytes: cancel what has not started, free what is held."""
        if self._owner.is_elsewhere:
            return  # slots are shared with the process that fills them
        with self._lock:
            state, parcel.state = parcel.state, ParcelState.GONE
            self._staged.pop(parcel, None)
            self._recalled.pop(parcel, None)
            if state in (ParcelState.WRITING, ParcelState.RECALLING):
                return  # the worker sees GONE and cleans up
            self._cancel_write(parcel)
            if parcel.write is None:
                self._writing.discard(parcel)
            self._give_buffer(parcel)
            if parcel.slot is not None:
                # By a worker, which no interrupt ends in the middle.
                self._gone[parcel] = None
                self._readers.submit(self._free_gone, parcel)

    def _free_gone(self, parcel: Parcel) -> None:
        with self._lock:
            if self._gone.pop(parcel, self) is None:
                self._free_slot(parcel)

    def settle(self, parcel: Parcel) -> None:
        """Wait until nothing fills a target of this parcel's loads."""
        with self._lock:
            pending = list(parcel.loads)
        for load in pending:
            load.settle(self.device)
        self.device.quiesce()

    def wait_io(self) -> None:
        """Block until every write that was started has ended, and slots are free."""
        if self._owner.is_elsewhere:
            return
        with self._lock:
            writes = [p.write for p in self._writing if p.write is not None]
        wait(writes)
        wait([self._readers.submit(self._free_gone, p) for p in list(self._gone)])

    def close(self) -> None:
        """Finish I/O, join threads, free memory and the storage. Idempotent."""
        if self._owner.is_elsewhere:
            return
        self._writers.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        with self._lock:
            for parcel in [*self._staged, *self._recalled]:
                self._staged.pop(parcel, None)
                self._give_buffer(parcel)
                self._free_slot(parcel)
        self.device.close()
        self.pool.close()
        if self.storage is not None:
            self.storage.close()

    # -- store side ---------------------------------------------------------------

    def _take_for_store(
        self, num_bytes: int, patient: Callable[[], bool]
    ) -> Buffer | None:
        failures = self.pool.pin_failures
        while True:
            buffer = self.pool.take(num_bytes)
            if buffer is not None:
                return buffer
            reason = self._why_not_wait(self.pool.pin_failures > failures, patient)
            if reason is Fallback.KEPT_HOST_FULL:
                # The last write may have ended since the pool was asked.
                buffer = self.pool.take(num_bytes)
            if buffer is None and reason is not None:
                self.fall_back(reason)
            if buffer is not None or reason is not None:
                return buffer
            with self.device.stall():
                self.pool.wait(WAIT_SLICE_S)

    def _why_not_wait(
        self, pin_failed: bool, patient: Callable[[], bool]
    ) -> Fallback | None:
        if pin_failed:
            return Fallback.KEPT_PIN_FAILED
        with self._lock:
            if self.drain is Drain.WHEN_FULL:
                self._drain_oldest()
            draining = bool(self._writing)
        if not draining:
            return Fallback.KEPT_HOST_FULL
        return None if patient() else Fallback.KEPT_BACK_PRESSURE

    def fall_back(self, reason: Fallback, detail: str = "") -> None:
        """Count a fallback; warn the first time."""
        self._meters.counters.fell_back(reason)
        with self._lock:
            first = reason not in self._warned
            self._warned.add(reason)
        if first and reason is not Fallback.KEPT_BACK_PRESSURE:
            logger.warning(
                "ssdtrain: %s%s (gradients stay right; further cases are counted)",
                reason.value,
                detail,
            )

    def _start_write(self, parcel: Parcel) -> None:
        self._writing.add(parcel)
        parcel.write = self._writers.submit(self._write, parcel)

    def _drain_oldest(self) -> None:
        """Send the oldest parcels on until the pool would be below its mark."""
        mark = DRAIN_ABOVE * (self.pool.cap_bytes - self.pool.reserve_bytes)
        leaving = sum(p.num_bytes for p in self._staged if p.write is not None)
        excess = self.pool.used_bytes - leaving - mark
        for parcel in self._staged:
            if excess <= 0:
                return
            if parcel.write is None and parcel.drainable:
                self._start_write(parcel)
                excess -= parcel.num_bytes

    def _cancel_write(self, parcel: Parcel) -> None:
        """Backward is here for this parcel: a write that has not begun is waste."""
        if parcel.write is not None and parcel.write.cancel():
            self._writing.discard(parcel)
            parcel.write = None
            parcel.drainable = False

    def _write(self, parcel: Parcel) -> None:
        """Write a staged parcel to the storage; runs in a thread of the writers."""
        storage = self._need_storage()
        try:
            with self._lock:
                buffer = parcel.buffer
                if parcel.state is not ParcelState.STAGED or buffer is None:
                    return
                parcel.state = ParcelState.WRITING
            try:
                parcel.copied.synchronize()
                start = time.monotonic_ns()
                slot = storage.allocate(parcel.num_bytes)
                try:
                    padded_bytes = _padded(parcel.num_bytes, storage)
                    storage.write(slot, buffer.memory[:padded_bytes])
                except BaseException:
                    storage.free(slot)
                    raise
            except BaseException as error:
                # Also what is not an Exception: nobody else cleans up what is WRITING.
                self._write_failed(parcel, error)
                return
            self._meters.counters.add(Count.WRITTEN, parcel.num_bytes)
            self._meters.trace.add("write", "write", start, parcel.num_bytes)
            with self._lock:
                self._is_stored(parcel, slot)
        finally:
            with self._lock:
                self._writing.discard(parcel)

    def _is_stored(self, parcel: Parcel, slot: Slot) -> None:
        """The storage has the bytes: the buffer is free. The lock is held."""
        parcel.slot = slot
        self._staged.pop(parcel, None)
        self._give_buffer(parcel)
        if parcel.state is ParcelState.GONE:
            self._free_slot(parcel)
        else:
            parcel.state = ParcelState.STORED

    def _write_failed(self, parcel: Parcel, error: BaseException) -> None:
        self.fall_back(why_kept(error), f": {error}")
        with self._lock:
            if parcel.state is ParcelState.GONE:
                self._give_buffer(parcel)
                return
            parcel.state = ParcelState.STAGED
            parcel.drainable = False

    # -- load side ----------------------------------------------------------------

    def _take_for_load(self, num_bytes: int) -> Buffer:
        """A buffer, whatever it takes: the caller's backward cannot go on without."""
        buffer = self.pool.take(num_bytes, for_load=True)
        while buffer is None and self._recalled:
            self._give_buffer(self._recalled.popitem()[0])
            buffer = self.pool.take(num_bytes, for_load=True)
        if buffer is None:
            # Waiting could be for ever (all staging held by failed writes), and
            # plain memory always works, only slower.
            buffer = self._unpinned(num_bytes)
        return buffer

    def _unpinned(self, num_bytes: int) -> Buffer:
        self.fall_back(Fallback.UNPINNED_LOAD)
        return Buffer(page_aligned(round_up(num_bytes)), pooled=False)

    def _recall(self, parcel: Parcel, buffer: Buffer) -> None:
        try:
            parcel.state = ParcelState.RECALLING
            self._readers.submit(self._read, parcel, buffer)
        except BaseException:
            parcel.state = ParcelState.STORED  # nobody else would discard it
            raise

    def _read(self, parcel: Parcel, buffer: Buffer) -> None:
        storage, slot = self._need_storage(), parcel.slot
        error: BaseException | None = None
        start = time.monotonic_ns()
        try:
            buffer.settle()
            if slot is None:
                raise RuntimeError("a stored parcel without a slot")
            storage.read(slot, buffer.memory[: _padded(parcel.num_bytes, storage)])
        except BaseException as caught:
            error = caught
        self._meters.trace.add("read", parcel.name, start, parcel.num_bytes)
        with self._lock:
            parcel.buffer = buffer
            if parcel.state is ParcelState.GONE:
                self._give_buffer(parcel)
                self._free_slot(parcel)
                error = error or RuntimeError("the record was dropped")
            elif error is None:
                parcel.state = ParcelState.STORED
                self._recalled[parcel] = None
                self._meters.counters.add(Count.READ, parcel.num_bytes)
                for load in parcel.loads:
                    self._enqueue(parcel, load)
                parcel.loads.clear()
                return
            else:
                self._give_buffer(parcel)
                parcel.state = ParcelState.LOST
            self._fail_loads(parcel, error)

    def _fail_loads(self, parcel: Parcel, error: BaseException | None) -> None:
        storage = self._need_storage()
        parcel.why_lost = parcel.why_lost or str(error)
        lost = ActivationLostError(
            f"the saved tensor of {parcel.name} ({parcel.num_bytes} bytes) cannot be "
            f"read back from {storage.describe()}, {parcel.slot}: {parcel.why_lost}. "
            "Its gradients cannot be computed; check the device and restart from the "
            "last checkpoint."
        )
        lost.__cause__ = error
        for load in parcel.loads:
            load.failed(lost)
        parcel.loads.clear()

    def _enqueue(self, parcel: Parcel, load: Load) -> None:
        buffer = parcel.buffer
        if buffer is None:
            raise RuntimeError(f"{parcel.name}: no buffer in {parcel.state}")
        source = buffer.memory[: parcel.num_bytes]
        after: list[Event] = [parcel.copied, *load.after]
        try:
            event = self.device.copy_in(source, load.target, after)
        except Exception as error:
            load.failed(error)
            return
        buffer.busy.append(event)
        load.enqueued(event)
        if parcel.state is ParcelState.STORED:
            # The storage still has the bytes: the buffer is free behind the copy.
            self._recalled.pop(parcel, None)
            self._give_buffer(parcel)

    # -- both ---------------------------------------------------------------------

    def _give_buffer(self, parcel: Parcel) -> None:
        buffer, parcel.buffer = parcel.buffer, None
        if buffer is None:
            return
        if parcel.is_starting:
            self.device.quiesce()
        buffer.busy.append(parcel.copied)
        if buffer.pooled:
            self.pool.give(buffer)
        else:
            buffer.settle()

    def _free_slot(self, parcel: Parcel) -> None:
        slot, parcel.slot = parcel.slot, None
        if slot is not None:
            self._need_storage().free(slot)

    def _need_storage(self) -> Storage:
        if self.storage is None:
            raise RuntimeError("a parcel was drained although there is no storage")
        return self.storage


def _padded(num_bytes: int, storage: Storage) -> int:
    grain = storage.alignment_bytes
    return -(-num_bytes // grain) * grain


def why_kept(error: BaseException) -> Fallback:
    """Return what a failed write is counted as."""
    full = isinstance(error, StorageFullError)
    return Fallback.KEPT_STORAGE_FULL if full else Fallback.KEPT_WRITE_FAILED

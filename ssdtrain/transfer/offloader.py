"""Stores and loads: device > pinned buffer > storage, and back.

One class serves all targets; they differ in when a buffer is drained (`Drain`).

[Note: nothing is lost]
A buffer is given back only when its bytes are on the storage or nobody needs them.
A failed or short write leaves the transfer STAGED in its buffer for good. A failed read
raises `ActivationLostError`; no code path hands out bytes that were not read.
(tests/ssdtrain/transfer/test_faults.py)

[Note: interrupts]
KeyboardInterrupt may come between any two instructions of the main thread. What it
leaves must be found by somebody. A transfer is its owner's before it has anything, so
it is discarded with its owner. A buffer that nobody holds comes back to the pool
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
from ssdtrain.storage.slots import round_up
from ssdtrain.transfer.device import Device, Event
from ssdtrain.transfer.pinned import Buffer, PinnedPool, buffer_bytes, page_aligned
from ssdtrain.transfer.transfers import Load, Transfer, TransferOwner, TransferState
from ssdtrain.transfer.workers import Workers

logger = logging.getLogger(__name__)

EXPECTED = (Fallback.KEPT_BACK_PRESSURE, Fallback.RECIPE_UNSAVED)
"""They are counted, and part of what a usual step does."""

# Share of the pool in use above which `tiered` starts to drain its oldest transfers.
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
    """Moves transfers. All methods may be called from any thread."""

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
        self._staged: dict[Transfer, None] = {}  # insertion order: oldest first
        self._writing: set[Transfer] = set()  # given to a writer, not ended
        self._recalled: dict[Transfer, None] = {}
        self._gone: dict[Transfer, None] = {}  # discarded, their slots not yet free
        self._warned: set[Fallback] = set()
        self._writers = Workers(num_threads, "ssdtrain-write")
        self._readers = Workers(num_threads, "ssdtrain-read")

    def store(
        self,
        source: torch.Tensor,
        name: str,
        patient: Callable[[], bool],
        owner: TransferOwner | None = None,
    ) -> Transfer | None:
        """Start to move device bytes (1-D uint8) away.

        While staging is full but draining, waits as long as `patient()` holds. The
        transfer is put into `owner` first: see [Note: interrupts].

        Returns:
            The transfer, or None: counted, and the caller keeps the tensor.
        """
        if self._owner.is_elsewhere:
            return None
        num_bytes, now = source.numel(), self.device.now()
        transfer = Transfer(name, num_bytes, TransferState.STAGED, None, now)
        if owner is not None:
            owner.transfer = transfer
        buffer = transfer.buffer = self._take_for_store(num_bytes, patient)
        if buffer is None:
            if owner is not None:
                owner.transfer = None
            return None
        after = [now, *buffer.busy]
        transfer.is_starting = True
        transfer.copied = self.device.copy_out(source, buffer.memory[:num_bytes], after)
        transfer.is_starting = False
        buffer.busy.clear()
        with self._lock:
            self._staged[transfer] = None
            if self.drain is Drain.AT_ONCE:
                self._start_write(transfer)
            elif self.drain is Drain.WHEN_FULL:
                self._drain_oldest()
        return transfer

    def send_on(self, transfer: Transfer) -> None:
        """Write a staged transfer to the storage, if there is one, without waiting for
        the pool to run full."""
        if self._owner.is_elsewhere:
            return
        with self._lock:
            idle = transfer.state is TransferState.STAGED and transfer.write is None
            if self.drain is not Drain.NEVER and idle and transfer.drainable:
                self._start_write(transfer)

    def load(self, transfer: Transfer, target: torch.Tensor) -> Load:
        """Start to bring the bytes back into `target` (1-D uint8 on the device).

        The copy comes after the caller's present compute, in which `target`'s memory
        was allocated.

        Raises:
            ForkedError: the bytes were moved by another process.
        """
        self._owner.check(f"the saved tensor {transfer.name}")
        load = Load(target, [self.device.now()])
        with self._lock:
            if transfer.state is TransferState.STORED and transfer.buffer is None:
                self._recall(transfer, self._take_for_load(transfer.num_bytes))
            if transfer.state in (TransferState.RECALLING, TransferState.LOST):
                transfer.loads.append(load)
                if transfer.state is TransferState.LOST:
                    self._fail_loads(transfer, None)
            else:
                self._cancel_write(transfer)
                self._enqueue(transfer, load)
        return load

    def recall(self, transfer: Transfer) -> bool:
        """Read a stored transfer into a buffer ahead of its load, if one is free."""
        if self._owner.is_elsewhere:
            return False
        with self._lock:
            state = transfer.state
            if state is not TransferState.STORED or transfer.buffer is not None:
                return state is not TransferState.GONE
            buffer = self.pool.take(transfer.num_bytes, for_load=True)
            if buffer is None:
                return False
            self._recall(transfer, buffer)
            return True

    def discard(self, transfer: Transfer) -> None:
        """Forget the bytes: cancel what has not started, free what is held."""
        if self._owner.is_elsewhere:
            return  # slots are shared with the process that fills them
        with self._lock:
            state, transfer.state = transfer.state, TransferState.GONE
            self._staged.pop(transfer, None)
            self._recalled.pop(transfer, None)
            if state in (TransferState.WRITING, TransferState.RECALLING):
                return  # the worker sees GONE and cleans up
            self._cancel_write(transfer)
            if transfer.write is None:
                self._writing.discard(transfer)
            self._give_buffer(transfer)
            if transfer.slot is not None:
                # By a worker, which no interrupt ends in the middle.
                self._gone[transfer] = None
                self._readers.submit(self._free_gone, transfer)

    def _free_gone(self, transfer: Transfer) -> None:
        with self._lock:
            if self._gone.pop(transfer, self) is None:
                self._free_slot(transfer)

    def settle(self, transfer: Transfer) -> None:
        """Wait until nothing fills a target of this transfer's loads."""
        with self._lock:
            pending = list(transfer.loads)
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
            for transfer in [*self._staged, *self._recalled]:
                self._staged.pop(transfer, None)
                self._give_buffer(transfer)
                self._free_slot(transfer)
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
        """Count a fallback; warn the first time, if it is not `EXPECTED`."""
        self._meters.counters.fell_back(reason)
        with self._lock:
            first = reason not in self._warned
            self._warned.add(reason)
        if first and reason not in EXPECTED:
            logger.warning(
                "ssdtrain: %s%s (gradients stay right; further cases are counted)",
                reason.value,
                detail,
            )

    def _start_write(self, transfer: Transfer) -> None:
        self._writing.add(transfer)
        transfer.write = self._writers.submit(self._write, transfer)

    def _drain_oldest(self) -> None:
        """Send the oldest transfers on until the pool would be below its mark."""
        mark = DRAIN_ABOVE * (self.pool.cap_bytes - self.pool.reserve_bytes)
        leaving = sum(p.num_bytes for p in self._staged if p.write is not None)
        excess = self.pool.used_bytes - leaving - mark
        for transfer in self._staged:
            if excess <= 0:
                return
            if transfer.write is None and transfer.drainable:
                self._start_write(transfer)
                excess -= transfer.num_bytes

    def _cancel_write(self, transfer: Transfer) -> None:
        """Cancel a write that has not begun: backward is here for these bytes."""
        if transfer.write is not None and transfer.write.cancel():
            self._writing.discard(transfer)
            transfer.write = None
            transfer.drainable = False

    def _write(self, transfer: Transfer) -> None:
        """Write staged bytes to the storage; runs in a thread of the writers."""
        storage = self._need_storage()
        try:
            with self._lock:
                buffer = transfer.buffer
                if transfer.state is not TransferState.STAGED or buffer is None:
                    return
                transfer.state = TransferState.WRITING
            try:
                transfer.copied.synchronize()
                start = time.monotonic_ns()
                slot = storage.allocate(transfer.num_bytes)
                try:
                    padded_bytes = round_up(transfer.num_bytes, storage.alignment_bytes)
                    storage.write(slot, buffer.memory[:padded_bytes])
                except BaseException:
                    storage.free(slot)
                    raise
            except BaseException as error:
                # Also what is not an Exception: nobody else cleans up what is WRITING.
                self._write_failed(transfer, error)
                return
            self._meters.counters.add(Count.WRITTEN, transfer.num_bytes)
            self._meters.trace.add("write", "write", start, transfer.num_bytes)
            with self._lock:
                self._is_stored(transfer, slot)
        finally:
            with self._lock:
                self._writing.discard(transfer)

    def _is_stored(self, transfer: Transfer, slot: Slot) -> None:
        """The storage has the bytes: the buffer is free. The lock is held."""
        transfer.slot = slot
        self._staged.pop(transfer, None)
        self._give_buffer(transfer)
        if transfer.state is TransferState.GONE:
            self._free_slot(transfer)
        else:
            transfer.state = TransferState.STORED

    def _write_failed(self, transfer: Transfer, error: BaseException) -> None:
        self.fall_back(why_kept(error), f": {error}")
        with self._lock:
            if transfer.state is TransferState.GONE:
                self._give_buffer(transfer)
                return
            transfer.state = TransferState.STAGED
            transfer.drainable = False

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
            self.fall_back(Fallback.UNPINNED_LOAD)
            buffer = Buffer(page_aligned(buffer_bytes(num_bytes)), pooled=False)
        return buffer

    def _recall(self, transfer: Transfer, buffer: Buffer) -> None:
        try:
            transfer.state = TransferState.RECALLING
            self._readers.submit(self._read, transfer, buffer)
        except BaseException:
            transfer.state = TransferState.STORED  # nobody else would discard it
            raise

    def _read(self, transfer: Transfer, buffer: Buffer) -> None:
        storage, slot = self._need_storage(), transfer.slot
        error: BaseException | None = None
        start = time.monotonic_ns()
        try:
            buffer.settle()
            if slot is None:
                raise RuntimeError("a stored transfer without a slot")
            padded_bytes = round_up(transfer.num_bytes, storage.alignment_bytes)
            storage.read(slot, buffer.memory[:padded_bytes])
        except BaseException as caught:
            error = caught
        self._meters.trace.add("read", transfer.name, start, transfer.num_bytes)
        with self._lock:
            transfer.buffer = buffer
            if transfer.state is TransferState.GONE:
                self._give_buffer(transfer)
                self._free_slot(transfer)
                error = error or RuntimeError("the record was dropped")
            elif error is None:
                transfer.state = TransferState.STORED
                self._recalled[transfer] = None
                for load in transfer.loads:
                    self._enqueue(transfer, load)
                transfer.loads.clear()
                return
            else:
                self._give_buffer(transfer)
                transfer.state = TransferState.LOST
            self._fail_loads(transfer, error)

    def _fail_loads(self, transfer: Transfer, error: BaseException | None) -> None:
        storage = self._need_storage()
        transfer.why_lost = transfer.why_lost or str(error)
        lost = ActivationLostError(
            f"the saved tensor of {transfer.name} ({transfer.num_bytes} bytes) cannot "
            f"be read back from {storage.describe()}, {transfer.slot}: "
            f"{transfer.why_lost}. Its gradients cannot be computed; check the device "
            "and restart from the last checkpoint."
        )
        lost.__cause__ = error
        for load in transfer.loads:
            load.failed(lost)
        transfer.loads.clear()

    def _enqueue(self, transfer: Transfer, load: Load) -> None:
        buffer = transfer.buffer
        if buffer is None:
            raise RuntimeError(f"{transfer.name}: no buffer in {transfer.state}")
        source = buffer.memory[: transfer.num_bytes]
        after: list[Event] = [transfer.copied, *load.after]
        try:
            event = self.device.copy_in(source, load.target, after)
        except Exception as error:
            load.failed(error)
            return
        buffer.busy.append(event)
        load.enqueued(event)
        if transfer.state is TransferState.STORED:
            # The storage still has the bytes: the buffer is free behind the copy.
            self._recalled.pop(transfer, None)
            self._give_buffer(transfer)

    # -- both ---------------------------------------------------------------------

    def _give_buffer(self, transfer: Transfer) -> None:
        buffer, transfer.buffer = transfer.buffer, None
        if buffer is None:
            return
        if transfer.is_starting:
            self.device.quiesce()
        buffer.busy.append(transfer.copied)
        if buffer.pooled:
            self.pool.give(buffer)
        else:
            buffer.settle()

    def _free_slot(self, transfer: Transfer) -> None:
        slot, transfer.slot = transfer.slot, None
        if slot is not None:
            self._need_storage().free(slot)

    def _need_storage(self) -> Storage:
        if self.storage is None:
            raise RuntimeError("a transfer was drained although there is no storage")
        return self.storage


def why_kept(error: BaseException) -> Fallback:
    """Return what a failed write is counted as."""
    full = isinstance(error, StorageFullError)
    return Fallback.KEPT_STORAGE_FULL if full else Fallback.KEPT_WRITE_FAILED

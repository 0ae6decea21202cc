"""Stores and loads without staging: device memory > storage, and back.

For a storage that takes device buffers (`storage.gds.GdsStorage`). What leaves stays
in device memory until the storage has it, so the release window is as long as the
SSD needs, and not as the link to the host does: worth it only where the direct path
is faster than staging (`storage.measure` measures that).

[Note: the host waits]
These transfers are ended by worker threads, not by a stream. So `copied` is an event
of the host, and the device makes the caller wait for it where it would otherwise make
the compute stream wait: at the end of the release window, and at the use of a tensor
that was not prefetched in time. Then a short or failed read is known before any
compute is enqueued that could use its bytes.
"""

import time
from collections import Counter
from collections.abc import Callable
from functools import cached_property

import torch

from ssdtrain.counters import Count
from ssdtrain.transfer.device import CpuEvent, Event
from ssdtrain.transfer.offloader import Drain, Offloader, why_kept
from ssdtrain.transfer.pinned import Buffer
from ssdtrain.transfer.transfers import Load, Transfer, TransferOwner, TransferState


class DirectOffloader(Offloader):
    """An `Offloader` whose transfers go past host memory.

    With `Drain.WHEN_FULL` a transfer goes past it only if the pool has no room: the
    others take the way of `Offloader`, and the oldest are written from there.
    """

    @cached_property
    def _reading(self) -> Counter[Transfer]:
        """Reads that are under way. The lock is held."""
        return Counter()

    def store(
        self,
        source: torch.Tensor,
        name: str,
        patient: Callable[[], bool],
        owner: TransferOwner | None = None,
    ) -> Transfer | None:
        """Start to write device bytes; see `Offloader.store`."""
        if self.drain is Drain.WHEN_FULL:
            transfer = super().store(source, name, patient, owner)
            if transfer is not None:
                return transfer
        if self._owner.is_elsewhere:
            return None
        copied = CpuEvent()
        transfer = Transfer(name, source.numel(), TransferState.STORED, None, copied)
        transfer.is_direct = True
        if owner is not None:
            owner.transfer = transfer
        try:
            transfer.slot = self._need_storage().allocate(source.numel())
        except OSError as error:
            if owner is not None:
                owner.transfer = None
            self.fall_back(why_kept(error), f": {error}")
            return None
        ready = self.device.now()
        with self._lock:
            transfer.state = TransferState.WRITING
            self._writing.add(transfer)
            transfer.write = self._writers.submit(
                self._write_direct, transfer, source, ready, copied
            )
        return transfer

    def load(self, transfer: Transfer, target: torch.Tensor) -> Load:
        """Start to read the bytes into `target`; see `Offloader.load`."""
        if not transfer.is_direct:
            return super().load(transfer, target)
        self._owner.check(f"the saved tensor {transfer.name}")
        load = Load(target, [self.device.now()])
        with self._lock:
            if transfer.state is TransferState.STAGED:
                self._enqueue(transfer, load)
            elif transfer.state is TransferState.LOST:
                transfer.loads.append(load)
                self._fail_loads(transfer, None)
            else:
                self._reading[transfer] += 1
                try:
                    self._readers.submit(self._read_direct, transfer, load)
                except BaseException:
                    self._reading[transfer] -= 1  # nobody else would discard it
                    raise
        return load

    def recall(self, transfer: Transfer) -> bool:
        """Read a transfer of host memory into it ahead; see `Offloader.recall`. For the
        others there is no stage between the storage and the device."""
        if not transfer.is_direct:
            return super().recall(transfer)
        return transfer.state is not TransferState.GONE

    def discard(self, transfer: Transfer) -> None:
        """Forget the bytes; a worker that still has them cleans up."""
        if not transfer.is_direct:
            super().discard(transfer)
            return
        if self._owner.is_elsewhere:
            return  # slots are shared with the process that fills them
        with self._lock:
            state, transfer.state = transfer.state, TransferState.GONE
            if state is not TransferState.WRITING and not self._reading[transfer]:
                self._give_buffer(transfer)
                self._free_slot(transfer)

    def _take_for_store(
        self, num_bytes: int, patient: Callable[[], bool]
    ) -> Buffer | None:
        """A buffer that is free now; None: the bytes need not wait for one."""
        buffer = self.pool.take(num_bytes)
        if buffer is None:
            with self._lock:
                self._drain_oldest()
        return buffer

    def _write_direct(
        self, transfer: Transfer, source: torch.Tensor, ready: Event, copied: CpuEvent
    ) -> None:
        storage, slot = self._need_storage(), transfer.slot
        start = time.monotonic_ns()
        try:
            ready.synchronize()
            if slot is None:
                raise RuntimeError("a transfer without a slot")
            # Else it was discarded meanwhile.
            if transfer.state is TransferState.WRITING:
                storage.write(slot, source)
                num_bytes = transfer.num_bytes
                self._meters.counters.add(Count.WRITTEN, num_bytes)
                self._meters.trace.add("write", transfer.name, start, num_bytes)
            with self._lock:
                self._is_stored(transfer, slot)
        except BaseException as error:
            self.fall_back(why_kept(error), f": {error}")
            self._keep(transfer, source, ready)
        finally:
            with self._lock:
                self._writing.discard(transfer)
            copied.reach()

    def _keep(self, transfer: Transfer, source: torch.Tensor, ready: Event) -> None:
        """What the storage did not take stays where it is: it is still whole, for it is
        released after `copied`, which is reached after this."""
        with self._lock:
            self._free_slot(transfer)
            transfer.buffer, transfer.copied = Buffer(source, pooled=False), ready
            if transfer.state is TransferState.GONE:
                self._give_buffer(transfer)
            else:
                transfer.state = TransferState.STAGED

    def _read_direct(self, transfer: Transfer, load: Load) -> None:
        error: BaseException | None = None
        start = time.monotonic_ns()
        try:
            transfer.copied.synchronize()
            for event in load.after:
                event.synchronize()
            if transfer.state is TransferState.STORED and transfer.slot is not None:
                self._need_storage().read(transfer.slot, load.target)
            elif transfer.state not in (TransferState.STAGED, TransferState.GONE):
                raise RuntimeError("the write has not come to its end")
        except BaseException as caught:
            error = caught
        with self._lock:
            self._reading[transfer] -= 1
            self._end_read(transfer, load, error)
            if not self._reading[transfer]:
                del self._reading[transfer]
                if transfer.state is TransferState.GONE:
                    self._give_buffer(transfer)
                    self._free_slot(transfer)
        self._meters.trace.add("read", transfer.name, start, transfer.num_bytes)

    def _end_read(
        self, transfer: Transfer, load: Load, error: BaseException | None
    ) -> None:
        if transfer.state is TransferState.GONE:
            # Whoever asked is gone too; a result of any kind ends `Load.settle`.
            load.enqueued(CpuEvent(done=True))
        elif error is not None:
            transfer.state = TransferState.LOST
            transfer.loads.append(load)
            self._fail_loads(transfer, error)
        elif transfer.state is TransferState.STAGED:
            self._enqueue(transfer, load)
        else:
            load.enqueued(CpuEvent(done=True))

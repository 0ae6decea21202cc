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

import torch

from ssdtrain.counters import Count
from ssdtrain.storage.base import Storage
from ssdtrain.transfer.device import CpuEvent, Device, Event
from ssdtrain.transfer.offloader import Drain, Meters, Offloader, why_kept
from ssdtrain.transfer.parcel import Load, Parcel, ParcelOwner, ParcelState
from ssdtrain.transfer.pinned import Buffer, PinnedPool


class DirectOffloader(Offloader):
    """An `Offloader` whose parcels go past host memory, unless their write failed: the
    bytes of a failed write are rescued into the pool.

    With `Drain.WHEN_FULL` a parcel goes past it only if the pool has no room: the
    others take the way of `Offloader`, and the oldest are written from there.
    """

    def __init__(
        self,
        device: Device,
        pool: PinnedPool,
        storage: Storage,
        drain: Drain,
        num_threads: int,
        meters: Meters,
        path: str = "",
    ) -> None:
        super().__init__(device, pool, storage, drain, num_threads, meters, path)
        self._reading: Counter[Parcel] = Counter()

    def store(
        self,
        source: torch.Tensor,
        name: str,
        patient: Callable[[], bool],
        owner: ParcelOwner | None = None,
    ) -> Parcel | None:
        """Start to write device bytes; see `Offloader.store`."""
        if self.drain is Drain.WHEN_FULL:
            parcel = super().store(source, name, patient, owner)
            if parcel is not None:
                return parcel
        if self._owner.is_elsewhere:
            return None
        copied = CpuEvent()
        parcel = Parcel(name, source.numel(), ParcelState.STORED, None, copied)
        parcel.is_direct = True
        if owner is not None:
            owner.parcel = parcel
        try:
            parcel.slot = self._need_storage().allocate(source.numel())
        except OSError as error:
            if owner is not None:
                owner.parcel = None
            self.fall_back(why_kept(error), f": {error}")
            return None
        ready = self.device.now()
        with self._lock:
            parcel.state = ParcelState.WRITING
            self._writing.add(parcel)
            parcel.write = self._writers.submit(
                self._write_direct, parcel, source, ready, copied
            )
        return parcel

    def load(self, parcel: Parcel, target: torch.Tensor) -> Load:
        """Start to read the bytes into `target`; see `Offloader.load`."""
        if not parcel.is_direct:
            return super().load(parcel, target)
        self._owner.check(f"the saved tensor {parcel.name}")
        load = Load(target, [self.device.now()])
        with self._lock:
            if parcel.state is ParcelState.STAGED:
                self._enqueue(parcel, load)
            elif parcel.state is ParcelState.LOST:
                parcel.loads.append(load)
                self._fail_loads(parcel, None)
            else:
                self._reading[parcel] += 1
                try:
                    self._readers.submit(self._read_direct, parcel, load)
                except BaseException:
                    self._reading[parcel] -= 1  # nobody else would discard it
                    raise
        return load

    def recall(self, parcel: Parcel) -> bool:
        """Read a parcel of host memory into it ahead; see `Offloader.recall`. For the
        others there is no stage between the storage and the device."""
        if not parcel.is_direct:
            return super().recall(parcel)
        return parcel.state is not ParcelState.GONE

    def discard(self, parcel: Parcel) -> None:
        """Forget the bytes; a worker that still has them cleans up."""
        if not parcel.is_direct:
            super().discard(parcel)
            return
        if self._owner.is_elsewhere:
            return  # slots are shared with the process that fills them
        with self._lock:
            state, parcel.state = parcel.state, ParcelState.GONE
            if state is not ParcelState.WRITING and not self._reading[parcel]:
                self._give_buffer(parcel)
                self._free_slot(parcel)

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
        self, parcel: Parcel, source: torch.Tensor, ready: Event, copied: CpuEvent
    ) -> None:
        storage, slot = self._need_storage(), parcel.slot
        start = time.monotonic_ns()
        try:
            ready.synchronize()
            if slot is None:
                raise RuntimeError("a parcel without a slot")
            if parcel.state is ParcelState.WRITING:  # else it was discarded meanwhile
                storage.write(slot, source)
                self._meters.counters.add(Count.WRITTEN, parcel.num_bytes)
                self._meters.trace.add("write", parcel.name, start, parcel.num_bytes)
            self._written(parcel)
        except BaseException as error:
            self.fall_back(why_kept(error), f": {error}")
            self._rescue_or_lose(parcel, source, ready)
        finally:
            with self._lock:
                self._writing.discard(parcel)
            copied.reach()

    def _written(self, parcel: Parcel) -> None:
        with self._lock:
            if parcel.state is ParcelState.GONE:
                self._free_slot(parcel)
            else:
                parcel.state = ParcelState.STORED

    def _rescue_or_lose(
        self, parcel: Parcel, source: torch.Tensor, ready: Event
    ) -> None:
        try:
            self._rescue(parcel, source, ready)
        except BaseException:
            with self._lock:
                self._free_slot(parcel)
                if parcel.state is not ParcelState.GONE:
                    parcel.state = ParcelState.LOST  # a load says so, with the name
            raise

    def _rescue(self, parcel: Parcel, source: torch.Tensor, ready: Event) -> None:
        """Bring bytes that the storage did not take to host memory: nothing is lost.

        The source is still whole: it is released behind `copied`, reached after this.
        """
        buffer = self.pool.take(parcel.num_bytes, for_load=True)
        buffer = buffer or self._unpinned(parcel.num_bytes)
        buffer.settle()
        staged = buffer.memory[: parcel.num_bytes]
        event = self.device.copy_out(source, staged, [ready])
        event.synchronize()
        with self._lock:
            self._free_slot(parcel)
            parcel.buffer, parcel.copied = buffer, event
            if parcel.state is ParcelState.GONE:
                self._give_buffer(parcel)
            else:
                parcel.state = ParcelState.STAGED

    def _read_direct(self, parcel: Parcel, load: Load) -> None:
        error: BaseException | None = None
        start = time.monotonic_ns()
        try:
            parcel.copied.synchronize()
            for event in load.after:
                event.synchronize()
            if parcel.state is ParcelState.STORED and parcel.slot is not None:
                self._need_storage().read(parcel.slot, load.target)
            elif parcel.state not in (ParcelState.STAGED, ParcelState.GONE):
                raise RuntimeError("neither the write nor the rescue came to its end")
        except BaseException as caught:
            error = caught
        with self._lock:
            self._reading[parcel] -= 1
            self._end_read(parcel, load, error)
            if not self._reading[parcel]:
                del self._reading[parcel]
                if parcel.state is ParcelState.GONE:
                    self._give_buffer(parcel)
                    self._free_slot(parcel)
        self._meters.trace.add("read", parcel.name, start, parcel.num_bytes)

    def _end_read(
        self, parcel: Parcel, load: Load, error: BaseException | None
    ) -> None:
        if parcel.state is ParcelState.GONE:
            # Whoever asked is gone too; a result of any kind ends `Load.settle`.
            load.enqueued(CpuEvent(done=True))
        elif error is not None:
            parcel.state = ParcelState.LOST
            parcel.loads.append(load)
            self._fail_loads(parcel, error)
        elif parcel.state is ParcelState.STAGED:
            self._enqueue(parcel, load)
        else:
            load.enqueued(CpuEvent(done=True))
            self._meters.counters.add(Count.READ, parcel.num_bytes)

"""How fast a storage is, and which way to it is the fastest from GPU memory.

The arithmetic of rates is `ssdtrain.rates`; here are the transfers that it is fed.
"""

import mmap
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from ssdtrain.curves import Curve
from ssdtrain.rates import round_trip, shared_fraction, side_by_side, straight
from ssdtrain.storage.base import Slot, Storage
from ssdtrain.storage.gds import (
    GDS,
    GdsStorage,
    kvikio_installed,
    set_threads,
    why_no_gds,
)
from ssdtrain.storage.posix import PosixStorage
from ssdtrain.storage.stripe import StripeStorage

STAGED = "staging + posix"
RECORD_BYTES = 32 * 1024 * 1024
NUM_RECORDS = 8
NUM_THREADS = 4
NUM_ROUNDS = 2
GAIN_TO_GO_DIRECT = 1.03
"""Staging frees device memory at the speed of the host link, the direct path only at
that of the SSD: it must be faster by more than a measurement errs."""


class StagedPath:
    """Takes CUDA buffers of a record through one pinned buffer a thread: what the
    offloader does, on its own."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._local = threading.local()

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Copy to the host, wait, write."""
        staging, stream = self._of_this_thread(buffer)
        with torch.cuda.stream(stream):
            staging.copy_(buffer, non_blocking=True)
        stream.synchronize()
        self._inner.write(slot, staging)

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Read, copy to the device, wait."""
        staging, stream = self._of_this_thread(buffer)
        self._inner.read(slot, staging)
        with torch.cuda.stream(stream):
            buffer.copy_(staging, non_blocking=True)
        stream.synchronize()

    def _of_this_thread(
        self, buffer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.cuda.Stream]:
        if not hasattr(self._local, "staging"):
            self._local.staging = torch.empty(
                RECORD_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
            )
            self._local.stream = torch.cuda.Stream(buffer.device)
        return self._local.staging, self._local.stream


class Rates(NamedTuple):
    """Measured bandwidth of one path, 1e9 bytes a second."""

    write_gb_per_s: float
    read_gb_per_s: float

    @property
    def round_trip_gb_per_s(self) -> float:
        """Every record is written once and read once: bytes over both times."""
        return round_trip(self.write_gb_per_s, self.read_gb_per_s)

    def __str__(self) -> str:
        return f"{self.write_gb_per_s:.2f} GB/s write, {self.read_gb_per_s:.2f} read"


class PathChoice(NamedTuple):
    """The path that was taken, and why."""

    members: tuple[Storage, ...]
    """For each directory its `PosixStorage`, or a `GdsStorage` over it."""
    is_direct: bool
    """Whether the members take CUDA buffers."""
    why: str
    """The path taken, against what, and what is missing, for the report."""
    is_missed: bool = False
    """Whether kvikio is installed, which asks for a direct path, and there is none."""


def choose_path(posix: Sequence[PosixStorage], device: torch.device) -> PathChoice:
    """Measure staging and GPUDirect Storage from `device` to these files and take the
    faster one.

    Writes and reads `NUM_RECORDS` records a path, directory and round, a few seconds in
    all; nothing where there is no GPUDirect Storage. What one directory refuses is not
    taken for any.

    Args:
        posix: the file of each directory; the returned members own them.
        device: CUDA.
    """
    staged: tuple[Storage, ...] = tuple(posix)
    reason = why_no_gds()
    if not reason:
        set_threads(2 * NUM_THREADS)
        try:
            with ExitStack() as undo:
                direct: list[GdsStorage] = []
                for file in posix:
                    direct.append(GdsStorage(file))
                    undo.callback(direct[-1].release)
                rates = _compared(posix, direct, device)
                slow, fast = (each.round_trip_gb_per_s for each in rates)
                told = f"{GDS} {rates[1]}; {STAGED} {rates[0]}"
                if fast < GAIN_TO_GO_DIRECT * slow:
                    why = f"{STAGED} (no other is faster by enough); {told}"
                    return PathChoice(staged, False, why)
                undo.pop_all()
                why = f"{GDS} (measured fastest); {told}"
                return PathChoice(tuple(direct), True, why)
        except OSError as error:  # a full disk among others: staging reports it better
            reason = str(error)
    why = f"{STAGED} (the only path here); no {GDS}: {reason}"
    return PathChoice(staged, False, why, is_missed=kvikio_installed())


def as_one(members: Sequence[Storage]) -> Storage:
    """Several storages as one, to measure them side by side."""
    return members[0] if len(members) == 1 else StripeStorage(members)


def _compared(
    posix: Sequence[Storage], direct: Sequence[Storage], device: torch.device
) -> tuple[Rates, Rates]:
    """Rates of staging and of the direct path, in alternate rounds.

    Raises:
        OSError: one of them fails, or there is no room.
    """
    whole, through = as_one(posix), as_one(direct)
    staged = StagedPath(whole)
    ways = (staged.write, staged.read), (through.write, through.read)
    seen: list[list[list[float]]] = [[] for _ in ways]
    with taken_slots(whole, NUM_RECORDS * len(posix), RECORD_BYTES) as slots:
        buffers = device_buffers(device, NUM_THREADS)
        for turn in range(1 + NUM_ROUNDS):  # the first warms up and is not counted
            for calls, rounds in zip(ways, seen, strict=True):
                rates = [transfer_rate(call, slots, buffers) for call in calls]
                if turn:
                    rounds.append(rates)
    one, other = (
        Rates(*map(statistics.median, zip(*rounds, strict=True))) for rounds in seen
    )
    return one, other


def device_buffers(device: torch.device, num: int) -> list[torch.Tensor]:
    """Random bytes in GPU memory, there when this returns. They are drawn from a
    generator of their own: what the user draws next stays the same."""
    generator = torch.Generator(device).manual_seed(0)
    buffers = [
        torch.empty(RECORD_BYTES, dtype=torch.uint8, device=device) for _ in range(num)
    ]
    for buffer in buffers:
        buffer.random_(generator=generator)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return buffers


def transfer_rate(
    call: Callable[[Slot, torch.Tensor], None],
    slots: Sequence[Slot],
    buffers: Sequence[torch.Tensor],
) -> float:
    """GB/s of `call` over all slots, one thread for each buffer."""

    def job(number: int) -> Callable[[], int]:
        own, buffer = slots[number :: len(buffers)], buffers[number]

        def work() -> int:
            for slot in own:
                call(slot, buffer)
            return len(own) * buffer.numel()

        return work

    jobs = [job(number) for number in range(len(buffers))]
    return side_by_side(jobs).per_second / 1e9


class Drive(NamedTuple):
    """Curves of a storage."""

    write: Curve
    read: Curve
    duplex_slowdown: float = 1.0
    """See `rates.shared_fraction`; unless measured, one bandwidth is shared."""
    direct: bool = False
    """Whether the storage moves device memory itself."""


def probe_drive(
    storage: Storage,
    *,
    num_threads: int,
    record_bytes: int,
) -> Drive:
    """Write records, read them, and do both at once.

    Raises:
        OSError: the storage is full, or fails.
    """
    with taken_slots(storage, 2 * num_threads, record_bytes) as slots:
        size = slots[0].capacity_bytes
        buffers = [_random_bytes(size, seed) for seed in range(2 * num_threads)]
        # The first write of fresh extents is slower than all that follow.
        transfer_rate(storage.write, slots, buffers)
        ways = [
            (storage.write, slots[:num_threads], buffers[:num_threads]),
            (storage.read, slots[num_threads:], buffers[num_threads:]),
        ]
        rates = [1e9 * transfer_rate(*way) for way in ways]

        def job(way: int) -> int:
            transfer_rate(*ways[way])
            return 1

        both = side_by_side([lambda: job(0), lambda: job(1)])
    num_bytes = num_threads * record_bytes
    shared = shared_fraction([num_bytes / rate for rate in rates], both.seconds)
    return Drive(straight(rates[0]), straight(rates[1]), shared)


@contextmanager
def taken_slots(storage: Storage, num: int, num_bytes: int) -> Iterator[list[Slot]]:
    """Slots that are freed at the end.

    Raises:
        StorageFullError: there is no room.
    """
    slots: list[Slot] = []
    try:
        while len(slots) < num:
            slots.append(storage.allocate(num_bytes))
        yield slots
    finally:
        for slot in slots:
            storage.free(slot)


def _random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    """Page-aligned; random, because some disks skip or compress zeros."""
    buffer = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    generator = torch.Generator("cpu").manual_seed(seed)
    buffer.view(torch.int64).random_(generator=generator)
    return buffer

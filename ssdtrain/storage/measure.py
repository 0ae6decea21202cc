"""How fast a storage is, and which way to it is the fastest from GPU memory.

The arithmetic of rates is `ssdtrain.rates`; here are the transfers that it is fed.
"""

import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ssdtrain.curves import Curve
from ssdtrain.rates import Clock, round_trip, shared_fraction, side_by_side, straight
from ssdtrain.storage.base import ForwardingStorage, Slot, Storage
from ssdtrain.storage.gds import GdsStorage
from ssdtrain.storage.kvikio_shim import (
    Availability,
    GdsMode,
    Refusal,
    availability,
    kvikio_installed,
    set_threads,
)
from ssdtrain.storage.posix import PosixStorage
from ssdtrain.storage.stripe import StripeStorage

STAGED_POSIX = "staging + posix"
PROBE_BYTES = 16 * 1024 * 1024
RECORD_BYTES = 32 * 1024 * 1024
NUM_RECORDS = 8
NUM_ROUNDS = 2
GAIN_TO_GO_DIRECT = 1.03
"""Staging frees device memory at the speed of the host link, the direct path only at
that of the SSD: it must be faster by more than a measurement errs."""


class StagedPath(ForwardingStorage):
    """A storage that takes CUDA buffers through one pinned buffer a thread: what the
    offloader does, on its own.

    Args:
        inner: takes host buffers.
        buffer_bytes: the largest transfer.
    """

    def __init__(self, inner: Storage, buffer_bytes: int) -> None:
        super().__init__(inner)
        self._buffer_bytes = buffer_bytes
        self._local = threading.local()

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Copy to the host, wait, write."""
        staging, stream = self._of_this_thread(buffer)
        with torch.cuda.stream(stream):
            staging.copy_(buffer, non_blocking=True)
        stream.synchronize()
        self.inner.write(slot, staging)

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Read, copy to the device, wait."""
        staging, stream = self._of_this_thread(buffer)
        self.inner.read(slot, staging)
        with torch.cuda.stream(stream):
            buffer.copy_(staging, non_blocking=True)
        stream.synchronize()

    def _of_this_thread(
        self, buffer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.cuda.Stream]:
        if not hasattr(self._local, "staging"):
            self._local.staging = torch.empty(
                self._buffer_bytes, dtype=torch.uint8, device="cpu", pin_memory=True
            )
            self._local.stream = torch.cuda.Stream(buffer.device)
        return self._local.staging[: buffer.numel()], self._local.stream


class Rates(NamedTuple):
    """Measured bandwidth of one path, 1e9 bytes a second."""

    path: str
    write_gb_per_s: float
    read_gb_per_s: float

    @property
    def round_trip_gb_per_s(self) -> float:
        """Every record is written once and read once: bytes over both times."""
        return round_trip(self.write_gb_per_s, self.read_gb_per_s)


@dataclass(frozen=True, kw_only=True)
class PathChoice:
    """The path that was taken, and why."""

    members: tuple[Storage, ...]
    """A `PosixStorage` (staging) or a `GdsStorage` over it for each directory."""
    rates: tuple[Rates, ...] = ()
    """All paths that were measured, the best first; empty if there was one only."""
    refusals: tuple[Refusal, ...] = ()
    """Modes that are not to be had here, each with its reason."""

    @property
    def unusable(self) -> bool:
        """kvikio is installed, which asks for a direct path, and nothing came of it."""
        return not self.rates and kvikio_installed()

    @property
    def path(self) -> str:
        """Name of the path taken."""
        taken = self.members[0]
        return taken.mode.value if isinstance(taken, GdsStorage) else STAGED_POSIX

    @property
    def is_direct(self) -> bool:
        """Whether the members take CUDA buffers."""
        return isinstance(self.members[0], GdsStorage)

    def explain(self) -> str:
        """For the report: what was taken, against what, and what is missing."""
        measured = [
            f"{r.path} {r.write_gb_per_s:.2f} GB/s write, {r.read_gb_per_s:.2f} read"
            for r in self.rates
        ]
        missing = [f"no {r.mode.value}: {r.reason}" for r in self.refusals]
        fastest = bool(self.rates) and self.rates[0].path == self.path
        why = "measured fastest" if fastest else "no other is faster by enough"
        why = why if self.rates else "the only path here"
        return "; ".join([f"{self.path} ({why})", *measured, *missing])


def choose_path(
    posix: Sequence[PosixStorage],
    device: torch.device,
    *,
    depth: int = 4,
    look: Callable[[], Availability] = availability,
    clock: Clock = time.monotonic,
) -> PathChoice:
    """Measure every path from `device` to these files and take the fastest.

    Writes and reads `NUM_RECORDS` records a path, directory and round, a few seconds in
    all; nothing where kvikio cannot run. A path that one directory refuses is not taken
    for any.

    Args:
        posix: the file of each directory; the returned members own them.
        device: CUDA.
        depth: threads that will do I/O.
        look: what kvikio can do here.
        clock: times the transfers.
    """
    found = look()
    staged: tuple[Storage, ...] = tuple(posix)
    if not found.modes:
        return PathChoice(members=staged, refusals=found.refusals)
    set_threads(max(depth, 8))
    whole = as_one(posix)
    paths: dict[str, Storage] = {STAGED_POSIX: StagedPath(whole, RECORD_BYTES)}
    direct: dict[str, tuple[GdsStorage, ...]] = {}
    refusals = list(found.refusals)
    for mode in found.modes:
        try:
            direct[mode.value] = _opened(posix, mode)
        except OSError as error:
            refusals.append(Refusal(mode, str(error)))
    paths |= {name: as_one(members) for name, members in direct.items()}
    rates: list[Rates] = []
    taken = STAGED_POSIX
    try:
        with taken_slots(whole, NUM_RECORDS * len(posix), RECORD_BYTES) as slots:
            buffers = device_buffers(device, depth)
            rates = measure_paths(paths, slots, buffers, refusals, clock)
        taken = _best(rates)
    except OSError as error:
        # The disk cannot be measured (full, or failing): staging reports that better.
        refusals += [Refusal(m, f"not measured: {error}") for m in found.modes]
    members = direct.pop(taken, staged)
    for others in direct.values():
        for other in others:
            other.release()
    return PathChoice(members=members, rates=tuple(rates), refusals=tuple(refusals))


def as_one(members: Sequence[Storage]) -> Storage:
    """Several storages as one, to measure them side by side."""
    return members[0] if len(members) == 1 else StripeStorage(members)


def _opened(posix: Sequence[PosixStorage], mode: GdsMode) -> tuple[GdsStorage, ...]:
    """Open all files in a mode, or none.

    Raises:
        OSError: one of them refuses it.
    """
    with ExitStack() as undo:
        members = []
        for file in posix:
            members.append(GdsStorage(file, mode))
            undo.callback(members[-1].release)
        undo.pop_all()
    return tuple(members)


def _best(rates: Sequence[Rates]) -> str:
    staged = next(r for r in rates if r.path == STAGED_POSIX)
    gain = rates[0].round_trip_gb_per_s / staged.round_trip_gb_per_s
    return rates[0].path if gain >= GAIN_TO_GO_DIRECT else STAGED_POSIX


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


def measure_paths(
    paths: Mapping[str, Storage],
    slots: Sequence[Slot],
    buffers: Sequence[torch.Tensor],
    refusals: list[Refusal],
    clock: Clock = time.monotonic,
) -> list[Rates]:
    """Rates of all paths in alternate rounds, the best first.

    A path that fails is left out and named in `refusals`.
    """
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    for turn in range(1 + NUM_ROUNDS):  # the first warms up and is not counted
        for name in list(seen):
            path = paths[name]
            try:
                rates = (
                    transfer_rate(path.write, slots, buffers, clock),
                    transfer_rate(path.read, slots, buffers, clock),
                )
            except OSError as error:
                if name == STAGED_POSIX:
                    raise
                refusals.append(Refusal(GdsMode(name), str(error)))
                del seen[name]
                continue
            if turn:
                seen[name].append(rates)
    measured = [
        Rates(name, *map(statistics.median, zip(*rounds, strict=True)))
        for name, rounds in seen.items()
    ]
    return sorted(measured, key=lambda r: r.round_trip_gb_per_s, reverse=True)


def transfer_rate(
    call: Callable[[Slot, torch.Tensor], None],
    slots: Sequence[Slot],
    buffers: Sequence[torch.Tensor],
    clock: Clock = time.monotonic,
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
    return side_by_side(jobs, clock).per_second / 1e9


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
    record_bytes: int = PROBE_BYTES,
    clock: Clock = time.monotonic,
) -> Drive:
    """Write records, read them, and do both at once.

    Raises:
        OSError: the storage is full, or fails.
    """
    with _written(storage, 2 * num_threads, record_bytes) as (slots, buffers):
        ways = [
            (storage.write, slots[:num_threads], buffers[:num_threads]),
            (storage.read, slots[num_threads:], buffers[num_threads:]),
        ]
        rates = [1e9 * transfer_rate(*way, clock=clock) for way in ways]

        def job(way: int) -> int:
            transfer_rate(*ways[way])
            return 1

        both = side_by_side([lambda: job(0), lambda: job(1)], clock)
    num_bytes = num_threads * record_bytes
    shared = shared_fraction([num_bytes / rate for rate in rates], both.seconds)
    return Drive(straight(rates[0]), straight(rates[1]), shared)


def round_trip_gb_per_s(
    storage: Storage,
    *,
    record_bytes: int = PROBE_BYTES,
    depth: int = 4,
    clock: Clock = time.monotonic,
) -> float:
    """Round-trip GB/s of a storage: `depth` threads write and read a record each.

    Raises:
        OSError: the storage fails, or is full.
    """
    with _written(storage, depth, record_bytes) as (slots, buffers):
        write = transfer_rate(storage.write, slots, buffers, clock)
        read = transfer_rate(storage.read, slots, buffers, clock)
    return round_trip(write, read)


@contextmanager
def _written(
    storage: Storage, num: int, num_bytes: int
) -> Iterator[tuple[list[Slot], list[torch.Tensor]]]:
    """Slots and their buffers, written once: the first write of fresh extents is
    slower than all that follow."""
    with taken_slots(storage, num, num_bytes) as slots:
        buffers = [_random_bytes(slots[0].capacity_bytes, seed) for seed in range(num)]
        transfer_rate(storage.write, slots, buffers)
        yield slots, buffers


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

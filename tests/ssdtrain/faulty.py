"""A storage that fails on purpose, by script: for tests of what follows."""

import errno
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import torch

from ssdtrain.errors import StorageFullError
from ssdtrain.storage.base import ForwardingStorage, Slot, Storage


class Operation(str, Enum):
    """The call that a fault hits."""

    ALLOCATE = "allocate"
    WRITE = "write"
    READ = "read"


class FaultKind(str, Enum):
    """What goes wrong."""

    NO_SPACE = "no space"
    """ENOSPC as `StorageFullError`, before anything moved."""
    IO_ERROR = "I/O error"
    """EIO, before anything moved."""
    SHORT = "short transfer"
    """Half of the bytes move, then EIO: the storage noticed."""
    TORN = "torn write"
    """Half of the bytes reach the storage and the call succeeds: nobody noticed."""
    BIT_FLIP = "bit flip"
    """One bit is wrong and the call succeeds: in the slot, or in what was read."""
    STALL = "stall"
    """The call works, `seconds` later."""
    WORKER_DEATH = "worker death"
    """`WorkerDeath` is raised, which `except Exception` does not catch."""


class WorkerDeath(BaseException):
    """Ends the thread that made the call, as a failed allocation in C would."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a script."""

    operation: Operation
    kind: FaultKind
    at: int
    """Which call of that operation it hits; 0 is the first."""
    count: int = 1
    """How many calls in a row."""
    seconds: float = 0.0
    """Length of a `STALL`."""

    def hits(self, call: int) -> bool:
        """Return whether it hits the call with this number."""
        return self.at <= call < self.at + self.count


class FaultyStorage(ForwardingStorage):
    """`inner`, with the faults of a script.

    Args:
        inner: the storage that holds the bytes.
        faults: the first that fits a call is used.
        seed: draws the bit that a `BIT_FLIP` inverts.
        sleep: what a `STALL` calls with its seconds; None: `time.sleep`.
    """

    def __init__(
        self,
        inner: Storage,
        faults: Iterable[Fault] = (),
        *,
        seed: int = 0,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(inner)
        self._sleep = sleep
        self._faults = tuple(faults)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._calls = dict.fromkeys(Operation, 0)
        self._hits = dict.fromkeys(FaultKind, 0)

    @property
    def hits(self) -> dict[FaultKind, int]:
        """How often each kind happened so far."""
        with self._lock:
            return dict(self._hits)

    def allocate(self, num_bytes: int) -> Slot:
        """Allocate, unless a fault hits."""
        self._before(Operation.ALLOCATE)
        return self.inner.allocate(num_bytes)

    def write(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Write, unless a fault hits."""
        fault = self._before(Operation.WRITE)
        kind = fault.kind if fault else None
        if kind in (FaultKind.SHORT, FaultKind.TORN):
            half = self._half(buffer)
            if half:
                self.inner.write(slot, buffer[:half])
        elif kind is FaultKind.BIT_FLIP:
            # The caller's bytes stay right: a copy takes the flip, aligned as they.
            step = self.alignment_bytes
            num_bytes = buffer.numel() + step
            room = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            copy = room[-room.data_ptr() % step :][: buffer.numel()].copy_(buffer)
            self._flip(copy)
            self.inner.write(slot, copy)
        else:
            self.inner.write(slot, buffer)
        if kind is FaultKind.SHORT:
            raise OSError(errno.EIO, f"injected short write to {slot}")

    def read(self, slot: Slot, buffer: torch.Tensor) -> None:
        """Read, unless a fault hits."""
        fault = self._before(Operation.READ)
        kind = fault.kind if fault else None
        if kind is FaultKind.SHORT:
            half = self._half(buffer)
            if half:
                self.inner.read(slot, buffer[:half])
            raise OSError(errno.EIO, f"injected short read from {slot}")
        self.inner.read(slot, buffer)
        if kind is FaultKind.BIT_FLIP:
            self._flip(buffer)

    def _before(self, operation: Operation) -> Fault | None:
        with self._lock:
            call = self._calls[operation]
            self._calls[operation] += 1
            fitting = (
                f for f in self._faults if f.operation is operation and f.hits(call)
            )
            fault = next(fitting, None)
            if fault is None:
                return None
            self._hits[fault.kind] += 1
        what = f"injected {fault.kind.value} at {operation.value} {call}"
        if fault.kind is FaultKind.NO_SPACE:
            raise StorageFullError(errno.ENOSPC, what)
        if fault.kind is FaultKind.IO_ERROR:
            raise OSError(errno.EIO, what)
        if fault.kind is FaultKind.WORKER_DEATH:
            raise WorkerDeath(what)
        if fault.kind is FaultKind.STALL:
            (self._sleep or time.sleep)(fault.seconds)
        return fault

    def _half(self, buffer: torch.Tensor) -> int:
        step = self.alignment_bytes
        return buffer.numel() // 2 // step * step

    def _flip(self, buffer: torch.Tensor) -> None:
        with self._lock:
            byte = self._random.randrange(buffer.numel())
            bit = self._random.randrange(8)
        buffer[byte] = buffer[byte] ^ (1 << bit)

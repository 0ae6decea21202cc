"""A transfer: the bytes of one record on the target's side, and the loads it serves."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import torch

from ssdtrain.storage.base import Slot
from ssdtrain.transfer.device import Device, Event
from ssdtrain.transfer.pinned import Buffer


class TransferState(Enum):
    """Where the bytes are. Transitions are made under the offloader's lock."""

    STAGED = auto()
    """In the buffer (after `copied`). > WRITING when drained, GONE when dropped."""
    WRITING = auto()
    """A worker writes the buffer, which stays valid. > STORED, or STAGED on failure."""
    STORED = auto()
    """On the storage; the buffer may hold them too after a recall. > RECALLING."""
    RECALLING = auto()
    """A worker reads them into a fresh buffer. > STORED, or LOST on failure."""
    LOST = auto()
    """A read failed; loads raise."""
    GONE = auto()
    """Dropped; a worker still holding it cleans up."""


class Load:
    """A copy back to the device that was asked for, perhaps not yet enqueued.

    A future made for the host's time: nearly every load is enqueued at once.
    """

    def __init__(self, target: torch.Tensor, after: list[Event]) -> None:
        self.target = target
        self.after = after
        self._event: Event | None = None
        self._error: BaseException | None = None
        self._pending = threading.Lock()
        """Held until the copy is enqueued, or failed."""
        self._pending.acquire()

    def enqueued(self, event: Event) -> None:
        """The copy stands in load order; `event` is its end."""
        self._event = event
        self._pending.release()

    def failed(self, error: BaseException) -> None:
        """The bytes cannot come back."""
        self._error = error
        self._pending.release()

    def poll(self) -> bool:
        """Whether `wait` would find the copy enqueued (or failed)."""
        return self._event is not None or self._error is not None

    def wait(self, device: Device) -> None:
        """Order the caller's compute after the copy.

        Blocks the host only until the copy is enqueued.

        Raises:
            ActivationLostError: the read failed.
        """
        if not self.poll():
            with device.stall():
                self._end()
        event = self._event
        if event is None:
            error = self._error or RuntimeError("a load ended without its copy")
            try:
                raise error
            finally:
                del self, error  # the error holds this frame
        device.wait(event)

    def settle(self, device: Device) -> None:
        """Like `wait`, for a load whose bytes nobody wants: a failure is no news."""
        self._end()
        if self._event is not None:
            device.wait(self._event)

    def _end(self) -> None:
        with self._pending:  # let go of once it has ended
            return


class TransferOwner(Protocol):
    """Who discards a transfer; see [Note: interrupts]."""

    transfer: Any


@dataclass(eq=False)
class Transfer:
    """Bytes that left the device."""

    name: str
    num_bytes: int
    state: TransferState
    buffer: Buffer | None
    copied: Event
    """End of the copy into the first buffer."""
    is_starting: bool = False
    """Whether that copy may be under way without an event."""
    is_direct: bool = False
    """Whether it went to the storage past host memory."""
    slot: Slot | None = None
    write: "Future[None] | None" = None
    drainable: bool = True
    """False after a failed write: the buffer is then the bytes' home."""
    why_lost: str = ""
    """The text of the read's error: the error itself would hold its frames."""
    loads: list[Load] = field(default_factory=list)
    """Waiting for the recall to finish."""

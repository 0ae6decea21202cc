"""Move a whole buffer to or from a file descriptor, or raise."""

import errno
import os
from collections.abc import Callable

import torch

from ssdtrain.errors import StorageFullError
from ssdtrain.storage.base import Slot

BLOCK_BYTES = 8 * 1024 * 1024
"""Bytes of one system call. Measured on a virtio disk with O_DIRECT and four threads:
4 to 8 MiB is the best at every record size, within 3 % of one call for all; below
1 MiB the calls cost, and one thread alone leaves the device idle between large ones."""

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


def check_buffer(slot: Slot, buffer: torch.Tensor, alignment_bytes: int) -> None:
    """Hold a buffer against the contract of `Storage.write` and `Storage.read`.

    Raises:
        ValueError: wrong dtype, device, layout, alignment, or longer than the slot.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.device.type != "cpu":
        raise ValueError(
            "storage expects a 1-D uint8 CPU tensor, got "
            f"{buffer.dim()}-D {buffer.dtype} on {buffer.device}"
        )
    size = buffer.numel()
    if buffer.stride(0) != 1 and size > 1:
        raise ValueError(f"storage expects a contiguous buffer, got {buffer.stride()}")
    if not 0 < size <= slot.capacity_bytes:
        raise ValueError(f"buffer of {size} bytes does not fit {slot}")
    if size % alignment_bytes or buffer.data_ptr() % alignment_bytes:
        raise ValueError(
            f"storage expects address and length in multiples of {alignment_bytes}, "
            f"got address {buffer.data_ptr():#x} and {size} bytes"
        )


def write_all(fd: int, buffer: torch.Tensor, offset: int, place: str) -> None:
    """Write all bytes at `offset`, in calls of `BLOCK_BYTES`.

    Raises:
        StorageFullError: no space or no quota left.
        OSError: anything else; the text names place, offset and bytes.
    """
    _move(os.pwritev, fd, buffer, offset, f"write to {place}")


def read_all(fd: int, buffer: torch.Tensor, offset: int, place: str) -> None:
    """Fill the buffer from `offset`, in calls of `BLOCK_BYTES`.

    Raises:
        OSError: failed, or the file ends early; the text names place, offset, bytes.
    """
    _move(os.preadv, fd, buffer, offset, f"read from {place}")


def _move(
    call: Callable[..., int], fd: int, buffer: torch.Tensor, offset: int, what: str
) -> None:
    view = buffer.numpy().data
    size, moved = len(view), 0
    # A short write is followed up: the rest either arrives after all (a signal came
    # between) or fails with the errno that tells a full disk from a broken one.
    while moved < size:
        try:
            count = call(fd, [view[moved : moved + BLOCK_BYTES]], offset + moved)
        except OSError as error:
            kind = StorageFullError if error.errno in FULL_ERRNOS else OSError
            raise kind(
                error.errno,
                f"{what} at offset {offset} failed after {moved} of {size} bytes: "
                f"{os.strerror(error.errno or errno.EIO)}",
            ) from error
        if count == 0:
            raise OSError(
                errno.EIO, f"short {what} at offset {offset}: {moved} of {size} bytes"
            )
        moved += count

"""What a transfer of one buffer must keep to, and how much one system call moves."""

import errno

import torch

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

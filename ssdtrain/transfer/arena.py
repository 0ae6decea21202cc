"""One segment for the memory pool of a graph that is captured.

[Note: one segment]
A captured graph has a pool of its own, which begins empty and stays as large as it
was at most. The caching allocator fills it with segments of 20 MiB for small tensors
and one for each larger tensor, and memory of different segments is never joined: what a
plan frees in pieces of 24 MiB serves no backward of attention that wants 144 MiB at
once, and another segment is taken for it: 7 % more than was ever allocated. So what a
plan needs at most is taken as one piece when the captured forward begins, and given
back to the pool, which cuts all later tensors from it and joins what is freed.

A prediction is right to some kilobytes, but a piece that is too small by one tensor is
of no use, so a little is spared (`SPARE_BYTES`). Of 28 layers that allocate 2.442 GB at
most, 2.649 GB are reserved without it, and 2.487 GB with it.
(tests/ssdtrain/transfer/test_arena.py)
"""

import os

import torch

from ssdtrain.transfer.segments import VARIABLES, Allocator, TorchAllocator

SPARE_BYTES = 16 * 1024 * 1024
LEAST_BYTES = 256 * 1024 * 1024
"""Of a smaller pool little is lost."""
NEVER_SPLIT = "max_split_size_mb"
"""Where the user sets it, nothing would be cut from the piece."""


def begin_with(
    num_bytes: int, device: torch.device, allocator: Allocator | None = None
) -> bool:
    """Take one segment for a graph that needs so many bytes at most, inside its
    capture, if the allocator would cut it and the device has it.

    Returns:
        Whether it was taken.
    """
    if device.type != "cuda" or num_bytes < LEAST_BYTES or not _cuts(allocator):
        return False
    wanted_bytes = num_bytes + SPARE_BYTES
    if torch.cuda.mem_get_info(device)[0] < wanted_bytes:
        return False
    stream = torch.cuda.current_stream(device)
    address = torch.cuda.caching_allocator_alloc(wanted_bytes, device.index, stream)
    torch.cuda.caching_allocator_delete(address)
    return True


def _cuts(allocator: Allocator | None) -> bool:
    own = allocator or TorchAllocator()
    if own.backend() != "native":
        return False
    told = (own.settings(), *map(os.environ.get, VARIABLES))
    return not any(NEVER_SPLIT in each for each in told if each)

"""The Triton kernel that draws a dropout's mask again; imported only where Triton is.

It repeats what torch's CUDA kernel draws. Whether that gave the same bytes is for
admission to say.
"""

import functools
import struct
from bisect import bisect_left
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DROPOUT_BLOCK = tl.constexpr(256)
"""Threads of a block of torch's kernel."""


@triton.jit(do_not_specialize=["key", "first", "num_threads"])  # type: ignore[untyped-decorator]
def _draw(target, size, key, first, num_threads, LAW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four numbers a draw. LAW: the least bits that are dropped, draws a vector.

    DROPOUT_BLOCK vectors a program: they are all in one round of threads.
    """
    DROPPED: tl.constexpr = LAW[0]
    QUADS: tl.constexpr = LAW[1]
    key = key.to(tl.int64)
    program = tl.program_id(0).to(tl.int64)
    vector = program * DROPOUT_BLOCK
    quad = tl.arange(0, DROPOUT_BLOCK * QUADS)
    draw = first + vector // num_threads * QUADS + quad % QUADS
    thread = ((vector % num_threads).to(tl.int32) + quad // QUADS).to(tl.uint32)
    low, high = draw.to(tl.uint32), (draw >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(key, low, high, thread, tl.zeros_like(thread))
    even = tl.interleave(a < DROPPED, c < DROPPED)
    odd = tl.interleave(b < DROPPED, d < DROPPED)
    numbers: tl.constexpr = 4 * QUADS * DROPOUT_BLOCK
    place = program * numbers + tl.arange(0, numbers)
    kept = tl.interleave(even, odd).to(tl.int8)
    tl.store(target + place, kept, mask=place < size)


def first_dropped(rate: float) -> int:
    """The least 32 bits that torch's kernel drops: the numbers it makes of bits,
    above 0 and up to 1, grow with them."""

    def number(bits: int) -> float:
        return _float32(_float32(bits) * 2.0**-32 + 2.0**-33)

    return bisect_left(range(2**32), _float32(1.0 - rate), key=number)


def _float32(number: float) -> float:
    """Rounded; float64 holds the result."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


class DropoutDraw(NamedTuple):
    """What a dropout drops, and how torch's kernel draws it."""

    rate: float
    """Of the elements that are dropped."""
    vector: int
    """Elements that a thread of torch's kernel takes at once, 4 or 8."""


def draw_dropped(
    shape: tuple[int, ...], state: Tensor, drop: DropoutDraw, device: torch.device
) -> Tensor:
    """The mask (bool) that torch's fused dropout draws.

    Args:
        shape: of a contiguous tensor; its elements are a multiple of `drop.vector`.
        state: 16 bytes on the host, of the generator before it drew: key, offset.
        drop: what is dropped.
        device: where.
    """
    target = torch.empty(shape, dtype=torch.bool, device=device)
    key, offset = state.view(torch.int64).tolist()
    size = target.numel()
    _draw[(triton.cdiv(size, DROPOUT_BLOCK.value * drop.vector),)](
        target.view(torch.int8),
        size,
        key,
        offset // 4,
        num_dropout_threads(size, device),
        LAW=(first_dropped(drop.rate), drop.vector // 4),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return target


def num_dropout_draws(size: int, device: torch.device) -> int:
    """What torch's fused dropout adds to the generator's offset."""
    per_round = 4 * num_dropout_threads(size, device)
    return 4 * ((size + per_round - 1) // per_round)


@functools.cache
def num_dropout_threads(size: int, device: torch.device) -> int:
    """Threads of torch's fused dropout over so many elements."""
    properties = torch.cuda.get_device_properties(device)
    block = DROPOUT_BLOCK.value
    resident = properties.max_threads_per_multi_processor // block
    most = properties.multi_processor_count * resident
    return int(block * min(most, triton.cdiv(size, block)))

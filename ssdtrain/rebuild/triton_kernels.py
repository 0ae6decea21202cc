"""Triton kernels that rebuild saved tensors; imported only where Triton is.

They repeat the arithmetic of torch's CUDA kernels operation by operation, in float32,
and round once. Whether that gave the same bytes is for admission to say.
"""

import functools
import struct
from bisect import bisect_left
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_TILE, COLUMN_TILE = tl.constexpr(8), tl.constexpr(1024)
FLAT_TILE = 4096
WARPS = 8
DROPOUT_BLOCK = tl.constexpr(256)
"""Threads of a block of torch's kernel."""


@triton.jit  # type: ignore[untyped-decorator]
def _load(pointers, mask, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """In float32."""
    if EVEN:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _normalize(inputs, target, shape, FUSED: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of `shape` (rows, columns); the tiles of a row follow one another.

    EVEN: tiles fill the shape. FUSED: the last product and sum are rounded once.
    """
    source, mean, deviation, weight, bias = inputs
    num_rows, num_columns = shape
    num_tiles = tl.cdiv(num_columns, COLUMN_TILE)
    tile = tl.program_id(0)
    row = (tile // num_tiles).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    column = (tile % num_tiles) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    place = row[:, None] * num_columns + column[None, :]
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    y = _load(source + place, inside, EVEN)
    if mean is not None:
        y = y - _load(mean + row, row < num_rows, EVEN)[:, None]
    y = _load(deviation + row, row < num_rows, EVEN)[:, None] * y
    scale = _load(weight + column, column < num_columns, EVEN)[None, :]
    if bias is None:
        y = scale * y
    else:
        shift = _load(bias + column, column < num_columns, EVEN)[None, :]
        if FUSED:
            y = tl.fma(
                tl.broadcast_to(scale, y.shape), y, tl.broadcast_to(shift, y.shape)
            )
        else:
            y = scale * y + shift
    y = y.to(target.dtype.element_ty)
    if EVEN:
        tl.store(target + place, y)
    else:
        tl.store(target + place, y, mask=inside)


class Statistics(NamedTuple):
    """What a normalization saved, float32, one number a row."""

    mean: Tensor | None
    """None: RMS norm."""
    deviation: Tensor
    """The reciprocal one."""


def normalize_rows(
    source: Tensor,
    statistics: Statistics,
    weight: Tensor,
    bias: Tensor | None,
    *,
    fused: bool,
) -> Tensor:
    """weight * (deviation * (source - mean)) + bias, over the last dimensions.

    Args:
        source: contiguous; its last dimensions are those of `weight`.
        statistics: contiguous.
        weight: contiguous.
        bias: as `weight`; None for none.
        fused: whether the last product and sum are rounded once.

    Returns:
        As `source`.
    """
    target = torch.empty_like(source)
    num_columns = weight.numel()
    num_rows = source.numel() // num_columns
    rows, columns = ROW_TILE.value, COLUMN_TILE.value
    _normalize[(triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, columns),)](
        (source, *statistics, weight, bias),
        target,
        (num_rows, num_columns),
        FUSED=fused,
        EVEN=num_rows % rows == 0 and num_columns % columns == 0,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return target


@triton.jit  # type: ignore[untyped-decorator]
def _look_up(table, source, target, size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < size
    bits = tl.load(source + place, mask=inside, other=0, cache_modifier=".cg")
    entry = tl.load(table + (bits.to(tl.int32) & 0xFFFF))
    tl.store(target + place, entry, mask=inside)


def look_up(source: Tensor, table: Tensor) -> Tensor:
    """table[bits of source], 16-bit each; `table` has 65,536 int16."""
    target = torch.empty_like(source)
    grid = (triton.cdiv(source.numel(), FLAT_TILE),)
    _look_up[grid](
        table,
        source.view(torch.int16),
        target.view(torch.int16),
        source.numel(),
        TILE=FLAT_TILE,
        num_warps=WARPS,
    )
    return target


@triton.jit  # type: ignore[untyped-decorator]
def _widen(source, target, size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < size
    x = tl.load(source + place, mask=inside, other=0.0)
    tl.store(target + place, x.to(tl.float32), mask=inside)


def widen_halves(source: Tensor) -> Tensor:
    """A contiguous 16-bit tensor in float32."""
    target = torch.empty_like(source, dtype=torch.float32)
    grid = (triton.cdiv(source.numel(), FLAT_TILE),)
    _widen[grid](source, target, source.numel(), TILE=FLAT_TILE, num_warps=WARPS)
    return target


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

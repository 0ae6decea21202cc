"""Triton kernels that rebuild saved tensors; imported only where Triton is.

They repeat the arithmetic of torch's CUDA kernels operation by operation, in float32,
and round once. Whether that gave the same bytes is for admission to say.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_TILE, COLUMN_TILE = 8, 1024
FLAT_TILE = 4096
WARPS = 8
DROPOUT_BLOCK = 256
"""Threads of a block of torch's kernel."""


@triton.jit
def _normalize(
    source,
    mean,
    deviation,
    weight,
    bias,
    target,
    num_rows,
    num_columns,
    HAS_MEAN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FUSED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """A tile of (num_rows, num_columns); the tiles of a row follow one another."""
    num_tiles = tl.cdiv(num_columns, COLUMNS)
    tile = tl.program_id(0)
    row = (tile // num_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tile % num_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None] * num_columns + column[None, :]
    if EVEN:
        x = tl.load(source + place)
        w = tl.load(weight + column)
        d = tl.load(deviation + row)
    else:
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        x = tl.load(source + place, mask=inside, other=0.0)
        w = tl.load(weight + column, mask=column < num_columns, other=0.0)
        d = tl.load(deviation + row, mask=row < num_rows, other=0.0)
    y = x.to(tl.float32)
    if HAS_MEAN:
        if EVEN:
            m = tl.load(mean + row)
        else:
            m = tl.load(mean + row, mask=row < num_rows, other=0.0)
        y = y - m[:, None]
    y = d[:, None] * y
    scale = tl.broadcast_to(w.to(tl.float32)[None, :], (ROWS, COLUMNS))
    if HAS_BIAS:
        if EVEN:
            b = tl.load(bias + column)
        else:
            b = tl.load(bias + column, mask=column < num_columns, other=0.0)
        shift = tl.broadcast_to(b.to(tl.float32)[None, :], (ROWS, COLUMNS))
        if FUSED:
            y = tl.fma(scale, y, shift)
        else:
            y = scale * y + shift
    else:
        y = scale * y
    y = y.to(target.dtype.element_ty)
    if EVEN:
        tl.store(target + place, y)
    else:
        tl.store(target + place, y, mask=inside)


def normalize(
    source: Tensor,
    mean: Tensor | None,
    deviation: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    fused: bool,
) -> Tensor:
    """weight * (deviation * (source - mean)) + bias, over the last dimensions.

    Args:
        source: contiguous; its last dimensions are those of `weight`.
        mean: float32, one number a row; None for none.
        deviation: the reciprocal one; as `mean`.
        weight: contiguous.
        bias: as `weight`; None for none.
        fused: whether the last product and sum are rounded once.

    Returns:
        As `source`.
    """
    target = torch.empty_like(source)
    num_columns = weight.numel()
    num_rows = source.numel() // num_columns
    even = num_rows % ROW_TILE == 0 and num_columns % COLUMN_TILE == 0
    num_tiles = triton.cdiv(num_rows, ROW_TILE) * triton.cdiv(num_columns, COLUMN_TILE)
    _normalize[(num_tiles,)](
        source,
        deviation if mean is None else mean,
        deviation,
        weight,
        weight if bias is None else bias,
        target,
        num_rows,
        num_columns,
        HAS_MEAN=mean is not None,
        HAS_BIAS=bias is not None,
        FUSED=fused,
        EVEN=even,
        ROWS=ROW_TILE,
        COLUMNS=COLUMN_TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return target


@triton.jit
def _gelu(source, target, size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < size
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(target + place, y.to(target.dtype.element_ty), mask=inside)


def gelu(source: Tensor) -> Tensor:
    """The exact form, of a contiguous tensor."""
    target = torch.empty_like(source)
    grid = (triton.cdiv(source.numel(), FLAT_TILE),)
    _gelu[grid](
        source,
        target,
        source.numel(),
        TILE=FLAT_TILE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return target


@triton.jit
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


@triton.jit
def _widen(source, target, size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < size
    x = tl.load(source + place, mask=inside, other=0.0)
    tl.store(target + place, x.to(tl.float32), mask=inside)


def widen(source: Tensor) -> Tensor:
    """A contiguous 16-bit tensor in float32."""
    target = torch.empty_like(source, dtype=torch.float32)
    grid = (triton.cdiv(source.numel(), FLAT_TILE),)
    _widen[grid](source, target, source.numel(), TILE=FLAT_TILE, num_warps=WARPS)
    return target


@triton.jit(do_not_specialize=["key", "first", "num_threads"])
def _draw(  # type: ignore[no-untyped-def]
    target,
    size,
    key,
    first,
    num_threads,
    KEPT: tl.constexpr,
    QUADS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Four numbers a draw, QUADS draws a vector, VECTORS vectors a program.

    VECTORS divides num_threads: all vectors of a program are in one round of threads.
    """
    program = tl.program_id(0).to(tl.int64)
    vector = program * VECTORS
    quad = tl.arange(0, VECTORS * QUADS)
    draw = first + vector // num_threads * QUADS + quad % QUADS
    thread = ((vector % num_threads).to(tl.int32) + quad // QUADS).to(tl.uint32)
    low, high = draw.to(tl.uint32), (draw >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(key, low, high, thread, tl.zeros_like(thread))
    even = tl.interleave(_uniform(a) < KEPT, _uniform(c) < KEPT)
    odd = tl.interleave(_uniform(b) < KEPT, _uniform(d) < KEPT)
    numbers: tl.constexpr = 4 * QUADS * VECTORS
    place = program * numbers + tl.arange(0, numbers)
    kept = tl.interleave(even, odd).to(tl.int8)
    tl.store(target + place, kept, mask=place < size)


@triton.jit
def _uniform(bits):  # type: ignore[no-untyped-def]
    """curand's: above 0, up to 1."""
    return tl.fma(bits.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)


def draw_mask(
    shape: tuple[int, ...],
    state: Tensor,
    *,
    rate: float,
    vector: int,
    device: torch.device,
) -> Tensor:
    """The mask (bool) that torch's fused dropout draws.

    Args:
        shape: of a contiguous tensor; its elements are a multiple of `vector`.
        state: 16 bytes on the host, of the generator before it drew: key, offset.
        rate: of the elements that are dropped.
        vector: elements that a thread of torch's kernel takes at once, 4 or 8.
        device: where.
    """
    target = torch.empty(shape, dtype=torch.bool, device=device)
    key, offset = state.view(torch.int64).tolist()
    size = target.numel()
    _draw[(triton.cdiv(size, DROPOUT_BLOCK * vector),)](
        target.view(torch.int8),
        size,
        key,
        offset // 4,
        num_dropout_threads(size, device),
        KEPT=float(torch.tensor(1.0 - rate, dtype=torch.float32)),
        QUADS=vector // 4,
        VECTORS=DROPOUT_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return target


def num_dropout_threads(size: int, device: torch.device) -> int:
    """Threads of torch's fused dropout over so many elements."""
    properties = torch.cuda.get_device_properties(device)
    most = properties.multi_processor_count * (
        properties.max_threads_per_multi_processor // DROPOUT_BLOCK
    )
    return DROPOUT_BLOCK * min(most, triton.cdiv(size, DROPOUT_BLOCK))

"""Default schedules, and the candidates that tuning tries.

Schedules are data: nothing in the templates depends on which one is used, so results
are equal up to rounding whatever is chosen here.

[Note: wide tiles] A product of rows [n, k] with weights [k, m] in tiles of r rows and c
columns reads n k m / c of the rows and n k m / r of the weights: both grow fourfold
with the width unless the tile grows with it. So more than 64 columns are taken 128 at
once, and 128 rows at once where types have so many that few tiles are part empty.
Products that are three of TF32 keep small tiles: parts of operands fill the registers,
218 of 255 with two warps where there were three (sm_90, Triton 3.9), and they are bound
by arithmetic.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from hector.emit.gemm import EXACT, DotPrecision
from hector.emit.phases import phases_of, separable_width
from hector.emit.source import pow2
from hector.ir.kernels import (
    ALL_COLUMNS,
    Gemm,
    GemmSchedule,
    Kernel,
    Outer,
    OuterSchedule,
    Schedule,
    SegmentMapping,
    Traversal,
    TraversalSchedule,
)
from hector.ir.node import Op
from hector.ir.types import ROW_DOMAINS, TARGET, TYPE_DOMAINS, Domain, Index

TARGET_PROGRAMS = 1024
"""Programs of a split sum: enough to fill a large GPU several times."""
MANY_GROUPS = 1 << 17
"""So many programs take longer to start (0.6 ns each on an H200) than to fill it."""
SMALL_GROUP = 16
"""Mean rows of groups that are too small for a program of their own."""
LARGE_GROUP = 32
"""Mean rows of groups that fill the steps of a program of their own."""
LOAD_ELEMENTS = 4
"""Of float32, what a thread loads at once: 16 bytes."""
LANE_TILE = 1024
"""Elements of the tile that lanes hold: groups a program times the row's width."""
NARROW_TILE, WIDE_TILE = 64, 128
"""Columns of a product's tile."""
LONG_TYPE = 512
"""Mean rows of a type from which on tiles of 128 rows are nearly all full."""
FILLING_ROWS = 1 << 15
"""So many rows, 128 a program, are two programs for each of 128 multiprocessors; fewer
leave some without work, which costs more than reading twice."""
MAX_TILE = 4096
"""Elements of the widest tile that a traversal keeps in registers."""
HEAVY_TILE = 8192
"""The same of a program that has a heavy group to itself: the longest group is walked
by one program, step after step, so its steps are few and wide."""
HEAVY_MEANS = 4
"""A group of so many times the mean rows is heavy. With fewer, half of all groups are,
and each starts wide steps that are mostly empty."""
LEAST_HEAVY, MOST_HEAVY = 64, 512
"""Rows of the smallest and largest group from which on it may be heavy."""
MAX_HELD = 96
"""Elements of all tiles that a thread holds: registers that let programs share a
multiprocessor."""
CACHE_BYTES = 40_000_000
"""Of the L2 cache of an H100 or H200, what gathered rows may fill."""
FLOAT_BYTES = 4
LEAST_COLUMNS = 32
"""128 bytes of a row: what the memory moves at once."""
OFTEN = 8
"""Edges a row of the gathered table, from which on parts of columns are worth their
second look at the edges."""
LONG_WALK = 128
"""Steps of one program that last longer than the lanes of shared programs walk (at most
`heavy_rows` steps) and heavy groups in wide steps after them, whatever the mean."""


class Sizes(Protocol):
    """What is known of a graph: `GraphArrays`, or published counts."""

    def rows(self, domain: Domain) -> int: ...

    def longest(self, domain: Domain, index: Index) -> int:
        """Rows of the largest group of `domain` by `index`."""
        ...


def default_schedule(
    kernel: Kernel,
    arrays: Sizes,
    mapping: SegmentMapping | None = None,
    precision: DotPrecision = EXACT,
) -> Schedule | None:
    """A good first choice from sizes alone; `mapping` fixes who walks groups."""
    if isinstance(kernel, Gemm):
        return _gemm(kernel, arrays, precision)
    if isinstance(kernel, Outer):
        return _outer(kernel, arrays, precision)
    if isinstance(kernel, Traversal):
        return _traversal(kernel, arrays, mapping)
    return None


def _gemm(k: Gemm, arrays: Sizes, precision: DotPrecision) -> GemmSchedule:
    """See [Note: wide tiles]."""
    cols = k.weight.shape[1] if k.transpose else k.weight.shape[2]
    if cols <= NARROW_TILE or precision.splits:
        return GemmSchedule(num_warps=4 if cols > 16 else 2)
    domain = k.out.domain
    types = arrays.rows(Domain.NTYPE if domain is Domain.NODE else Domain.ETYPE)
    if k.type_index is Index.ALL:
        types = 1
    if arrays.rows(domain) < max(LONG_TYPE * types, FILLING_ROWS):
        return GemmSchedule(block_cols=WIDE_TILE)
    return GemmSchedule(block_rows=WIDE_TILE, block_cols=WIDE_TILE, num_warps=8)


def _outer(k: Outer, arrays: Sizes, precision: DotPrecision) -> OuterSchedule:
    """See [Note: wide tiles]."""
    rows = arrays.rows(k.domain)
    chunk = _chunk(rows)
    narrow = min(k.out.shape[1:]) <= NARROW_TILE
    if narrow or precision.splits or rows < FILLING_ROWS:
        return OuterSchedule(chunk_rows=chunk)
    return OuterSchedule(
        chunk_rows=chunk, block_left=WIDE_TILE, block_right=WIDE_TILE, num_warps=8
    )


def _chunk(rows: int) -> int:
    return min(max(pow2(-(-rows // TARGET_PROGRAMS)), 128), 8192)


def _width(k: Traversal) -> int:
    """Elements of the widest row in registers."""
    widest = 1
    for node in (*k.members, *k.loads, *(i for m in k.members for i in m.inputs)):
        if len(node.shape) == 2:
            widest = max(widest, pow2(node.shape[0]) * pow2(node.shape[1]))
    return widest


def _fit(block: int, width: int) -> int:
    return max(1, min(block, MAX_TILE // width))


def programs(k: Traversal, schedule: TraversalSchedule, arrays: Sizes) -> int:
    """Programs that a traversal starts, but for the heavy groups of SPLIT."""
    rows = arrays.rows(k.loop.domain)
    if k.loop.group is None:
        return -(-rows // schedule.block)
    target = TARGET[k.loop.domain, k.loop.group]
    if target in TYPE_DOMAINS:
        return -(-rows // schedule.chunk_rows)
    groups = arrays.rows(target)
    lanes = schedule.mapping in (SegmentMapping.LANE, SegmentMapping.SPLIT)
    return groups if not lanes else -(-groups // schedule.block)


def _traversal(
    k: Traversal, arrays: Sizes, mapping: SegmentMapping | None
) -> TraversalSchedule:
    columns = _columns(k, arrays)
    made = _walk(k, arrays, mapping, min(_width(k), columns))
    # Of one relation, edges are sorted by destination.
    one = arrays.rows(Domain.ETYPE) == 1 and k.loop.domain is Domain.EDGE
    in_order = one and k.loop.group is Index.DST
    # A sampled graph, whose mapping is given, would make the array in every step.
    ends = one and not in_order and mapping is None and not _walks_types(k)
    return replace(made, block_columns=columns, in_order=in_order, ends_in_order=ends)


def _walks_types(k: Traversal) -> bool:
    return k.loop.group is None or TARGET[k.loop.domain, k.loop.group] in TYPE_DOMAINS


def _columns(k: Traversal, arrays: Sizes) -> int:
    """All columns, unless parts of the gathered rows fit into the cache where whole
    rows do not, and each is gathered often; see [Note: columns apart]."""
    width = separable_width(k)
    if width is None or k.loop.group is None:
        return ALL_COLUMNS
    found = (
        arrays.rows(n.domain)
        for n in k.loads
        if n.shape[1] == width and n.domain in ROW_DOMAINS - {k.loop.domain}
    )
    rows = max(found, default=0)
    often = arrays.rows(k.loop.domain) >= OFTEN * rows
    part = LEAST_COLUMNS
    if not often or width < 2 * part or rows * width * FLOAT_BYTES <= CACHE_BYTES:
        return ALL_COLUMNS
    if rows * part * FLOAT_BYTES > CACHE_BYTES:
        return ALL_COLUMNS
    while 2 * part < width and 2 * rows * part * FLOAT_BYTES <= CACHE_BYTES:
        part *= 2
    return part


def _walk(
    k: Traversal, arrays: Sizes, mapping: SegmentMapping | None, width: int
) -> TraversalSchedule:
    if k.loop.group is None:
        block = _fit(max(2048 // width, 1), width)
        return TraversalSchedule(block=min(block, 256), num_warps=4)
    target = TARGET[k.loop.domain, k.loop.group]
    rows = arrays.rows(k.loop.domain)
    if target in TYPE_DOMAINS:
        chunk = _chunk(rows)
        block = min(_fit(max(2048 // width, 1), width), 64)
        return TraversalSchedule(block=block, chunk_rows=chunk, num_warps=4)
    groups = max(arrays.rows(target), 1)
    mean = max(rows // groups, 1)
    block = min(max(pow2(mean), 4), 32)
    if mapping is None:
        longest = arrays.longest(k.loop.domain, k.loop.group)
        many = mean <= SMALL_GROUP and groups >= MANY_GROUPS
        if many or longest > LONG_WALK * block:
            mapping = SegmentMapping.SPLIT
            if not many and mean >= LARGE_GROUP and separable_width(k) is not None:
                return _two_steps(width)
    if mapping not in (None, SegmentMapping.PROGRAM):
        return _shared(width, mapping, mean)
    tile = block * width
    warps = 1 if tile <= 1024 else 2 if tile <= 2048 else 4
    while warps < 8 and tile * _num_tiles(k, width) > MAX_HELD * 32 * warps:
        warps *= 2
    return TraversalSchedule(block=_fit(block, width), num_warps=warps)


def _num_tiles(k: Traversal, width: int) -> int:
    """Tiles that a program holds at once: wide rows that it reads and wide sums."""
    sums = (m for m in k.members if m.op is Op.AGG)
    return sum(pow2(n.type.width) == width for n in (*k.loads, *sums))


def _shared(width: int, mapping: SegmentMapping, mean: int) -> TraversalSchedule:
    """Several groups a program; what is several times the mean has one to itself."""
    block = _fit(min(max(LANE_TILE // width, 1), 128), width)
    rows = min(max(pow2(HEAVY_MEANS * mean), LEAST_HEAVY), MOST_HEAVY)
    return _with_heavy(
        TraversalSchedule(
            mapping=mapping,
            block=block,
            heavy_first=True,
            heavy_rows=rows,
            num_warps=4,
        ),
        width,
    )


def _two_steps(width: int) -> TraversalSchedule:
    """A program for each group, in steps of one load a thread: many programs share a
    multiprocessor, and hide what each of them waits for."""
    warps = 4
    block = max(1, min(LOAD_ELEMENTS * 32 * warps // width, 32))
    return _with_heavy(
        TraversalSchedule(
            mapping=SegmentMapping.TWO_STEPS,
            block=block,
            heavy_first=True,
            heavy_rows=LONG_WALK * block,
            num_warps=warps,
        ),
        width,
    )


def _with_heavy(schedule: TraversalSchedule, width: int) -> TraversalSchedule:
    """The wide steps of heavy groups: 16 elements a thread, or fewer."""
    block = max(1, min(HEAVY_TILE // width, 256))
    warps = min(max(block * width // 512, 4), 16)
    return replace(schedule, heavy_block=block, heavy_warps=warps)


def walk_steps(k: Traversal, schedule: TraversalSchedule, arrays: Sizes) -> int:
    """Steps that follow one another when the largest group is walked; 0 if groups do
    not bound a kernel: rows alone, or chunks of even size."""
    group = k.loop.group
    if group is None or TARGET[k.loop.domain, group] in TYPE_DOMAINS:
        return 0
    longest = arrays.longest(k.loop.domain, group)
    if schedule.mapping is SegmentMapping.PROGRAM:
        steps = -(-longest // schedule.block)
    elif schedule.mapping is SegmentMapping.LANE:
        steps = longest
    else:
        one = schedule.mapping is SegmentMapping.TWO_STEPS
        block = schedule.block if one else 1
        steps = -(-min(longest, schedule.heavy_rows) // block)
        if longest > schedule.heavy_rows:
            steps += -(-longest // schedule.heavy_block)
    return steps * len(phases_of(k))


def candidates(kernel: Kernel, first: Schedule) -> Iterator[Schedule]:
    """Schedules worth timing for a kernel, the default first."""
    yield first
    if isinstance(first, GemmSchedule) and isinstance(kernel, Gemm):
        yield from _gemm_candidates(kernel)
    elif isinstance(first, OuterSchedule):
        yield from _outer_candidates(first)
    elif isinstance(first, TraversalSchedule) and isinstance(kernel, Traversal):
        yield from _with_columns(kernel, first)


def _gemm_candidates(k: Gemm) -> Iterator[GemmSchedule]:
    wide = max(k.weight.shape[1:]) > NARROW_TILE
    for cols in (NARROW_TILE, WIDE_TILE) if wide else (NARROW_TILE,):
        for rows in (32, 64, 128):
            for warps in (2, 4, 8):
                yield GemmSchedule(block_rows=rows, block_cols=cols, num_warps=warps)


def _outer_candidates(first: OuterSchedule) -> Iterator[OuterSchedule]:
    for side in dict.fromkeys((NARROW_TILE, first.block_left)):
        for rows in (16, 32, 64):
            for scale in (1, 2):
                for warps in (4, 8):
                    yield OuterSchedule(
                        chunk_rows=min(first.chunk_rows * scale, 8192),
                        block_rows=rows,
                        block_left=side,
                        block_right=side,
                        num_warps=warps,
                    )


def _with_columns(
    k: Traversal, first: TraversalSchedule
) -> Iterator[TraversalSchedule]:
    """Candidates with all columns at once, and in parts where that can be."""
    width = separable_width(k) or 0
    for made in _traversal_candidates(k, first):
        for columns in (ALL_COLUMNS, 32, 64):
            if columns == ALL_COLUMNS or columns < width:
                yield replace(
                    made,
                    in_order=first.in_order,
                    ends_in_order=first.ends_in_order,
                    block_columns=columns,
                )


def _traversal_candidates(
    k: Traversal, first: TraversalSchedule
) -> Iterator[TraversalSchedule]:
    width = _width(k)
    grouped = k.loop.group is not None
    types = grouped and TARGET[k.loop.domain, k.loop.group] in TYPE_DOMAINS  # type: ignore[index]
    if not grouped or types:
        for scale in (1, 2, 4):
            block = _fit(max(1024 * scale // width, 1), width)
            for warps in (2, 4, 8):
                yield TraversalSchedule(
                    block=min(block, 256), chunk_rows=first.chunk_rows, num_warps=warps
                )
        return
    for block in (4, 8, 16, 32):
        for warps in (1, 2, 4):
            for heavy in (False, True):
                yield TraversalSchedule(
                    block=_fit(block, width), num_warps=warps, heavy_first=heavy
                )
    yield _two_steps(min(width, first.block_columns))
    for elements in (256, 512, 1024):
        for rows in (LEAST_HEAVY, MOST_HEAVY):
            split = TraversalSchedule(
                mapping=SegmentMapping.SPLIT,
                block=max(1, elements // width) if width > 4 else 128,
                heavy_first=True,
                heavy_rows=rows,
                num_warps=max(1, elements // 256) if width > 4 else 4,
            )
            yield _with_heavy(split, width)

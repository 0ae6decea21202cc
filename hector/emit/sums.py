"""The second half of sums into types: partial rows are added in a fixed order.

A weight's gradient is summed by many programs, each over a chunk of rows of one type;
their partial sums are then added in the order of the chunks: deterministic, no
atomics. Sums that no kernel of the plan reads are all added by one launch, after the
plan's last kernel: on small graphs each launch less is a visible part of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hector.emit.gemm import Emitted
from hector.emit.source import ArgKind, Source, pow2
from hector.ir.node import Node
from hector.ir.types import Domain, Index

MAX_COLUMNS = 128
"""Columns of a sum that one program adds."""
STEP = 16
"""Partial rows that it takes at once."""


@dataclass(frozen=True)
class Sum:
    """Partial rows of one value: `tiles` as (domain, index, rows of a chunk)."""

    tiles: tuple[Domain, Index, int]
    out: Node

    @property
    def columns(self) -> int:
        """Columns that one program adds."""
        return min(pow2(self.out.type.width), MAX_COLUMNS)

    @property
    def programs(self) -> int:
        """Programs a type."""
        return -(-self.out.type.width // self.columns)


def emit_sums(sums: Sequence[Sum], name: str) -> Emitted:
    """The kernel text that adds the partial rows of all `sums`."""
    src = Source(name)
    src.emit("program = tl.program_id(0)")
    first = "0"
    for i, one in enumerate(sums):
        end = src.arg(ArgKind.COUNT, tuple(sums[: i + 1]), "end")
        with src.block(f"if (program >= {first}) & (program < {end}):"):
            _emit_one(src, one, f"(program - {first})", str(i))
        first = end
    return Emitted(
        source=src,
        doc="sums of partial results a type",
        grid=(("sums", tuple(sums)), 1, 1),
        num_warps=4,
        num_stages=2,
    )


def _emit_one(src: Source, s: Sum, program: str, i: str) -> None:
    """One program's share of a sum; a name of its own each, since the branches of a
    kernel must agree on the shapes of names that they share."""
    width, block = s.out.type.width, s.columns
    ptr = src.arg(ArgKind.TILE_PTR, s.tiles, "tile_ptr")
    part = src.arg(ArgKind.PARTIAL, s.out, "partial")
    to = src.arg(ArgKind.VALUE, s.out, "out")
    src.emit(f"kind{i} = {program} // {s.programs}")
    column = f"{program} % {s.programs} * {block} + tl.arange(0, {block})"
    src.emit(f"col{i} = {column}")
    src.emit(f"ok{i} = col{i} < {width}")
    src.emit(f"acc{i} = tl.zeros([{STEP}, {block}], tl.float32)")
    src.emit(f"lo{i} = tl.load({ptr} + kind{i})")
    src.emit(f"hi{i} = tl.load({ptr} + kind{i} + 1)")
    with src.block(f"for at{i} in range(lo{i}, hi{i}, {STEP}):"):
        src.emit(f"tile{i} = at{i} + tl.arange(0, {STEP})")
        where = f"{part} + tile{i}.to(tl.int64)[:, None] * {width} + col{i}[None, :]"
        mask = f"(tile{i} < hi{i})[:, None] & ok{i}[None, :]"
        src.emit(f"acc{i} += tl.load({where}, mask={mask}, other=0.0)")
    src.emit(f"sum{i} = tl.sum(acc{i}, axis=0)")
    place = f"{to} + kind{i}.to(tl.int64) * {width} + col{i}"
    src.emit(f"tl.store({place}, sum{i}, mask=ok{i})")

"""The GEMM template: Y[i] = scale * X[G(i)] @ W[T] (+ b[T]), and its weight gradient.

One launch covers all types: a tile map, made once a graph, says which rows of which
type each program takes, so no tile crosses a type and no weight is replicated
(Algorithm 3.1, section 3.3.3).

[Note: programs of one tile] Where a tile's columns are several programs', each of them
reads the tile's rows. They are numbered one after the other, so they run at the same
time and all but the first find the rows in the L2 cache; numbered tile by tile, the
gathered rows of a wide product came from memory once for each part of the columns.
"""

from dataclasses import dataclass

from hector.emit.source import ArgKind, Source, pow2
from hector.ir.kernels import Gemm, GemmRows, GemmSchedule, Outer, OuterSchedule
from hector.ir.types import Domain, Index

MIN_DOT = 16
"""Smallest side of a tensor-core tile."""


@dataclass(frozen=True, kw_only=True)
class DotPrecision:
    """How products of tiles are taken."""

    dtype: str
    """Triton dtype that operands are cast to."""
    input_precision: str
    """`ieee` or `tf32x3` (both fp32-accurate), or `tf32` where PyTorch allows it."""

    @property
    def splits(self) -> bool:
        """Whether a product is three, of parts of its operands: the parts fill the
        registers."""
        return self.dtype == "tl.float32" and self.input_precision != "tf32"

    @property
    def argument(self) -> str:
        """The argument of `tl.dot`."""
        if self.dtype != "tl.float32":
            return ""
        return f', input_precision="{self.input_precision}"'


EXACT = DotPrecision(dtype="tl.float32", input_precision="tf32x3")
"""What fp32 is without PyTorch's leave for TF32."""


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """A generated kernel: its text, parameters and launch grid."""

    source: Source
    doc: str
    grid: tuple[object, ...]
    """Per axis an int, or the Arg-kind key ('tiles', domain, index, block) or
    ('rows', domain, per program) or ('sums', sums), or ('times', int, key)."""
    num_warps: int
    num_stages: int


class _Operand:
    """Loads blocks of an operand's rows: gather and per-row scalar on the fly."""

    def __init__(self, src: Source, rows: GemmRows, domain: Domain) -> None:
        self.src, self.rows, self.domain = src, rows, domain

    def row_ids(self, gather: Index | None, ok: str) -> str:
        if gather is None:
            return "row"
        table = self.src.arg(ArgKind.INDEX, (self.domain, gather), "index")
        return self.src.let("at", f"tl.load({table} + row, mask={ok}, other=0)")

    def prepare(self, ok: str) -> tuple[str, str | None]:
        """(64-bit row ids, scale or None), loaded once a block of rows."""
        at = self.row_ids(self.rows.gather, ok)
        wide = self.src.let("at", f"{at}.to(tl.int64)")
        if self.rows.scale is None:
            return wide, None
        where = self.row_ids(self.rows.scale_gather, ok)
        ptr = self.src.arg(ArgKind.VALUE, self.rows.scale, "scale")
        load = f"tl.load({ptr} + {where}, mask={ok}, other=0.0).to(tl.float32)"
        return wide, self.src.let("scale", load)


def _cut(size: int, block: int) -> int:
    return max(MIN_DOT, min(pow2(size), block))


def emit_gemm(
    k: Gemm, name: str, schedule: GemmSchedule, precision: DotPrecision
) -> Emitted:
    """The kernel text of a GEMM instance."""
    heads, inner = k.weight.shape[0], k.weight.shape[1]
    cols = k.weight.shape[2]
    if k.transpose:
        inner, cols = cols, inner
    bm = schedule.block_rows
    bn, bk = _cut(cols, schedule.block_cols), _cut(inner, schedule.block_inner)
    src = Source(name)
    domain = k.out.domain
    tiles = (domain, k.type_index, bm)
    t = src.arg(ArgKind.TILE_TYPE, tiles, "tile_type")
    lo = src.arg(ArgKind.TILE_START, tiles, "tile_start")
    hi = src.arg(ArgKind.TILE_END, tiles, "tile_end")
    across = -(-cols // bn)
    part = _tile_and_part(src, across)
    src.emit(f"kind = tl.load({t} + tile).to(tl.int64)")
    src.emit(f"row = tl.load({lo} + tile) + tl.arange(0, {bm})")
    src.emit(f"ok = row < tl.load({hi} + tile)")
    src.emit(f"col = {part} * {bn} + tl.arange(0, {bn})")
    src.emit("head = tl.program_id(2)")
    at, scale = _Operand(src, k.rows, domain).prepare("ok")
    x = src.arg(ArgKind.VALUE, k.rows.value, "x")
    w = src.arg(ArgKind.VALUE, k.weight, "w")
    src.emit(f"acc = tl.zeros([{bm}, {bn}], tl.float32)")
    src.emit(f"x_row = {x} + {at}[:, None] * {heads * inner} + head * {inner}")
    src.emit(f"w_type = {w} + (kind * {heads} + head) * {inner * cols}")
    for start in range(0, inner, bk):
        taken = _cut(inner - start, bk)
        src.emit(f"inner = {start} + tl.arange(0, {taken})")
        ragged = start + taken > inner
        more = f" & (inner < {inner})[None, :]" if ragged else ""
        src.emit(
            f"a = tl.load(x_row + inner[None, :], mask=ok[:, None]{more}, other=0.0)"
        )
        step = f"col[None, :] * {inner} + inner[:, None]"
        if not k.transpose:
            step = f"inner[:, None] * {cols} + col[None, :]"
        mask = _and(
            f"(col < {cols})[None, :]" if cols % bn else "",
            f"(inner < {inner})[:, None]" if ragged else "",
        )
        src.emit(f"b = tl.load(w_type + {step}{mask})")
        src.emit(
            f"acc = tl.dot(a.to({precision.dtype}), b.to({precision.dtype}), acc"
            f"{precision.argument})"
        )
    _epilogue(src, k, scale, (heads, cols, bn))
    grid = (("times", across, ("tiles", *tiles)), 1, heads)
    return Emitted(
        source=src,
        doc=str(k),
        grid=grid,
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
    )


def _tile_and_part(src: Source, across: int) -> str:
    """Define `tile`; the text of a program's part of `across` parts of its columns.
    See [Note: programs of one tile]."""
    if across == 1:
        src.emit("tile = tl.program_id(0)")
        return "0"
    src.emit(f"tile = tl.program_id(0) // {across}")
    return f"(tl.program_id(0) % {across})"


def _epilogue(
    src: Source, k: Gemm, scale: str | None, columns: tuple[int, int, int]
) -> None:
    """Scales the tile's rows, adds the bias of their type and stores them."""
    heads, cols, bn = columns
    if scale is not None:
        src.emit(f"acc = acc * {scale}[:, None]")
    if k.bias is not None:
        bias = src.arg(ArgKind.VALUE, k.bias, "bias")
        mask = f", mask=col < {cols}, other=0.0" if cols % bn else ""
        where = f"{bias} + (kind * {heads} + head) * {cols} + col"
        src.emit(f"acc += tl.load({where}{mask}).to(tl.float32)[None, :]")
    out = src.arg(ArgKind.VALUE, k.out, "out")
    place = f"row.to(tl.int64)[:, None] * {heads * cols} + head * {cols} + col[None, :]"
    more = f" & (col < {cols})[None, :]" if cols % bn else ""
    src.emit(f"tl.store({out} + {place}, acc, mask=ok[:, None]{more})")


def _and(*masks: str) -> str:
    used = [m for m in masks if m]
    return f", mask={' & '.join(used)}, other=0.0" if used else ""


def emit_outer(
    k: Outer, name: str, schedule: OuterSchedule, precision: DotPrecision
) -> Emitted:
    """The kernel text of a weight gradient: one partial matrix a chunk of rows."""
    heads, left, right = k.out.shape
    bl, br = _cut(left, schedule.block_left), _cut(right, schedule.block_right)
    rows = schedule.block_rows
    src = Source(name)
    tiles = (k.domain, k.type_index, schedule.chunk_rows)
    lo = src.arg(ArgKind.TILE_START, tiles, "tile_start")
    hi = src.arg(ArgKind.TILE_END, tiles, "tile_end")
    across = -(-right // br)
    blocks = -(-left // bl) * across
    part = _tile_and_part(src, blocks)
    src.emit(f"li = {part} // {across} * {bl} + tl.arange(0, {bl})")
    src.emit(f"ri = {part} % {across} * {br} + tl.arange(0, {br})")
    src.emit("head = tl.program_id(2)")
    src.emit(f"lo = tl.load({lo} + tile)")
    src.emit(f"hi = tl.load({hi} + tile)")
    src.emit(f"acc = tl.zeros([{bl}, {br}], tl.float32)")
    with src.block(f"for first in range(lo, hi, {rows}):"):
        src.emit(f"row = first + tl.arange(0, {rows})")
        src.emit("ok = row < hi")
        a = _block(src, k.left, k.domain, ("li", left, heads, left % bl != 0))
        b = _block(src, k.right, k.domain, ("ri", right, heads, right % br != 0))
        src.emit(
            f"acc = tl.dot(tl.trans({a}.to({precision.dtype})), "
            f"{b}.to({precision.dtype}), acc{precision.argument})"
        )
    part = src.arg(ArgKind.PARTIAL, k.out, "partial")
    place = f"li[:, None] * {right} + ri[None, :]"
    src.emit(f"base = (tile.to(tl.int64) * {heads} + head) * {left * right}")
    mask = f"(li < {left})[:, None] & (ri < {right})[None, :]"
    src.emit(f"tl.store({part} + base + {place}, acc, mask={mask})")
    return Emitted(
        source=src,
        doc=str(k),
        grid=(("times", blocks, ("tiles", *tiles)), 1, heads),
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
    )


def _block(
    src: Source, rows: GemmRows, domain: Domain, columns: tuple[str, int, int, bool]
) -> str:
    """A [rows, columns] block of an operand, scaled."""
    var, width, heads, ragged = columns
    at, scale = _Operand(src, rows, domain).prepare("ok")
    ptr = src.arg(ArgKind.VALUE, rows.value, "x")
    more = f" & ({var} < {width})[None, :]" if ragged else ""
    where = f"{at}[:, None] * {heads * width} + head * {width} + {var}[None, :]"
    name = src.let("v", f"tl.load({ptr} + {where}, mask=ok[:, None]{more}, other=0.0)")
    if scale is not None:
        name = src.let("v", f"{name}.to(tl.float32) * {scale}[:, None]")
    return name

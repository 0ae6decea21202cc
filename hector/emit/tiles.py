"""Text of tile arithmetic: what traversal kernels are written in.

[Note: offsets] A row number becomes a 64-bit offset after it was put on its axis, not
before: Triton 3.6 moves a layout conversion of `x.to(tl.int64)[:, None]` up to the load
that gave x, leaves that load's mask behind, and then refuses its own code (seen with
32 and 64 rows of width 32).
"""

from dataclasses import dataclass, field

from hector.emit.source import pow2
from hector.ir.node import Node, Op
from hector.ir.types import NARROW

UNARY_TEXT: dict[Op, str] = {
    Op.NEG: "-{0}",
    Op.EXP: "tl.exp({0})",
    Op.LOG: "tl.log({0})",
    Op.SQRT: "tl.sqrt({0})",
    Op.SIGMOID: "1.0 / (1.0 + tl.exp(-{0}))",
    Op.TANH: "2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0",
    Op.RELU: "tl.maximum({0}, 0.0)",
    Op.ELU: "tl.where({0} > 0, {0}, tl.exp(tl.minimum({0}, 0.0)) - 1.0)",
    Op.GELU: "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    Op.COS: "tl.cos({0})",
    Op.SIN: "tl.sin({0})",
    Op.ERF: "tl.erf({0})",
    Op.DETACH: "{0}",
}
BINARY_TEXT: dict[Op, str] = {
    Op.ADD: "{0} + {1}",
    Op.SUB: "{0} - {1}",
    Op.MUL: "{0} * {1}",
    Op.DIV: "{0} / {1}",
    Op.MAXIMUM: "tl.maximum({0}, {1})",
    Op.EQ: "({0} == {1}).to(tl.float32)",
    Op.GT: "({0} > {1}).to(tl.float32)",
}


@dataclass
class TileShapes:
    """Shapes, offsets and masks of [rows, heads, width] tiles.

    Sides are padded to powers of two, as Triton wants them. Without heads the middle
    axis is left out.
    """

    heads: bool
    columns: int | None = None
    """Of a wide row, if a program takes some alone: see [Note: columns apart]."""
    vectors: set[str] = field(default_factory=set)
    """Definitions of the index vectors in use."""

    @property
    def rank(self) -> int:
        return 3 if self.heads else 2

    def axes(self, axis: int) -> str:
        """Subscript that puts a vector on one axis."""
        parts = [":" if i == axis else "None" for i in range(self.rank)]
        return f"[{', '.join(parts)}]"

    def shape(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        heads = (pow2(shape[0]),) if self.heads else ()
        width = pow2(shape[1])
        if self.columns is not None and width > 1:
            width = self.columns
        return (rows, *heads, width)

    def column(self, width: int) -> str:
        name = f"col{width}"
        axes = self.axes(self.rank - 1)
        text = f"tl.arange(0, {pow2(width)}){axes}"
        if self.columns is not None and width > 1:
            text = f"tl.arange(0, {self.columns}){axes}"
            text += f" + tl.program_id(1) * {self.columns}"
        self.vectors.add(f"{name} = {text}")
        return name

    def head(self, count: int) -> str:
        name = f"head{count}"
        self.vectors.add(f"{name} = tl.arange(0, {pow2(count)}){self.axes(1)}")
        return name

    def zero(self) -> str:
        ones = ", ".join("1" * self.rank)
        self.vectors.add(f"zero = tl.zeros([{ones}], tl.int32)")
        return "zero"

    def place(
        self, row: str | None, total: int, shape: tuple[int, ...], start: int
    ) -> str:
        """Offsets of a tile: `row` (None: the only row) of rows of `total` elements."""
        terms = []
        if row is not None:
            # See [Note: offsets]: the axes come before the wider integer.
            column = f"({row}){self.axes(0)}"
            terms.append(column if total == 1 else f"{column}.to(tl.int64) * {total}")
        if shape[0] > 1:
            terms.append(f"{self.head(shape[0])} * {total // shape[0]}")
        terms.append(self.column(shape[1]) if shape[1] > 1 else self.zero())
        return " + ".join([*terms, *([str(start)] if start else [])])

    def mask(self, rows: str | None, shape: tuple[int, ...]) -> str:
        """What of a tile exists; empty if all of it does."""
        parts = [] if rows is None else [self.spread(rows)]
        if pow2(shape[1]) != shape[1]:
            parts.append(f"({self.column(shape[1])} < {shape[1]})")
        if pow2(shape[0]) != shape[0]:
            parts.append(f"({self.head(shape[0])} < {shape[0]})")
        return " & ".join(parts)

    def within_row(self, node: Node, text: str) -> str:
        """An operation on one operand along a row, on the tile `text`."""
        if node.op is Op.LEAKY_RELU:
            slope = node.number("slope")
            return f"tl.where({text} > 0, {text}, {text} * {slope!r})"
        if node.op is Op.SUM_WIDTH:
            width = node.inputs[0].shape[1]
            if pow2(width) != width:
                text = f"tl.where({self.column(width)} < {width}, {text}, 0.0)"
            return f"tl.sum({text}, axis={self.rank - 1}, keep_dims=True)"
        if node.op is Op.SUM_HEADS:
            count = node.inputs[0].shape[0]
            if pow2(count) != count:
                text = f"tl.where({self.head(count)} < {count}, {text}, 0.0)"
            return f"tl.sum({text}, axis=1, keep_dims=True)"
        raise NotImplementedError(f"no traversal text for {node.op.value}")

    def spread(self, rows: str) -> str:
        return f"{rows}{self.axes(0)}"


def is_narrow(node: Node) -> bool:
    """Whether a row is kept in fp32, so that reading it back changes nothing."""
    return len(node.shape) == 2 and node.type.width <= NARROW

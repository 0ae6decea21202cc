"""The template for operations on parameters; see [Note: parameter blocks].

One launch computes all values of a block: each has programs of its own, told apart by
their numbers. A contraction that sums over types leaves a partial row a type.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hector.emit.gemm import Emitted
from hector.emit.source import ArgKind, Source, literal, pow2
from hector.emit.sums import Sum
from hector.emit.tiles import BINARY_TEXT, UNARY_TEXT
from hector.ir.kernels import Parameters
from hector.ir.node import Node, Op
from hector.ir.types import Domain, Index
from hector.passes.parameters import inner_letters, reduces, sums_types

BLOCK = 1024
"""Elements of a program that only computes element by element."""
TILE = 2048
"""Elements of the tile that a contraction takes at once."""
INNER = 64
"""Most terms of a contraction that it takes at once."""


@dataclass(frozen=True)
class Share:
    """Programs of one value: `block` elements each of rows of `width` elements."""

    domain: Domain
    width: int
    block: int

    def programs(self, rows: int) -> int:
        return -(-rows * self.width // self.block)


@dataclass(frozen=True)
class _Place:
    """One element of a value, or a tile of them: texts of the row and of each axis."""

    row: str
    axes: tuple[str, ...]


def share(node: Node) -> Share:
    """The programs that compute `node`."""
    if sums_types(node):
        blocks = -(-node.type.width // _block(node))
        return Share(_summed(node), blocks, 1)
    return Share(node.domain, node.type.width, _block(node))


def parameter_sums(k: Parameters) -> list[Sum]:
    """The values of which a block leaves partial rows: one a type."""
    sums = (n for n in k.stores if sums_types(n))
    return [Sum((_summed(n), Index.ALL, 1), n) for n in sums]


def _summed(node: Node) -> Domain:
    return next(i.domain for i in node.inputs if i.domain is not Domain.GLOBAL)


def _inner(node: Node) -> tuple[int, int]:
    """Terms of a contraction, and how many of them a program takes at once."""
    terms = 1
    for _, size in inner_letters(node):
        terms *= size
    return terms, min(pow2(terms), INNER)


def _block(node: Node) -> int:
    """Elements of one program."""
    if not reduces(node):
        return BLOCK
    block = TILE // _inner(node)[1]
    return min(block, pow2(node.type.width)) if sums_types(node) else block


def emit_parameters(k: Parameters, name: str) -> Emitted:
    """The kernel text of a block."""
    src = Source(name)
    src.emit("program = tl.program_id(0)")
    shares: list[Share] = []
    first = "0"
    for node in k.stores:
        shares.append(share(node))
        end = src.arg(ArgKind.COUNT, tuple(shares), "end")
        with src.block(f"if (program >= {first}) & (program < {end}):"):
            mine = src.let("mine", f"(program - {first}).to(tl.int64)")
            emit = _contraction if reduces(node) else _pointwise
            emit(_Values(src, k), node, mine)
        first = end
    return Emitted(
        source=src,
        doc=str(k),
        grid=(("shares", tuple(shares)), 1, 1),
        num_warps=4,
        num_stages=2,
    )


def _pointwise(values: "_Values", node: Node, mine: str) -> None:
    src, width = values.src, node.type.width
    at = src.let("at", f"{mine} * {BLOCK} + tl.arange(0, {BLOCK})")
    rows = src.arg(ArgKind.COUNT, node.domain, "rows")
    ok = src.let("ok", f"{at} < {rows} * {width}")
    values.zero = f"{at} * 0"
    place = _Place(f"({at} // {width})", _split(f"({at} % {width})", node.shape))
    value = values.computed(node, place, ok)
    out = src.arg(ArgKind.VALUE, node, "out")
    src.emit(f"tl.store({out} + {at}, {value}, mask={ok})")


def _contraction(values: "_Values", node: Node, mine: str) -> None:
    """Elements of a contraction along the first axis of a tile, terms along the
    other."""
    src, width, block = values.src, node.type.width, _block(node)
    terms, step = _inner(node)
    apart = sums_types(node)
    row = "0"
    if apart:
        blocks = -(-width // block)
        row = src.let("type", f"{mine} // {blocks}")
        mine = f"({mine} % {blocks})"
    at = src.let("at", f"{mine} * {block} + tl.arange(0, {block})")
    end = str(width)
    if not apart:
        end = f"{src.arg(ArgKind.COUNT, node.domain, 'rows')} * {width}"
        row = f"({at} // {width})[:, None]"
    ok = src.let("ok", f"{at} < {end}")
    axes = _split(f"({at} % {width})[:, None]", node.shape)
    acc = src.fresh("acc")
    src.emit(f"{acc} = tl.zeros([{block}, {step}], tl.float32)")
    for start in range(0, terms, step):
        term = src.let("term", f"{start} + tl.arange(0, {step})[None, :]")
        mask = f"{ok}[:, None]"
        if start + step > terms:
            mask += f" & ({term} < {terms})"
        values.zero = f"({at}[:, None] + {term}) * 0"
        text = values.product(node, _Place(row, axes), mask, term)
        src.emit(f"{acc} += {text}")
    total = src.let("total", f"tl.sum({acc}, axis=1)")
    if apart:
        out = src.arg(ArgKind.PARTIAL, node, "partial")
        place = f"{row} * {width} + {at}"
    else:
        out, place = src.arg(ArgKind.VALUE, node, "out"), at
    src.emit(f"tl.store({out} + {place}, {total}, mask={ok})")


class _Values:
    """Texts of values at a place: loaded, or computed in registers."""

    def __init__(self, src: Source, k: Parameters) -> None:
        self.src, self.loads = src, set(k.loads)
        self.zero = "0"
        """Spreads an address over the tile of the value that is emitted."""

    def value(self, node: Node, place: _Place, mask: str) -> str:
        """`node` at `place`, whose axes may be those of a larger value."""
        if node.op is Op.CONST:
            return literal(node.number("value"))
        axes = zip(place.axes, node.shape, strict=True)
        place = _Place(
            "0" if node.domain is Domain.GLOBAL else place.row,
            tuple("0" if size == 1 else text for text, size in axes),
        )
        if node in self.loads:
            ptr = self.src.arg(ArgKind.VALUE, node, "x")
            where = f"{place.row} * {node.type.width} + {_flat(place, node.shape)}"
            # As many addresses as the mask has elements, where they differ or not.
            load = f"tl.load({ptr} + {where} + {self.zero}, mask={mask}, other=0.0)"
            return self.src.let("v", f"{load}.to(tl.float32)")
        return self.computed(node, place, mask)

    def computed(self, node: Node, place: _Place, mask: str) -> str:
        """`node` at `place` from its operands."""
        if node.op is Op.EINSUM:
            return self.product(node, place, mask, "0")
        if node.op is Op.RESHAPE:
            source = node.inputs[0]
            seen = _split(f"({_flat(place, node.shape)})", source.shape)
            return self.value(source, _Place(place.row, seen), mask)
        args = [self.value(i, place, mask) for i in node.inputs]
        if node.op is Op.EXPAND:
            return args[0]
        text = BINARY_TEXT.get(node.op) or UNARY_TEXT[node.op]
        return self.src.let("v", text.format(*args))

    def product(self, node: Node, place: _Place, mask: str, term: str) -> str:
        """One term of a contraction, as the product of its operands."""
        left, right = str(node.attr("equation")).split("->")
        inner = inner_letters(node)
        shape = tuple(size for _, size in inner)
        found = dict(zip(right, place.axes, strict=True))
        names = (letter for letter, _ in inner)
        found.update(zip(names, _split(term, shape), strict=True))
        factors = []
        for letters, operand in zip(left.split(","), node.inputs, strict=True):
            axes = tuple(found.get(c, "0") for c in letters)
            factors.append(self.value(operand, _Place(place.row, axes), mask))
        return " * ".join(factors)


def _split(flat: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Where a number within a row of this shape lies on each axis."""
    found = []
    stride = 1
    large = [i for i, size in enumerate(shape) if size > 1]
    for axis in reversed(range(len(shape))):
        text = flat if stride == 1 else f"({flat} // {stride})"
        if axis not in large[:1]:
            text = f"({text} % {shape[axis]})"
        found.append("0" if shape[axis] == 1 else text)
        stride *= shape[axis]
    return tuple(reversed(found))


def _flat(place: _Place, shape: Sequence[int]) -> str:
    """The number within a row of this shape of a place on its axes."""
    terms = []
    stride = 1
    for text, size in zip(reversed(place.axes), reversed(shape), strict=True):
        if text != "0":
            terms.append(text if stride == 1 else f"{text} * {stride}")
        stride *= size
    return " + ".join(reversed(terms)) or "0"

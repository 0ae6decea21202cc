"""Makes IR nodes: infers their types, interns them, refuses illegal ones."""

import math

from hector.ir.node import BINARY, UNARY, Attr, Node, Op
from hector.ir.types import (
    TARGET,
    TYPE_DOMAINS,
    TYPE_INDEX,
    Domain,
    Index,
    RowType,
)


class IRTypeError(ValueError):
    """An operation applied to values that it is not defined on."""


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of two rows; IRTypeError if there is none."""
    if len(a) != len(b):
        raise IRTypeError(f"expected rows of equal rank, got {list(a)} and {list(b)}")
    for x, y in zip(a, b, strict=True):
        if x != y and 1 not in (x, y):
            raise IRTypeError(
                f"expected rows of equal or broadcastable shape (heads, width), got "
                f"{list(a)} and {list(b)}"
            )
    return tuple(max(x, y) if 0 not in (x, y) else 0 for x, y in zip(a, b, strict=True))


class Builder:
    """An arena of interned nodes: asking twice for one node gives the same object,
    so common subexpressions are eliminated by construction."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[object, ...], Node] = {}

    def make(
        self, op: Op, inputs: tuple[Node, ...], type_: RowType, **attrs: Attr
    ) -> Node:
        items = tuple(sorted(attrs.items()))
        key = (op, tuple(n.serial for n in inputs), type_, items)
        found = self._nodes.get(key)
        if found is None:
            found = Node(op, inputs, type_, items, len(self._nodes))
            self._nodes[key] = found
        return found

    def signature(self) -> tuple[object, ...]:
        """Equal for builders that were asked for the same nodes in the same order."""
        return tuple(self._nodes)

    # Leaves.

    def input(self, name: str, domain: Domain, shape: tuple[int, ...]) -> Node:
        return self.make(Op.INPUT, (), RowType(domain, shape), name=name)

    def graph(self, name: str, domain: Domain) -> Node:
        return self.make(Op.GRAPH, (), RowType(domain, (1, 1)), name=name)

    def const(self, value: float, domain: Domain = Domain.GLOBAL) -> Node:
        value = float(value)
        if value == 0.0 and math.copysign(1.0, value) < 0:
            # Zeros of both signs are equal, and would be one node.
            return self.unary(Op.NEG, self.const(0.0, domain))
        return self.make(Op.CONST, (), RowType(domain, (1, 1)), value=value)

    def full(self, value: float, domain: Domain, shape: tuple[int, ...]) -> Node:
        return self.expand(self.const(value, domain), shape)

    # Moving rows.

    def read(self, x: Node, index: Index, domain: Domain) -> Node:
        """Rows of `x` seen from `domain` through `index`."""
        target = TARGET.get((domain, index))
        if target is not x.domain:
            raise IRTypeError(
                f"{index.value} leads from {domain.value} to "
                f"{target.value if target else 'nowhere'}, the operand lives on "
                f"{x.domain.value}"
            )
        return self.make(Op.READ, (x,), RowType(domain, x.shape), index=index)

    def agg(self, x: Node, index: Index, reduce: str = "sum") -> Node:
        """Rows of `x` that share index(row) reduced to one: sum or max."""
        target = TARGET.get((x.domain, index))
        if target is None:
            raise IRTypeError(f"{index.value} is not an index of {x.domain.value}")
        if reduce not in ("sum", "max"):
            raise IRTypeError(f"expected reduce 'sum' or 'max', got {reduce!r}")
        return self.make(
            Op.AGG, (x,), RowType(target, x.shape), index=index, reduce=reduce
        )

    # GEMM-eligible.

    def linear(self, x: Node, w: Node, transpose: bool = False) -> Node:
        """x (heads, K) times w (heads, K, N); with `transpose`, x (heads, N)."""
        index = self._weight_index(x, w)
        heads, k, n = w.shape
        k, n = (n, k) if transpose else (k, n)
        if x.shape != (heads, k):
            raise IRTypeError(
                f"expected rows of shape [{heads}, {k}] for a weight "
                f"{list(w.shape)}{' transposed' if transpose else ''}, got "
                f"{list(x.shape)}"
            )
        kind = RowType(x.domain, (heads, n))
        return self.make(Op.LINEAR, (x, w), kind, index=index, transpose=transpose)

    def outer(self, x: Node, y: Node, domain: Domain) -> Node:
        """The gradient of a weight: (heads, K) x (heads, N) -> (heads, K, N)."""
        if x.domain is not y.domain or x.shape[0] != y.shape[0]:
            raise IRTypeError(f"outer product of {x.type} and {y.type}")
        shape = (x.shape[0], x.shape[1], y.shape[1])
        return self.make(
            Op.OUTER, (x, y), RowType(domain, shape), index=TYPE_INDEX[domain]
        )

    def _weight_index(self, x: Node, w: Node) -> Index:
        if w.domain not in TYPE_DOMAINS or len(w.shape) != 3:
            raise IRTypeError(f"expected a weight of rank 3 on a type, got {w.type}")
        index = TYPE_INDEX[w.domain]
        if TARGET.get((x.domain, index)) is not w.domain:
            raise IRTypeError(f"rows of {x.type} have no {index.value}")
        return index

    def einsum(self, equation: str, *operands: Node) -> Node:
        """A contraction of parameters, the type axis implied: 'hkn,hnm->hkm'."""
        domain = Domain.GLOBAL
        for node in operands:
            if node.domain not in TYPE_DOMAINS:
                raise IRTypeError(f"einsum is for parameters, got {node.type}")
            if node.domain is not Domain.GLOBAL:
                if domain not in (Domain.GLOBAL, node.domain):
                    raise IRTypeError("einsum over two kinds of types")
                domain = node.domain
        return self._einsum(equation, operands, domain)

    def contract(self, equation: str, operands: tuple[Node, ...], to: Domain) -> Node:
        """`einsum` that sums the type axis away when `to` is GLOBAL."""
        return self._einsum(equation, operands, to)

    def _einsum(self, eq: str, operands: tuple[Node, ...], to: Domain) -> Node:
        left, right = eq.split("->")
        sizes: dict[str, int] = {}
        for letters, node in zip(left.split(","), operands, strict=True):
            if len(letters) != len(node.shape):
                raise IRTypeError(f"{letters!r} does not fit {node.type}")
            for letter, size in zip(letters, node.shape, strict=True):
                if sizes.setdefault(letter, size) not in (size,):
                    raise IRTypeError(f"axis {letter} of {eq} has two sizes")
        shape = tuple(sizes[c] for c in right)
        return self.make(Op.EINSUM, operands, RowType(to, shape), equation=eq)

    # Row by row.

    def unary(self, op: Op, x: Node, **attrs: Attr) -> Node:
        if op not in UNARY:
            raise IRTypeError(f"{op.value} is not unary")
        return self.make(op, (x,), x.type, **attrs)

    def binary(self, op: Op, a: Node, b: Node) -> Node:
        if op not in BINARY:
            raise IRTypeError(f"{op.value} is not binary")
        a, b = self._together(a, b)
        shape = broadcast(a.shape, b.shape)
        # An operand that the other one stretches anyway need not be stretched first.
        if a.op is Op.EXPAND and broadcast(a.inputs[0].shape, b.shape) == shape:
            a = a.inputs[0]
        if b.op is Op.EXPAND and broadcast(a.shape, b.inputs[0].shape) == shape:
            b = b.inputs[0]
        return self.make(op, (a, b), RowType(a.domain, shape))

    def _together(self, a: Node, b: Node) -> tuple[Node, Node]:
        """Both on one domain: a parameter or constant is read from the other's."""
        if a.domain is b.domain:
            return a, b
        if a.domain in TYPE_DOMAINS and self._readable(a, b.domain):
            return self.spread(a, b.domain), b
        if b.domain in TYPE_DOMAINS and self._readable(b, a.domain):
            return a, self.spread(b, a.domain)
        raise IRTypeError(f"expected operands on one domain, got {a.type} and {b.type}")

    @staticmethod
    def _readable(x: Node, domain: Domain) -> bool:
        if x.op is Op.CONST:
            return True
        return TARGET.get((domain, TYPE_INDEX[x.domain])) is x.domain

    def spread(self, x: Node, domain: Domain) -> Node:
        """A parameter or constant seen from the rows of `domain`."""
        if x.domain is domain:
            return x
        if x.op is Op.CONST:
            return self.const(x.number("value"), domain)
        return self.read(x, TYPE_INDEX[x.domain], domain)

    def add(self, a: Node, b: Node) -> Node:
        return self.binary(Op.ADD, a, b)

    def sub(self, a: Node, b: Node) -> Node:
        return self.binary(Op.SUB, a, b)

    def mul(self, a: Node, b: Node) -> Node:
        return self.binary(Op.MUL, a, b)

    def div(self, a: Node, b: Node) -> Node:
        return self.binary(Op.DIV, a, b)

    # Within a row.

    def sum_width(self, x: Node) -> Node:
        """(heads, width) -> (heads, 1): the second half of a dot product."""
        if x.shape[1] == 1:
            return x
        return self.make(Op.SUM_WIDTH, (x,), RowType(x.domain, (x.shape[0], 1)))

    def sum_heads(self, x: Node) -> Node:
        if x.shape[0] == 1:
            return x
        return self.make(Op.SUM_HEADS, (x,), RowType(x.domain, (1, x.shape[1])))

    def reshape(self, x: Node, shape: tuple[int, ...]) -> Node:
        kind = RowType(x.domain, shape)
        if kind.width != x.type.width:
            raise IRTypeError(f"expected {x.type.width} elements, got {list(shape)}")
        if shape == x.shape:
            return x
        if x.op is Op.RESHAPE:
            return self.reshape(x.inputs[0], shape)
        return self.make(Op.RESHAPE, (x,), kind)

    def expand(self, x: Node, shape: tuple[int, ...]) -> Node:
        """Stretch axes of size 1; a no-op in memory until something is stored."""
        if broadcast(x.shape, shape) != shape:
            raise IRTypeError(f"cannot stretch {x.type} to {list(shape)}")
        if x.shape == shape:
            return x
        if x.op is Op.EXPAND:
            return self.expand(x.inputs[0], shape)
        return self.make(Op.EXPAND, (x,), RowType(x.domain, shape))

    def slice(self, x: Node, start: int, length: int) -> Node:
        """Columns [start, start + length) of (heads, width) rows."""
        if not 0 <= start < start + length <= x.shape[1]:
            raise IRTypeError(f"columns {start}:{start + length} of {x.type}")
        if length == x.shape[1]:
            return x
        kind = RowType(x.domain, (x.shape[0], length))
        return self.make(Op.SLICE, (x,), kind, start=start)

    def concat(self, a: Node, b: Node) -> Node:
        """Side by side along the width."""
        a, b = self._together(a, b)
        if a.shape[0] != b.shape[0]:
            raise IRTypeError(f"concat of {a.type} and {b.type}")
        kind = RowType(a.domain, (a.shape[0], a.shape[1] + b.shape[1]))
        return self.make(Op.CONCAT, (a, b), kind)

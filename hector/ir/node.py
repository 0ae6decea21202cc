"""Nodes of the inter-operator IR: immutable, interned, typed on construction."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from hector.ir.types import ROW_DOMAINS, Domain, Index, RowType

Attr = str | int | float | bool | Index | Domain | None


class Op(Enum):
    """Every operation of the inter-operator level."""

    __hash__ = object.__hash__

    # Leaves.
    INPUT = "input"
    """A tensor that the caller gives (attrs: name)."""
    GRAPH = "graph"
    """A number that the graph gives, e.g. the in-degree (attrs: name)."""
    CONST = "const"
    # Moving rows between domains.
    READ = "read"
    """Row i of the result is row index(i) of the operand."""
    AGG = "agg"
    """Adjoint of READ: rows with the same index(i) are reduced to one."""
    # GEMM-eligible.
    LINEAR = "linear"
    """x[i] @ W[type(i)], head by head."""
    OUTER = "outer"
    """Sum over the rows of each type of x[i] (outer) y[i]."""
    EINSUM = "einsum"
    """A contraction between parameters only."""
    # GEMM-ineligible, row by row.
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    MAXIMUM = "maximum"
    EQ = "eq"
    GT = "gt"
    NEG = "neg"
    EXP = "exp"
    LOG = "log"
    SQRT = "sqrt"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    RELU = "relu"
    LEAKY_RELU = "leaky_relu"
    ELU = "elu"
    GELU = "gelu"
    COS = "cos"
    SIN = "sin"
    ERF = "erf"
    # Within a row.
    SUM_WIDTH = "sum_width"
    SUM_HEADS = "sum_heads"
    EXPAND = "expand"
    """A row of width or heads 1 stretched to a larger shape."""
    RESHAPE = "reshape"
    SLICE = "slice"
    CONCAT = "concat"
    DETACH = "detach"


BINARY = frozenset((Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MAXIMUM, Op.EQ, Op.GT))
UNARY = frozenset((Op.NEG, Op.EXP, Op.LOG, Op.SQRT, Op.SIGMOID, Op.TANH, Op.RELU))
UNARY |= {Op.LEAKY_RELU, Op.ELU, Op.GELU, Op.COS, Op.SIN, Op.ERF, Op.DETACH}
POINTWISE = BINARY | UNARY
ROWWISE = POINTWISE | {Op.SUM_WIDTH, Op.SUM_HEADS, Op.EXPAND, Op.RESHAPE}
ROWWISE |= {Op.SLICE, Op.CONCAT}
"""Row i of the result needs only row i of the operands."""
LEAVES = frozenset((Op.INPUT, Op.GRAPH, Op.CONST))


@dataclass(frozen=True, eq=False)
class Node:
    """One operation and its result. Equal nodes of one `Builder` are identical."""

    op: Op
    inputs: tuple["Node", ...]
    type: RowType
    attrs: tuple[tuple[str, Attr], ...] = ()
    serial: int = 0
    """Position in the builder's order; inputs always have smaller ones."""

    def attr(self, name: str) -> Attr:
        for key, value in self.attrs:
            if key == name:
                return value
        raise KeyError(f"{self.op.value} has no attribute {name!r}")

    def number(self, name: str) -> float:
        """An attribute that is a number."""
        value = self.attr(name)
        if not isinstance(value, int | float):
            raise TypeError(f"{self.op.value} has {name} {value!r}, expected a number")
        return float(value)

    def integer(self, name: str) -> int:
        """An attribute that counts something."""
        return int(self.number(name))

    @property
    def domain(self) -> Domain:
        return self.type.domain

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def index(self) -> Index:
        """The index of READ, AGG, or of the weight of LINEAR and OUTER."""
        value = self.attr("index")
        if not isinstance(value, Index):
            raise TypeError(f"{self.op.value} carries index {value!r}")
        return value

    @property
    def name(self) -> str:
        return str(self.attr("name"))

    def __repr__(self) -> str:
        args = ", ".join(f"%{n.serial}" for n in self.inputs)
        extra = "".join(f", {k}={_text(v)}" for k, v in self.attrs)
        return f"%{self.serial} = {self.op.value}({args}{extra}) : {self.type}"


def _text(value: Attr) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def stored(x: Node) -> Node:
    """The value whose memory `x` is: joining or splitting heads moves nothing."""
    while x.op is Op.RESHAPE and x.domain in ROW_DOMAINS:
        x = x.inputs[0]
    return x


def topological(outputs: Iterable[Node], least: int = 0) -> list[Node]:
    """Every node that the outputs need, operands first.

    Operands are older than what they are operands of: whoever looks for known nodes
    only names the serial of the oldest as `least`, and what is older is left out.
    """
    seen: dict[Node, None] = {}
    stack = [(n, False) for n in outputs]
    while stack:
        node, ready = stack.pop()
        if ready:
            seen.setdefault(node)
        elif node not in seen:
            stack.append((node, True))
            for i in node.inputs:
                if i.serial >= least and i not in seen:
                    stack.append((i, False))
    return list(seen)


def oldest(nodes: Iterable[Node]) -> int:
    """The least serial, for `topological`."""
    return min((n.serial for n in nodes), default=0)


def users(outputs: Iterable[Node]) -> dict[Node, list[Node]]:
    """The nodes that read each node (outputs themselves are not counted)."""
    outputs = list(outputs)
    found: dict[Node, list[Node]] = {n: [] for n in topological(outputs)}
    for node in list(found):
        for operand in dict.fromkeys(node.inputs):
            found[operand].append(node)
    return found


@dataclass(frozen=True, kw_only=True)
class Program:
    """Named results over one builder's nodes."""

    outputs: tuple[tuple[str, Node], ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for _, node in self.outputs)

    def order(self) -> list[Node]:
        return topological(self.nodes)

    def inputs(self) -> list[Node]:
        return [n for n in self.order() if n.op is Op.INPUT]

    def __iter__(self) -> Iterator[tuple[str, Node]]:
        return iter(self.outputs)

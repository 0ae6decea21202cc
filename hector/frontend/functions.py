"""The functions, operators and methods that a compiled layer may use."""

import ast
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from hector.frontend.values import (
    FrontendError,
    IndexVar,
    Param,
    RowVar,
    State,
    Sym,
    Typed,
)
from hector.ir.node import Node, Op
from hector.ir.types import ROW_DOMAINS, Domain, Index
from hector.passes.canonicalize import softmax_of_edges as softmax_nodes
from hector.passes.rewrite import retype

Number = int | float


def as_sym(s: State, x: Any, like: Node | None = None) -> Sym:
    """A value as rows; bare arguments become node rows or global parameters."""
    if isinstance(x, Sym):
        return x
    rows = like.domain if like is not None else Domain.NODE
    if like is None and isinstance(x, Typed) and x.domain is Domain.ETYPE:
        rows = Domain.EDGE
    if isinstance(x, bool) or not isinstance(x, int | float | Param | Typed):
        raise FrontendError(f"expected a tensor or a number, got {type(x).__name__}")
    if isinstance(x, int | float):
        return Sym(s.builder.const(float(x), rows), 1)
    if isinstance(x, Param):
        if is_node_rows(s, x):
            return s.rows_of(x, Domain.NODE)
        x = Typed(x, Domain.GLOBAL)
    return s.vector(x, rows)


def is_node_rows(s: State, p: Param) -> bool:
    """Whether an argument holds one row a node: it was indexed by `src` or `dst`, or
    it is named x."""
    known = p.name in s.node_params or p.name == "x" or p.name.startswith("x_")
    return known and p.shape[:1] == (s.num_nodes,)


_OPERATORS: dict[type[ast.operator], Op] = {
    ast.Add: Op.ADD,
    ast.Sub: Op.SUB,
    ast.Mult: Op.MUL,
    ast.Div: Op.DIV,
}
_NUMBERS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}


def binary(s: State, op: ast.operator, a: Any, b: Any) -> Any:
    """`a op b` on numbers, rows and parameters."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return _NUMBERS[type(op)](a, b)
    if isinstance(a, tuple) and isinstance(b, tuple) and isinstance(op, ast.Add):
        return a + b
    if isinstance(op, ast.MatMult) or (
        isinstance(op, ast.Mult) and isinstance(b, Typed) and is_matrix(s, a, b)
    ):
        return linear(s, a, b)
    if isinstance(op, ast.Pow):
        return power(s, a, b)
    if type(op) not in _OPERATORS:
        raise FrontendError(f"operator {type(op).__name__} is not supported")
    first = a if isinstance(a, Sym) else b
    like = first.node if isinstance(first, Sym) else None
    x, y = as_sym(s, a, like), as_sym(s, b, like)
    left, right = s.same_rows(x.node, y.node)
    return Sym(s.builder.binary(_OPERATORS[type(op)], left, right), max(x.rank, y.rank))


def power(s: State, a: Any, exponent: Any) -> Sym:
    """Rows to the power 2, 0.5, -0.5 or -1."""
    x = as_sym(s, a)
    if exponent == 2:
        return Sym(s.builder.mul(x.node, x.node), x.rank)
    if exponent not in (0.5, -0.5, -1):
        raise FrontendError(f"expected power 2, 0.5, -0.5 or -1, got {exponent!r}")
    node = x.node if exponent == -1 else s.builder.unary(Op.SQRT, x.node)
    if exponent < 0:
        node = s.builder.div(s.builder.const(1.0, node.domain), node)
    return Sym(node, x.rank)


def clamp(s: State, x: Any, min: Number) -> Sym:
    """x.clamp(min=1)."""
    rows = as_sym(s, x)
    low = s.builder.const(float(min), rows.node.domain)
    return Sym(s.builder.binary(Op.MAXIMUM, rows.node, low), rows.rank)


def flatten(s: State, x: Any, start_dim: int = 0, end_dim: int = -1) -> Sym:
    """x.flatten(1): the heads side by side."""
    if start_dim != 1 or end_dim not in (-1, 2):
        raise FrontendError(f"expected flatten(1), got {start_dim} to {end_dim}")
    return reshape(s, x, -1)


def is_matrix(s: State, rows: Any, t: Typed) -> bool:
    """`x * W[e.etype]` is a product with a matrix if the slices are matrices and not
    rows of the same shape as x (Listing 3.1 writes `*` for both)."""
    shape = t.slice_shape
    if len(shape) < 2 or math.prod(shape) == 1:
        return False
    x = as_sym(s, rows)
    return not (len(shape) == 2 and x.node.shape == shape and shape[0] > 1)


def linear(s: State, x: Any, w: Any, bias: Any = None) -> Sym:
    """x @ W for a parameter, one matrix a type or one for all."""
    if isinstance(w, Param):
        w = Typed(w, Domain.GLOBAL)
    if not isinstance(w, Typed):
        raise FrontendError("expected a parameter on the right of a matrix product")
    rows = as_sym(s, x)
    matrix = s.matrix(w, rows.node.shape[0])
    node = rows.node
    joined = matrix.shape[0] == 1 and node.shape[0] != 1
    if joined:
        node = s.builder.reshape(node, (1, node.type.width))
    out = Sym(s.builder.linear(node, matrix), 2 if matrix.shape[0] == 1 else 3)
    return out if bias is None else binary(s, ast.Add(), out, bias)


def transposed_linear(s: State, x: Any, w: Param, bias: Any) -> Sym:
    """`nn.Linear`: x @ W.T + b with W [out, in]."""
    rows = as_sym(s, x)
    matrix = s.matrix(Typed(w, Domain.GLOBAL), 1)
    node = s.builder.reshape(rows.node, (1, rows.node.type.width))
    out = Sym(s.builder.linear(node, matrix, transpose=True), 2)
    return out if bias is None else binary(s, ast.Add(), out, bias)


def dot_prd(s: State, a: Any, b: Any) -> Sym:
    """The dot product of two rows, head by head."""
    like = a.node if isinstance(a, Sym) else b.node if isinstance(b, Sym) else None
    x, y = as_sym(s, a, like), as_sym(s, b, like)
    left, right = s.same_rows(x.node, y.node)
    out = s.builder.sum_width(s.builder.mul(left, right))
    return Sym(out, 2 if out.shape[0] == 1 else 3)


def unary(op: Op) -> Callable[..., Sym]:
    def apply(s: State, x: Any) -> Sym:
        rows = as_sym(s, x)
        return Sym(s.builder.unary(op, rows.node), rows.rank)

    return apply


def leaky_relu(s: State, x: Any, negative_slope: float = 0.01) -> Sym:
    if not isinstance(negative_slope, Real):
        found = type(negative_slope).__name__
        raise FrontendError(f"expected a number as slope, got {found}")
    rows = as_sym(s, x)
    node = s.builder.unary(Op.LEAKY_RELU, rows.node, slope=float(negative_slope))
    return Sym(node, rows.rank)


def gelu(s: State, x: Any, approximate: str = "none") -> Sym:
    if approximate != "none":
        raise FrontendError("only the exact gelu is supported")
    return unary(Op.GELU)(s, x)


def edge_softmax(s: State, x: Any, index: Any = None) -> Sym:
    """Softmax over the edges with the same destination (or the given index)."""
    rows = as_sym(s, x)
    where = index.index if isinstance(index, IndexVar) else Index.DST
    return Sym(softmax_nodes(s.builder, rows.node, where), rows.rank)


def scatter(s: State, x: Any, index: Any, reduce: str = "sum", **ignored: Any) -> Sym:
    """PyG's scatter of edge rows to nodes: sum, add, mean or max."""
    if not isinstance(index, IndexVar):
        raise FrontendError("expected an index made of edge_index in scatter")
    rows = as_sym(s, x)
    if rows.node.domain in ROW_DOMAINS and rows.node.domain is not Domain.EDGE:
        raise FrontendError("expected edge rows in scatter")
    return Sym(aggregate(s, rows.node, index.index, reduce), rows.rank)


def aggregate(s: State, node: Node, index: Index, reduce: str) -> Node:
    """Edge rows reduced to nodes."""
    b = s.builder
    if reduce == "max":
        return b.agg(node, index, "max")
    if reduce not in ("sum", "add", "mean"):
        raise FrontendError(f"expected reduce 'sum', 'mean' or 'max', got {reduce!r}")
    total = b.agg(node, index)
    if reduce != "mean":
        return total
    name = "in_degree" if index is Index.DST else "out_degree"
    count = b.binary(Op.MAXIMUM, b.graph(name, Domain.NODE), b.const(1.0))
    return b.div(total, count)


def concat(s: State, parts: Any, other: Any = None, dim: int = -1) -> Sym:
    """Rows side by side: concat(a, b) or torch.cat([a, b], dim=-1)."""
    items = list(parts) if isinstance(parts, list | tuple) else [parts, other]
    if dim not in (-1, 1, 2):
        raise FrontendError(f"expected concatenation along the last axis, got {dim}")
    syms = [as_sym(s, p) for p in items]
    out = syms[0].node
    for nxt in syms[1:]:
        left, right = s.same_rows(out, nxt.node)
        out = s.builder.concat(left, right)
    return Sym(out, max(x.rank for x in syms))


def degree(s: State, index: Any, *ignored: Any, **more: Any) -> Sym:
    """How many edges a node has at one end, as node rows."""
    if not isinstance(index, IndexVar):
        raise FrontendError("expected src or dst in degree")
    name = "in_degree" if index.index is Index.DST else "out_degree"
    return Sym(s.builder.graph(name, Domain.NODE), 1)


def relation_degree(s: State, row: Any) -> Sym:
    """c of equation 3.1: how many edges share this edge's destination and type."""
    count = s.builder.graph("dst_pair_degree", Domain.DST_PAIR)
    return Sym(s.builder.read(count, Index.DST_PAIR, Domain.EDGE), 1)


def relation_max(s: State, x: Any) -> Sym:
    """Largest row, element by element, among the edges with this edge's destination
    and type."""
    rows = as_sym(s, x)
    best = s.builder.agg(rows.node, Index.DST_PAIR, "max")
    return Sym(s.builder.read(best, Index.DST_PAIR, Domain.EDGE), rows.rank)


def relation_sum(s: State, x: Any) -> Sym:
    """Sum over the edges with this edge's destination and type."""
    rows = as_sym(s, x)
    total = s.builder.agg(rows.node, Index.DST_PAIR)
    return Sym(s.builder.read(total, Index.DST_PAIR, Domain.EDGE), rows.rank)


def relation_total(s: State, x: Any) -> Sym:
    """Sum over the relations into a node of an edge value that is the same on all edges
    of a relation: one addend a relation, however many edges it has."""
    rows = as_sym(s, x)
    value = _of_pairs(s, rows.node)
    return Sym(s.builder.agg(value, Index.PAIR_NODE), rows.rank)


def _of_pairs(s: State, x: Node) -> Node:
    """An edge value, made of what the (relation, destination) pair decides, on those
    pairs."""
    if x.domain is not Domain.EDGE:
        return x
    if x.op is Op.CONST:
        return s.builder.const(x.number("value"), Domain.DST_PAIR)
    if x.op is Op.READ:
        if x.index is Index.DST_PAIR:
            return x.inputs[0]
        index = Index.PAIR_NODE if x.index is Index.DST else x.index
        if index in (Index.PAIR_NODE, Index.ETYPE, Index.ALL):
            return s.builder.read(x.inputs[0], index, Domain.DST_PAIR)
    elif x.inputs and x.op is not Op.AGG:
        return retype(s.builder, x, tuple(_of_pairs(s, i) for i in x.inputs))
    raise FrontendError("expected a value that is the same on all edges of a relation")


def relation_softmax(s: State, x: Any) -> Sym:
    """Softmax over the edges with the same destination and type."""
    return edge_softmax(s, x, IndexVar(Index.DST_PAIR))


def in_degree(s: State, row: Any) -> Sym:
    """How many edges this row's node (an edge's destination) receives."""
    count = s.builder.graph("in_degree", Domain.NODE)
    if isinstance(row, RowVar) and row.domain is Domain.EDGE:
        return Sym(s.builder.read(count, row.via or Index.DST, Domain.EDGE), 1)
    return Sym(count, 1)


def positive(s: State, x: Any) -> Sym:
    """1 where x > 0, else 0."""
    rows = as_sym(s, x)
    zero = s.builder.const(0.0, rows.node.domain)
    return Sym(s.builder.binary(Op.GT, rows.node, zero), rows.rank)


def columns(s: State, x: Any, start: int, length: int) -> Sym:
    """Columns [start, start + length) of joined rows."""
    rows = as_sym(s, x)
    flat = s.builder.reshape(rows.node, (1, rows.node.type.width))
    return Sym(s.builder.slice(flat, start, length), 2)


def reshape(s: State, x: Any, *sizes: Any) -> Sym:
    """reshape(row, heads, width) or reshape(row, width); one size may be -1. With a
    tuple of sizes, PyTorch's: the first one counts the rows."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple):
        return view(s, x, *sizes[0])
    rows = as_sym(s, x)
    total = rows.node.type.width
    known = math.prod(n for n in sizes if n != -1)
    full = [total // max(known, 1) if n == -1 else int(n) for n in sizes]
    if math.prod(full) != total or len(full) > 2:
        raise FrontendError(f"cannot view rows of {total} elements as {list(sizes)}")
    shape = {0: (1, 1), 1: (1, *full), 2: tuple(full)}[len(full)]
    return Sym(s.builder.reshape(rows.node, shape), 1 + len(full))


def view(s: State, x: Any, *shape: Any) -> Sym:
    """x.view(-1, heads, width) and x.view(-1, width): the first size is the rows'."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    row = [int(n) for n in sizes[1:]]
    if len(row) == 3 and row[0] == 1:
        row = row[1:]
    return reshape(s, x, *row) if row else reshape(s, x, 1)


def unsqueeze(s: State, x: Any, dim: int) -> Sym:
    rows = as_sym(s, x)
    dim = dim if dim >= 0 else rows.rank + 1 + dim
    if rows.rank == 1:
        return Sym(rows.node, 2)
    if rows.rank == 2 and dim == 2:
        shape = (rows.node.shape[1], 1)
        return Sym(s.builder.reshape(rows.node, shape), 3)
    if rows.rank == 2 and dim == 1:
        return Sym(rows.node, 3)
    raise FrontendError(f"unsqueeze({dim}) of a tensor of rank {rows.rank}")


def squeeze(s: State, x: Any, dim: int | None = None) -> Sym:
    rows = as_sym(s, x)
    h, d = rows.node.shape
    if dim is None:
        dim = 1 if rows.rank == 3 and h == 1 else -1
    dim = dim if dim >= 0 else rows.rank + dim
    if rows.rank == 3 and (h, d)[dim - 1] == 1:
        return Sym(s.builder.reshape(rows.node, (1, h * d)), 2)
    if rows.rank == 2 and d == 1:
        return Sym(rows.node, 1)
    raise FrontendError(f"squeeze({dim}) of rows of shape {[h, d]}")


def total(s: State, x: Any, dim: int = -1, keepdim: bool = False) -> Sym:
    """sum over the width (last axis) or over the heads."""
    rows = as_sym(s, x)
    dim = dim if dim >= 0 else rows.rank + dim
    if rows.rank == 3 and dim == 1:
        out = s.builder.sum_heads(rows.node)
        return Sym(out, 3 if keepdim else 2)
    if dim != rows.rank - 1 or rows.rank == 1:
        raise FrontendError("expected a sum over the last axis or the heads")
    out = s.builder.sum_width(rows.node)
    if keepdim:
        return Sym(out, rows.rank)
    return Sym(s.builder.reshape(out, (1, out.shape[0])), rows.rank - 1)


def mean(s: State, x: Any, dim: int = -1, keepdim: bool = False) -> Sym:
    rows = as_sym(s, x)
    axis = dim if dim >= 0 else rows.rank + dim
    count = rows.node.shape[axis - 1] if rows.rank == 3 else rows.node.shape[1]
    out = total(s, rows, dim, keepdim)
    return Sym(s.builder.mul(out.node, s.builder.const(1.0 / count)), out.rank)


def bmm(s: State, x: Any, w: Any) -> Sym:
    """torch.bmm(x.unsqueeze(1), W[edge_type]): a typed linear layer."""
    return Sym(linear(s, x, w).node, 3)


def select(s: State, source: Any, index: Any) -> Any:
    """x[src], W[edge_type], W[e.etype], torch.index_select(x, 0, src)."""
    if isinstance(index, RowVar):
        raise FrontendError("expected e.etype, e.src or n.ntype, got a whole row")
    if not isinstance(index, IndexVar):
        raise FrontendError("expected an index of the graph")
    if index.index in (Index.ETYPE, Index.NTYPE):
        if not isinstance(source, Param):
            raise FrontendError("expected a parameter with one slice a type")
        kind = Domain.ETYPE if index.index is Index.ETYPE else Domain.NTYPE
        return Typed(source, kind)
    rows = s.rows_of(source, Domain.NODE) if isinstance(source, Param) else source
    if not isinstance(rows, Sym) or rows.node.domain is not Domain.NODE:
        raise FrontendError("expected node rows to be indexed by src or dst")
    return Sym(s.builder.read(rows.node, index.index, Domain.EDGE), rows.rank)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": unary(Op.EXP),
    "log": unary(Op.LOG),
    "sqrt": unary(Op.SQRT),
    "sigmoid": unary(Op.SIGMOID),
    "tanh": unary(Op.TANH),
    "relu": unary(Op.RELU),
    "elu": unary(Op.ELU),
    "cos": unary(Op.COS),
    "sin": unary(Op.SIN),
    "leakyrelu": leaky_relu,
    "leaky_relu": leaky_relu,
    "gelu": gelu,
    "dot_prd": dot_prd,
    "linear": linear,
    "typed_linear": linear,
    "matmul": linear,
    "bmm": bmm,
    "softmax": edge_softmax,
    "scatter": scatter,
    "concat": concat,
    "cat": concat,
    "reshape": reshape,
    "degree": degree,
    "relation_degree": relation_degree,
    "relation_max": relation_max,
    "relation_softmax": relation_softmax,
    "relation_sum": relation_sum,
    "relation_total": relation_total,
    "edge_softmax": edge_softmax,
    "in_degree": in_degree,
    "positive": positive,
    "columns": columns,
    "index_select": lambda s, x, dim, index: select(s, x, index),
    "sum": total,
    "mean": mean,
    "pow": power,
    "clamp": clamp,
    "flatten": flatten,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
}
"""Called by their last name: `F.leaky_relu`, `torch.exp` and `exp` are one."""

METHODS: dict[str, Callable[..., Any]] = {
    "view": view,
    "reshape": view,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "sum": total,
    "mean": mean,
    "exp": unary(Op.EXP),
    "relu": unary(Op.RELU),
    "sigmoid": unary(Op.SIGMOID),
    "tanh": unary(Op.TANH),
    "pow": power,
    "clamp": clamp,
    "flatten": flatten,
    "contiguous": lambda s, x: x,
    "float": lambda s, x: x,
    "index_select": lambda s, x, dim, index: select(s, x, index),
}
"""Methods of rows."""

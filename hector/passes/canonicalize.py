"""Loop canonicalization: the rules that are always good.

In Wu's terms (section 3.3.2, graph-semantic-aware loop transformation) a
for-each-edge loop equals a loop over nodes around a loop over their edges, and a
statement belongs to the outermost loop that it can live in. On expressions this reads:
READ is pulled outwards through operations (the statement moves to the node loop), and
factors that do not change inside a group are pulled out of AGG.
"""

from hector.ir.builder import Builder
from hector.ir.node import BINARY, POINTWISE, UNARY, Node, Op
from hector.ir.types import COMPOSE, TARGET, TYPE_DOMAINS, Domain, Index
from hector.passes.rewrite import rebuild, retype, rule


@rule("read of read is one read", Op.READ)
def compose_reads(b: Builder, n: Node) -> Node | None:
    (x,) = n.inputs
    if x.op is Op.CONST:
        return b.const(x.number("value"), n.domain)
    if x.op is Op.EXPAND:
        return b.expand(b.read(x.inputs[0], n.index, n.domain), n.shape)
    if x.op is not Op.READ:
        return None
    both = COMPOSE.get((n.domain, n.index, x.index))
    return None if both is None else b.read(x.inputs[0], both, n.domain)


@rule("reshape before reading", Op.RESHAPE)
def sink_reshape(b: Builder, n: Node) -> Node | None:
    """Towards the stored value, where it is nothing but another address."""
    (x,) = n.inputs
    if x.op is Op.READ:
        return b.read(b.reshape(x.inputs[0], n.shape), x.index, n.domain)
    into_heads = n.shape[0] > x.shape[0]
    if into_heads and x.op in POINTWISE and _same_shape(x):
        parts = [i if i.shape == (1, 1) else b.reshape(i, n.shape) for i in x.inputs]
        return _part(b, x, parts)
    return None


@rule("joining heads is the last thing done", *POINTWISE)
def float_reshape(b: Builder, n: Node) -> Node | None:
    """op(reshape(x), y) -> reshape(op(x, y')) when x has more heads: in registers rows
    keep their heads, and storing them joined costs nothing."""
    for x in n.inputs:
        if x.op is Op.RESHAPE and x.inputs[0].shape[0] > x.shape[0] and _same_shape(n):
            shape = x.inputs[0].shape
            parts = [i if i.shape == (1, 1) else b.reshape(i, shape) for i in n.inputs]
            return b.reshape(_part(b, n, parts), n.shape)
    return None


def _same_shape(n: Node) -> bool:
    return all(i.shape in (n.shape, (1, 1)) for i in n.inputs)


_HOISTED = (
    Index.SRC,
    Index.DST,
    Index.PAIR_NODE,
    Index.SRC_PAIR,
    Index.DST_PAIR,
)


@rule("hoist a statement to the node loop", *POINTWISE, Op.SUM_WIDTH, Op.SUM_HEADS)
def hoist(b: Builder, n: Node) -> Node | None:
    """op(READ(node, x), ..) -> READ(node, op(x, ..)) when all operands are reads
    through one index (or of nothing that changes)."""
    index = _one_index(n.inputs)
    if index is None:
        return None
    target = TARGET[n.domain, index]
    if target is Domain.NODE and not _safe_without_edges(n):
        return None
    lifted = tuple(_at(b, i, target) for i in n.inputs)
    return b.read(retype(b, n, lifted), index, n.domain)


def _safe_without_edges(n: Node) -> bool:
    """Whether `n` may be computed on nodes too that no edge leads to.

    Nothing reads their rows, but the backward pass multiplies the zero gradient that
    reaches them by these values: an infinity there makes a NaN of the input's
    gradient. Such statements stay on their edges. Pairs always have an edge.
    """
    if n.op in (Op.EXP, Op.LOG, Op.SQRT):
        return False
    if n.op is not Op.DIV:
        return True
    bottom = n.inputs[1]
    return _never_zero(bottom.inputs[0] if bottom.op is Op.READ else bottom)


@rule("hoist a shared linear to the node loop", Op.LINEAR)
def hoist_linear(b: Builder, n: Node) -> Node | None:
    x, w = n.inputs
    if w.domain is not Domain.GLOBAL or x.op is not Op.READ or x.index not in _HOISTED:
        return None
    flipped = bool(n.attr("transpose"))
    return b.read(b.linear(x.inputs[0], w, flipped), x.index, n.domain)


def _one_index(operands: tuple[Node, ...]) -> Index | None:
    found: Index | None = None
    for x in operands:
        if x.op is Op.CONST:
            continue
        if x.op is not Op.READ:
            return None
        if x.index is Index.ALL:
            continue
        if x.index not in _HOISTED or found not in (None, x.index):
            return None
        found = x.index
    return found


def _at(b: Builder, x: Node, target: Domain) -> Node:
    if x.op is Op.READ and x.index is not Index.ALL:
        return x.inputs[0]
    return b.spread(x.inputs[0] if x.op is Op.READ else x, target)


@rule("pull an invariant factor out of a sum", Op.AGG)
def factor_out(b: Builder, n: Node) -> Node | None:
    (x,) = n.inputs
    if n.attr("reduce") != "sum":
        return None
    if x.op is Op.EXPAND:
        return b.expand(b.agg(x.inputs[0], n.index), n.shape)
    if x.op is Op.NEG:
        return b.unary(Op.NEG, b.agg(x.inputs[0], n.index))
    if x.op not in (Op.MUL, Op.DIV):
        return None
    left, right = x.inputs
    if _leaves(x.op, right, n.index):
        return _outside(b, n, x.op, (left, right))
    if x.op is Op.MUL and _invariant(left, n.index):
        return _outside(b, n, Op.MUL, (right, left))
    return _factor_nested(b, n, x)


def _outside(b: Builder, n: Node, op: Op, parts: tuple[Node, Node]) -> Node | None:
    kept, factor = parts
    value = factor if factor.op is Op.CONST else factor.inputs[0]
    if value.domain is not n.domain:
        value = b.spread(value, n.domain) if n.domain not in TYPE_DOMAINS else value
    inner = b.agg(kept, n.index)
    if n.domain in TYPE_DOMAINS and value.domain is not n.domain:
        value = b.const(value.number("value"), n.domain)
    return b.expand(b.binary(op, inner, value), n.shape)


_TO_NODES = (Index.SRC, Index.DST, Index.PAIR_NODE)


def _invariant(x: Node, index: Index) -> bool:
    if x.op is Op.CONST:
        return True
    if x.op is not Op.READ or x.index is not index:
        return False
    return index not in _TO_NODES or _finite(x.inputs[0])


def _leaves(op: Op, factor: Node, index: Index) -> bool:
    """Whether a sum of products or quotients lets this factor out: a divisor must not
    be 0 on nodes without edges, where the sum is 0."""
    if not _invariant(factor, index):
        return False
    if op is Op.MUL or factor.op is Op.CONST or index not in _TO_NODES:
        return True
    return _never_zero(factor.inputs[0])


def _finite(x: Node) -> bool:
    """Whether a node value is finite on nodes without edges too.

    Outside of a sum the factor meets those nodes, where the sum is 0: an infinite
    factor would make a NaN of it. Pairs always have an edge.
    """
    if x.op in (Op.LOG, Op.SQRT):
        return False
    if x.op is Op.DIV and not _never_zero(x.inputs[1]):
        return False
    return x.op not in POINTWISE or all(_finite(i) for i in x.inputs)


def _never_zero(x: Node) -> bool:
    if x.op is Op.CONST:
        return x.attr("value") != 0.0
    if x.op is Op.ADD and x.inputs[0].op is Op.AGG:
        terms, least = x.inputs
        return terms.inputs[0].op is Op.EXP and _positive(least)
    return x.op is Op.MAXIMUM and any(_positive(i) for i in x.inputs)


def _positive(x: Node) -> bool:
    return x.op is Op.CONST and x.number("value") > 0.0


def _factor_nested(b: Builder, n: Node, x: Node) -> Node | None:
    """(u * factor) * v, (u / factor) * v: bring the factor to the outside."""
    if x.op is not Op.MUL:
        return None
    for inner, other in (x.inputs, x.inputs[::-1]):
        if inner.op not in (Op.MUL, Op.DIV):
            continue
        u, f = inner.inputs
        if inner.op is Op.MUL and _invariant(u, n.index):
            u, f = f, u
        if _leaves(inner.op, f, n.index) and u.op is not Op.CONST:
            moved = b.binary(inner.op, b.mul(u, other), f)
            return b.agg(b.expand(moved, x.shape), n.index)
    return None


@rule("sum of a scaled row is a scaled sum", Op.SUM_WIDTH)
def scale_outside_sum(b: Builder, n: Node) -> Node | None:
    """sum(x * s) -> sum(x) * s for a narrow s: one product a row, not one an
    element."""
    (x,) = n.inputs
    if x.op is Op.CONCAT:
        return b.add(*(b.sum_width(i) for i in x.inputs))
    if x.op is Op.EXPAND and x.inputs[0].shape[1] == 1:
        wide = b.mul(x.inputs[0], b.const(float(x.shape[1])))
        return b.expand(wide, n.shape)
    if x.op is not Op.MUL:
        return None
    for y, s in (x.inputs, x.inputs[::-1]):
        if s.shape[1] == 1 and y.shape == x.shape:
            return b.mul(b.sum_width(y), s)
        if y.op is Op.MUL and y.shape == x.shape:
            for z, t in (y.inputs, y.inputs[::-1]):
                if t.shape[1] == 1 and z.shape == x.shape:
                    return b.mul(b.sum_width(b.mul(z, s)), t)
    return None


@rule("divide by a narrow value once a row", Op.DIV)
def reciprocal(b: Builder, n: Node) -> Node | None:
    x, y = n.inputs
    if y.shape[1] != 1 or x.shape[1] == 1 or x.op is Op.CONST:
        return None
    return b.mul(x, b.div(b.const(1.0), y))


@rule("arithmetic with 0 and 1", Op.ADD, Op.MUL, Op.SUB, Op.DIV, Op.NEG)
def identities(b: Builder, n: Node) -> Node | None:
    x = n.inputs[0]
    if n.op is Op.NEG:
        return x.inputs[0] if x.op is Op.NEG else None
    y = n.inputs[1]
    if n.op in (Op.ADD, Op.SUB) and _is(y, 0.0):
        return _stretched(b, x, n)
    if n.op in (Op.MUL, Op.DIV) and _is(y, 1.0):
        return _stretched(b, x, n)
    if n.op is Op.ADD and _is(x, 0.0):
        return _stretched(b, y, n)
    if n.op is Op.MUL and _is(x, 1.0):
        return _stretched(b, y, n)
    return None


@rule("moving halves of a concat", Op.READ, Op.AGG, Op.SUM_HEADS, Op.EXPAND)
def move_concat(b: Builder, n: Node) -> Node | None:
    """A concat is joined by where its halves are stored, so it goes to the end."""
    (x,) = n.inputs
    if x.op is not Op.CONCAT:
        return None
    if n.op is Op.READ:
        return b.concat(*(b.read(i, n.index, n.domain) for i in x.inputs))
    if n.op is Op.AGG:
        reduce = str(n.attr("reduce"))
        return b.concat(*(b.agg(i, n.index, reduce) for i in x.inputs))
    if n.op is Op.SUM_HEADS:
        return b.concat(*(b.sum_heads(i) for i in x.inputs))
    return b.concat(*(b.expand(i, (n.shape[0], i.shape[1])) for i in x.inputs))


def _is(x: Node, value: float) -> bool:
    x = x.inputs[0] if x.op is Op.EXPAND else x
    return x.op is Op.CONST and x.attr("value") == value


def _stretched(b: Builder, x: Node, n: Node) -> Node:
    return b.expand(x, n.shape)


@rule("row operations on halves of a concat", *BINARY, *UNARY)
def split_concat(b: Builder, n: Node) -> Node | None:
    """op(concat(x, y), z) -> concat(op(x, z'), op(y, z'')): kernels then never have to
    join rows in registers."""
    if not any(i.op is Op.CONCAT for i in n.inputs):
        return None
    cut = next(i.inputs[0].shape[1] for i in n.inputs if i.op is Op.CONCAT)
    halves = [
        _part(b, n, [_cut(b, i, 0, cut) for i in n.inputs]),
        _part(b, n, [_cut(b, i, cut, n.shape[1] - cut) for i in n.inputs]),
    ]
    return b.concat(*halves)


def _part(b: Builder, n: Node, operands: list[Node]) -> Node:
    if n.op in BINARY:
        return b.binary(n.op, *operands)
    return b.unary(n.op, operands[0], **dict(n.attrs))


def _cut(b: Builder, x: Node, start: int, length: int) -> Node:
    return x if x.shape[1] == 1 else b.slice(x, start, length)


@rule("slice moves towards the leaves", Op.SLICE)
def sink_slice(b: Builder, n: Node) -> Node | None:
    (x,) = n.inputs
    start, length = n.integer("start"), n.shape[1]
    if x.op is Op.CONCAT:
        cut = x.inputs[0].shape[1]
        if start + length <= cut:
            return b.slice(x.inputs[0], start, length)
        if start >= cut:
            return b.slice(x.inputs[1], start - cut, length)
        return None
    if x.op is Op.READ:
        return b.read(b.slice(x.inputs[0], start, length), x.index, n.domain)
    if x.op is Op.EXPAND and x.inputs[0].shape[1] == 1:
        return b.expand(x.inputs[0], n.shape)
    if x.op in POINTWISE:
        cuts = tuple(_cut(b, i, start, length) for i in x.inputs)
        return _part(b, x, list(cuts))
    return None


@rule("a softmax without a shift gets one", Op.DIV)
def stable_softmax(b: Builder, n: Node) -> Node | None:
    """exp(s) / READ(sum exp(s)) -> exp(s - max) / READ(sum exp(s - max)): equal, and
    it cannot overflow."""
    top, bottom = n.inputs
    if top.op is not Op.EXP or bottom.op is not Op.READ:
        return None
    total = bottom.inputs[0]
    if total.op is not Op.AGG or total.inputs[0] is not top:
        return None
    if total.attr("reduce") != "sum" or total.index is not bottom.index:
        return None
    (s,) = top.inputs
    if s.op is Op.SUB and s.inputs[1].op is Op.READ:
        peak = s.inputs[1].inputs[0]
        if peak.op is Op.DETACH:
            return None
    return softmax_of_edges(b, s, total.index)


def softmax_of_edges(b: Builder, s: Node, index: Index) -> Node:
    """Softmax of `s` over the rows that share `index`, shifted by the maximum.

    The shift cancels, so no gradient flows through it. A sum is at least 1, so the
    1e-16 (PyG's) changes nothing but groups without rows.
    """
    peak = b.unary(Op.DETACH, b.agg(s, index, "max"))
    e = b.unary(Op.EXP, b.sub(s, b.read(peak, index, s.domain)))
    total = b.add(b.agg(e, index), b.const(1e-16))
    return b.div(e, b.read(total, index, s.domain))


RULES = (
    compose_reads,
    sink_reshape,
    float_reshape,
    stable_softmax,
    identities,
    hoist,
    hoist_linear,
    factor_out,
    scale_outside_sum,
    reciprocal,
    split_concat,
    move_concat,
    sink_slice,
)
__all__ = ["RULES", "rebuild", "softmax_of_edges"]

"""Wu's two optimizations as rewrite rules, both optional.

Compact materialization (section 3.3.2): what depends on nothing but an endpoint and
the edge type is computed once a pair. Linear operator reordering (section 3.3.2): of
two linear operators in a row, the product of their parameters is taken first; and a
sum over edges is taken before the linear operator that it commutes with.
"""

from hector.ir.builder import Builder
from hector.ir.node import POINTWISE, Node, Op
from hector.ir.types import TYPE_DOMAINS, Domain, Index
from hector.passes.rewrite import retype, rule

_PAIR = {
    Index.SRC: (Domain.SRC_PAIR, Index.SRC_PAIR),
    Index.DST: (Domain.DST_PAIR, Index.DST_PAIR),
}
_ENDPOINT = {Index.SRC_PAIR: Index.SRC, Index.DST_PAIR: Index.DST}


@rule("compact", Op.LINEAR, Op.SUM_WIDTH, *POINTWISE)
def compact(b: Builder, n: Node) -> Node | None:
    """op(READ(src, x), READ(etype, w)) on edges -> READ(src_pair, op on pairs)."""
    if n.domain is not Domain.EDGE:
        return None
    rows = [i for i in n.inputs if i.domain is Domain.EDGE and i.op is not Op.CONST]
    end = _shared_endpoint(rows)
    if end is None:
        return None
    domain, index = _PAIR[end]
    lifted = tuple(_on_pair(b, i, domain) for i in n.inputs)
    return b.read(retype(b, n, lifted), index, Domain.EDGE)


def _shared_endpoint(rows: list[Node]) -> Index | None:
    """The one endpoint that all rows read, if they read nothing else but types."""
    end: Index | None = None
    for x in rows:
        if x.op is not Op.READ:
            return None
        if x.index in (Index.ETYPE, Index.ALL):
            continue
        mine = _ENDPOINT.get(x.index, x.index)
        if mine not in _PAIR or end not in (None, mine):
            return None
        end = mine
    return end


def _on_pair(b: Builder, x: Node, domain: Domain) -> Node:
    if x.domain in TYPE_DOMAINS:
        return x
    if x.op is Op.CONST:
        return b.const(x.number("value"), domain)
    value = x.inputs[0]
    if value.domain is domain:
        return value
    index = Index.PAIR_NODE if value.domain is Domain.NODE else x.index
    return b.read(value, index, domain)


@rule("linear after linear", Op.LINEAR)
def merge_linears(b: Builder, n: Node) -> Node | None:
    """(x W1) W2 -> x (W1 W2): the product is between parameters."""
    y, w2 = n.inputs
    y, shape = _through_reshape(y)
    if y.op is not Op.LINEAR or n.attr("transpose") or y.attr("transpose"):
        return None
    x, w1 = y.inputs
    if Domain.GLOBAL not in (w1.domain, w2.domain) and w1.domain is not w2.domain:
        return None
    if shape == y.shape:
        return b.linear(x, b.einsum("hkn,hnm->hkm", w1, w2))
    if y.shape[0] != 1:
        return None
    # One head before, several after: W1 (1, K, H * D) seen as (K, H, D).
    h, d, m = w2.shape
    seen = b.reshape(w1, (w1.shape[1], h, d))
    product = b.einsum("khd,hdm->khm", seen, w2)
    flat = b.reshape(product, (1, w1.shape[1], h * m))
    return b.reshape(b.linear(x, flat), (h, m))


@rule("dot product after linear", Op.SUM_WIDTH)
def fold_vector(b: Builder, n: Node) -> Node | None:
    """dot(x W, w) -> x (W w), head by head."""
    (product,) = n.inputs
    if product.op is not Op.MUL:
        return None
    for y, v in (product.inputs, product.inputs[::-1]):
        y, shape = _through_reshape(y)
        vector = _parameter(v)
        if y.op is not Op.LINEAR or vector is None or y.attr("transpose"):
            continue
        x, w = y.inputs
        if Domain.GLOBAL not in (w.domain, vector.domain):
            if w.domain is not vector.domain:
                continue
        if vector.shape != shape:
            continue
        if shape == y.shape:
            return b.linear(x, _column(b, b.einsum("hkn,hn->hk", w, vector)))
        if y.shape[0] == 1:
            h, d = shape
            seen = b.reshape(w, (w.shape[1], h, d))
            folded = b.einsum("khd,hd->kh", seen, vector)
            flat = b.reshape(folded, (1, w.shape[1], h))
            return b.reshape(b.linear(x, flat), (h, 1))
    return None


def _column(b: Builder, w: Node) -> Node:
    return b.reshape(w, (*w.shape, 1))


def _through_reshape(y: Node) -> tuple[Node, tuple[int, ...]]:
    return (y.inputs[0], y.shape) if y.op is Op.RESHAPE else (y, y.shape)


def _parameter(v: Node) -> Node | None:
    if v.op is Op.READ and v.inputs[0].domain in TYPE_DOMAINS:
        return v.inputs[0]
    return None


@rule("sum before linear", Op.AGG)
def sum_before_linear(b: Builder, n: Node) -> Node | None:
    """sum over edges of s (x W[type]) -> sum over pairs of (sum of s x) W[type]."""
    if n.attr("reduce") != "sum" or n.index not in _PAIR:
        return None
    if n.inputs[0].domain is not Domain.EDGE:
        return None
    found = _scaled_linear(n.inputs[0])
    if found is None:
        return None
    y, scale, shape = found
    x, w = y.inputs
    if w.domain is not Domain.ETYPE:
        return None
    _, index = _PAIR[n.index]
    if scale is not None:
        scale = _match_heads(b, scale, x.shape)
        if scale is None:
            return None
        x = b.mul(x, scale)
    pairs = b.linear(b.agg(x, index), w, bool(y.attr("transpose")))
    return b.reshape(b.agg(pairs, Index.PAIR_NODE), shape)


def _scaled_linear(x: Node) -> tuple[Node, Node | None, tuple[int, ...]] | None:
    if x.op is Op.LINEAR:
        return x, None, x.shape
    if x.op is not Op.MUL:
        return None
    for y, s in (x.inputs, x.inputs[::-1]):
        if y.op is Op.LINEAR and s.shape[1] == 1:
            return y, s, x.shape
    return None


def _match_heads(b: Builder, scale: Node, shape: tuple[int, ...]) -> Node | None:
    return scale if scale.shape[0] in (1, shape[0]) else None


@rule("linear to the other side of a dot product", Op.SUM_WIDTH)
def swap_sides(b: Builder, n: Node) -> Node | None:
    """dot(y, x W) -> dot(y W^T, x) with y at the destination: the rows that a sum over
    sources then reads are node rows, which repeat more often than pairs do."""
    (product,) = n.inputs
    if product.op is not Op.MUL or n.domain is not Domain.EDGE:
        return None
    for z, y in (product.inputs, product.inputs[::-1]):
        if z.op is not Op.LINEAR or y.op is not Op.READ or y.index is not Index.DST:
            continue
        x, w = z.inputs
        if x.op is Op.READ and x.index is Index.SRC and y.shape == z.shape:
            turned = b.linear(y, w, not z.attr("transpose"))
            return b.sum_width(b.mul(turned, x))
    return None


COMPACT = (compact,)
REORDER = (merge_linears, fold_vector, swap_sides, sum_before_linear)

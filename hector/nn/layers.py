"""Wu's three layers as users write them: plain loops over edges and nodes."""

from typing import Any

from hector.frontend import compile
from hector.functions import (
    columns,
    dot_prd,
    edge_softmax,
    gelu,
    in_degree,
    leakyrelu,
    positive,
    relation_degree,
    relation_max,
    relation_softmax,
    relation_sum,
    relation_total,
    relu,
    reshape,
    sigmoid,
)


@compile()
def rgcn(
    g: Any,
    feature: Any,
    weight: Any,
    root: Any,
    bias: Any,
    aggr: str,
    edge_mask: Any = None,
    first: bool = False,
) -> Any:
    """Equation 3.1 with c the number of neighbours in the relation.

    `first`: neighbours are added up before the product, which then has a row for each
    relation and destination.
    """
    for e in g.edges():
        h = e.src.feature
        if edge_mask is not None:
            h = h * e.edge_mask
        h = _reduced(h, aggr)
        if first and aggr != "max" and aggr != "min":
            h = relation_sum(h)
        e["msg"] = h @ weight[e.etype]
        if aggr == "mean":
            e["msg"] /= relation_degree(e)
    for n in g.dst_nodes():
        if first or aggr == "max" or aggr == "min":
            n["out"] = relation_total(g.edata["msg"])
        else:
            n["out"] = 0.0
            for e in n.incoming_edges():
                n["out"] += e["msg"]
        if root is not None:
            n["out"] += n.feature @ root
        if bias is not None:
            n["out"] += bias
    return g.ndata["out"]


@compile()
def rgcn_blocks(
    g: Any, feature: Any, weight: Any, blocks: int, aggr: str, edge_mask: Any = None
) -> Any:
    """RGCN with block-diagonal weights [relations, blocks, in, out]."""
    for e in g.edges():
        h = e.src.feature
        if edge_mask is not None:
            h = h * e.edge_mask
        h = _reduced(h, aggr)
        e["msg"] = reshape(h, blocks, -1) @ weight[e.etype]
        if aggr == "mean":
            e["msg"] /= relation_degree(e)
    for n in g.dst_nodes():
        if aggr == "max" or aggr == "min":
            n["out"] = relation_total(g.edata["msg"])
        else:
            n["out"] = 0.0
            for e in n.incoming_edges():
                n["out"] += e["msg"]
        n["joined"] = reshape(n["out"], -1)
    return g.ndata["joined"]


def _reduced(h: Any, aggr: str) -> Any:
    """The largest or smallest of a relation's neighbours; else each as it is."""
    if aggr == "max":
        return relation_max(h)
    if aggr == "min":
        return -relation_max(-h)
    return h


@compile()
def edge_sum(g: Any, edge_msg: Any, mean: bool) -> Any:
    """Sum of given edge rows, or the sum of their means in each relation."""
    for e in g.edges():
        e["msg"] = e.edge_msg
        if mean:
            e["msg"] /= relation_degree(e)
    for n in g.dst_nodes():
        n["out"] = 0.0
        for e in n.incoming_edges():
            n["out"] += e["msg"]
    return g.ndata["out"]


@compile()
def rgat(
    g: Any,
    feature: Any,
    edge_attr: Any,
    edge_keep: Any,
    edge_mask: Any,
    p: Any,
    o: Any,
) -> Any:
    """RGAT with all of PyG's variants; `p` holds parameters, `o` options."""
    for e in g.edges():
        extra = None
        if o.edge_dim > 0:
            extra = (e.edge_attr @ p.lin_edge) @ p.e
        _attention(e, extra, p, o)
        if edge_keep is not None:
            e["factor"] = e["factor"] * reshape(e.edge_keep, o.heads * o.dim, 1)
        if edge_mask is not None:
            e["hs"] = e["hs"] * e.edge_mask
    return (*_summed(g, p, o), g.edata["att"])


@compile()
def rgat_outputs(g: Any, feature: Any, p: Any, o: Any) -> Any:
    """RGAT without edge features and dropout."""
    for e in g.edges():
        _attention(e, None, p, o)
    return _summed(g, p, o)


def _attention(e: Any, extra: Any, p: Any, o: Any) -> None:
    """Score, softmax over the in-edges, and the message it weighs."""
    hs = _typed(e.src.feature, p.weight[e.etype], o.num_blocks)
    ht = _typed(e.dst.feature, p.weight[e.etype], o.num_blocks)
    score = reshape(_score(ht @ p.q, hs @ p.k, extra, o), o.heads * o.dim, 1)
    e["att"] = relation_softmax(score) if o.within else edge_softmax(score)
    e["hs"] = hs
    e["factor"] = _modified(e["att"], e, o)


def _summed(g: Any, p: Any, o: Any) -> Any:
    outs: tuple[Any, ...] = ()
    for i in range(o.groups):
        for n in g.dst_nodes():
            n["sum"] = 0.0
            for e in n.incoming_edges():
                n["sum"] += _message(e, p, o, i)
            n["out"] = _finished(n["sum"], n, p, o)
        outs += (g.ndata["out"],)
    return outs


def _typed(h: Any, w: Any, blocks: int) -> Any:
    if blocks > 0:
        return reshape(reshape(h, blocks, -1) @ w, -1)
    return h @ w


def _score(at_dst: Any, at_src: Any, extra: Any, o: Any) -> Any:
    if o.additive:
        score = at_dst + at_src
        if extra is not None:
            score = score + extra
        return leakyrelu(score, o.negative_slope)
    score = at_dst * at_src
    if extra is not None:
        score = score * extra
    return score


def _modified(att: Any, e: Any, o: Any) -> Any:
    if o.mod == "f-additive":
        return att + positive(att)
    if o.mod == "f-scaled":
        return att * in_degree(e)
    return att


def _message(e: Any, p: Any, o: Any, i: int) -> Any:
    """Message of all heads at once (dim 1), or of head i in all its dims."""
    if o.groups == 1:
        hs = reshape(e["hs"], o.heads, -1)
        factor = e["factor"]
    else:
        hs = columns(e["hs"], i * o.width, o.width)
        factor = reshape(columns(e["factor"], i * o.dim, o.dim), o.dim, 1)
    if o.mod == "additive":
        return hs * (factor + p.w)
    return hs * factor


def _finished(total: Any, n: Any, p: Any, o: Any) -> Any:
    if o.mod == "scaled":
        hidden = relu(in_degree(n) * p.l1 + p.b1)
        total = total * (hidden @ p.l2 + p.b2)
    out = reshape(total, -1)
    if o.bias:
        out = out + p.bias
    return out


@compile()
def hgt(g: Any, feature: Any, p: Any, heads: int, scale: float, residual: bool) -> Any:
    """HGT: typed keys, queries, values; attention; typed output with a gated skip."""
    _hgt(g, None, p, heads, scale, residual)
    return g.ndata["out"]


@compile()
def hgt_attention(
    g: Any,
    feature: Any,
    edge_mask: Any,
    p: Any,
    heads: int,
    scale: float,
    residual: bool,
) -> Any:
    """HGT whose messages may be masked, and its attention."""
    _hgt(g, edge_mask, p, heads, scale, residual)
    return g.ndata["out"], g.edata["att"]


def _hgt(
    g: Any, edge_mask: Any, p: Any, heads: int, scale: float, residual: bool
) -> None:
    for n in g.nodes():
        n["k"] = reshape(n.feature @ p.k[n.ntype] + p.bk[n.ntype], heads, -1)
        n["q"] = reshape(n.feature @ p.q[n.ntype] + p.bq[n.ntype], heads, -1)
        n["v"] = reshape(n.feature @ p.v[n.ntype] + p.bv[n.ntype], heads, -1)
    for e in g.edges():
        key = e.src["k"] @ p.k_rel[e.etype]
        e["msg"] = e.src["v"] @ p.v_rel[e.etype]
        if edge_mask is not None:
            e["msg"] = e["msg"] * e.edge_mask
        prior = reshape(p.p_rel[e.etype] * scale, heads, 1)
        e["att"] = edge_softmax(dot_prd(e.dst["q"], key) * prior)
    for n in g.dst_nodes():
        n["sum"] = 0.0
        for e in n.incoming_edges():
            n["sum"] += e["att"] * e["msg"]
        n["out"] = gelu(reshape(n["sum"], -1)) @ p.out[n.ntype] + p.b_out[n.ntype]
        if residual:
            gate = sigmoid(p.skip[n.ntype])
            n["out"] = gate * n["out"] + (1.0 - gate) * n.feature

"""Layers that hector was not made for, compiled as they are written (Wu, 3.3.7).

Each is a plain function of a graph, node features and parameters: SimpleHGN, relational
GATv2, CompGCN, and GCN and GAT on graphs of one relation. Gradients are generated too.
"""

from typing import Any

import hector
from hector import (
    concat,
    dot_prd,
    edge_softmax,
    elu,
    in_degree,
    leakyrelu,
    relation_degree,
    reshape,
    sqrt,
    tanh,
)


@hector.compile
def gcn(g: Any, feature: Any, weight: Any, bias: Any) -> Any:
    """Kipf and Welling (arXiv 1609.02907), every node with a self loop."""
    for n in g.nodes():
        n["scale"] = 1.0 / sqrt(in_degree(n) + 1.0)
        n["h"] = n["scale"] * (n.feature @ weight)
    for n in g.dst_nodes():
        n["out"] = n["h"]
        for e in n.incoming_edges():
            n["out"] += e.src["h"]
        n["out"] = n["scale"] * n["out"] + bias
    return g.ndata["out"]


@hector.compile
def gat(
    g: Any, feature: Any, weight: Any, att_src: Any, att_dst: Any, heads: int
) -> Any:
    """Graph attention (arXiv 1710.10903); `att_*` [heads, width]."""
    for n in g.nodes():
        n["h"] = reshape(n.feature @ weight, heads, -1)
    for e in g.edges():
        score = dot_prd(e.src["h"], att_src) + dot_prd(e.dst["h"], att_dst)
        e["att"] = edge_softmax(leakyrelu(score, 0.2))
    for n in g.dst_nodes():
        n["sum"] = 0.0
        for e in n.incoming_edges():
            n["sum"] += e["att"] * e.src["h"]
        n["out"] = elu(reshape(n["sum"], -1))
    return g.ndata["out"]


@hector.compile
def relational_gatv2(
    g: Any, feature: Any, w_src: Any, w_dst: Any, att: Any, heads: int
) -> Any:
    """GATv2 (arXiv 2105.14491) with weights and attention vectors by relation."""
    for e in g.edges():
        left = reshape(e.src.feature @ w_src[e.etype], heads, -1)
        right = reshape(e.dst.feature @ w_dst[e.etype], heads, -1)
        score = dot_prd(leakyrelu(left + right, 0.2), att[e.etype])
        e["msg"] = edge_softmax(score) * left
    for n in g.dst_nodes():
        n["sum"] = 0.0
        for e in n.incoming_edges():
            n["sum"] += e["msg"]
        n["out"] = reshape(n["sum"], -1)
    return g.ndata["out"]


@hector.compile
def comp_gcn(g: Any, feature: Any, relation: Any, weight: Any, loop: Any) -> Any:
    """CompGCN (arXiv 1911.03082) with subtraction: (x_u - z_r) W_r, and a self loop.

    `relation` [relations, width]; `weight` [relations, width, out], the same matrix for
    all relations of one direction.
    """
    for e in g.edges():
        e["msg"] = (e.src.feature - relation[e.etype]) @ weight[e.etype]
        e["msg"] /= relation_degree(e)
    for n in g.dst_nodes():
        n["out"] = n.feature @ loop
        for e in n.incoming_edges():
            n["out"] += e["msg"]
        n["out"] = tanh(n["out"])
    return g.ndata["out"]


@hector.compile
def simple_hgn(g: Any, feature: Any, p: Any, heads: int) -> Any:
    """SimpleHGN (arXiv 2112.14936): attention that sees the edge type, a residual.

    `p` holds weight, residual [in, heads * width], att_src, att_dst [heads, width],
    edge [relations, size], w_edge [size, heads * width] and att_edge [heads, width].
    """
    for n in g.nodes():
        n["h"] = reshape(n.feature @ p.weight, heads, -1)
    for e in g.edges():
        kind = reshape(p.edge[e.etype] @ p.w_edge, heads, -1)
        ends = dot_prd(e.src["h"], p.att_src) + dot_prd(e.dst["h"], p.att_dst)
        score = leakyrelu(ends + dot_prd(kind, p.att_edge), 0.2)
        e["att"] = edge_softmax(score)
    for n in g.dst_nodes():
        n["sum"] = 0.0
        for e in n.incoming_edges():
            n["sum"] += e["att"] * e.src["h"]
        n["out"] = elu(reshape(n["sum"], -1) + n.feature @ p.residual)
    return g.ndata["out"]


@hector.compile
def edge_mlp(g: Any, feature: Any, weight: Any, hidden: Any) -> Any:
    """A message of both ends and their relation through a shared layer."""
    for e in g.edges():
        e["ends"] = concat(e.src.feature, e.dst.feature) @ weight[e.etype]
        e["msg"] = tanh(e["ends"]) @ hidden
    for n in g.dst_nodes():
        n["out"] = 0.0
        for e in n.incoming_edges():
            n["out"] += e["msg"]
    return g.ndata["out"]

"""`dgl.transforms`: functions of graphs, and objects that call them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hector.message.graph import Graph
from hector.message.hetero import HeteroGraph
from hector.message.paths import (
    khop_graph,
    laplacian_lambda_max,
    line_graph,
    metapath_reachable_graph,
    norm_by_dst,
)
from hector.message.points import knn_graph, radius_graph, segmented_knn_graph
from hector.message.transforms import (
    add_reverse_edges,
    compact_graphs,
    to_bidirected,
    to_simple,
)

__all__ = [
    "AddReverse",
    "AddSelfLoop",
    "Compose",
    "DropEdge",
    "DropNode",
    "FeatMask",
    "RemoveSelfLoop",
    "RowFeatNormalizer",
    "ToSimple",
    "add_reverse_edges",
    "compact_graphs",
    "khop_graph",
    "knn_graph",
    "laplacian_lambda_max",
    "line_graph",
    "metapath_reachable_graph",
    "norm_by_dst",
    "radius_graph",
    "segmented_knn_graph",
    "to_bidirected",
    "to_simple",
]


class Compose:
    """Call one transform after another."""

    def __init__(self, transforms: Sequence[Any]) -> None:
        self.transforms = transforms

    def __call__(self, g: Any) -> Any:
        """Return the last one's graph."""
        for each in self.transforms:
            g = each(g)
        return g


def _loops(g: Any) -> list[Any]:
    return [k for k in g.canonical_etypes if k[0] == k[2]]


class RemoveSelfLoop:
    """Drop edges from a node to itself, of all types."""

    def __call__(self, g: Any) -> Any:
        """Return the graph without."""
        for kind in _loops(g):
            g = g.remove_self_loop(kind)
        return g


class AddSelfLoop:
    """Add an edge from each node to itself, of all types between nodes of one type; in
    place of those that are there, unless `allow_duplicate`. `new_etypes`: also a type
    "self" of each type of nodes."""

    def __init__(
        self,
        allow_duplicate: bool = False,
        new_etypes: bool = False,
        edge_feat_names: Sequence[str] | None = None,
        fill_data: float | str = 1.0,
    ) -> None:
        self.twice, self.new_etypes = allow_duplicate, new_etypes
        self.names, self.fill = edge_feat_names, fill_data

    def __call__(self, g: Any) -> Any:
        """Return the graph with them."""
        for kind in _loops(g):
            g = g if self.twice else g.remove_self_loop(kind)
            g = g.add_self_loop(self.names, self.fill, kind)
        if not self.new_etypes:
            return g
        edges = {(n, "self", n): (g.nodes(n), g.nodes(n)) for n in g.ntypes}
        return _with(g, {k: g.edges(etype=k) for k in g.canonical_etypes} | edges)


def _with(g: Any, edges: Any) -> Any:
    """Return a typed graph of the same nodes; edge features of the same types stay."""
    made = HeteroGraph(edges, {n: g.num_nodes(n) for n in g.ntypes})
    for n in g.ntypes:
        made.frame_of(n).update(g.frame_of(n))
    for k in g.canonical_etypes:
        if made.num_edges(k) == g.num_edges(k):
            made[k].edata.update(g[k].edata)
    return made


class AddReverse:
    """Add an edge back for each edge, self-loops too: of its own type between nodes of
    one type, else, or with `sym_new_etype`, of a type "rev_" + its name. Their features
    are those of the edges with `copy_edata`, else zeros, or none of a new type."""

    def __init__(self, copy_edata: bool = False, sym_new_etype: bool = False) -> None:
        self.copied, self.new = copy_edata, sym_new_etype

    def __call__(self, g: Any) -> Any:
        """Return the graph with them."""
        edges, back = {}, {}
        for k in g.canonical_etypes:
            src, dst = g.edges(etype=k)
            if k[0] == k[2] and not self.new:
                edges[k] = torch.cat((src, dst)), torch.cat((dst, src))
            else:
                back[k] = (k[2], f"rev_{k[1]}", k[0])
                edges[k], edges[back[k]] = (src, dst), (dst, src)
        if isinstance(g, Graph) and not back:
            ((src, dst),) = edges.values()
            made: Any = Graph(src, dst, num_nodes=g.num_nodes(), programs=g.programs)
            made.ndata.update(g.ndata)
        else:
            made = _with(g, edges)
        for k in g.canonical_etypes:
            for name, rows in g[k].edata.items():
                if k not in back:
                    more = rows if self.copied else torch.zeros_like(rows)
                    made[k].edata[name] = torch.cat((rows, more))
                elif self.copied:
                    made[back[k]].edata[name] = rows
        return made


class ToSimple:
    """`to_simple` of a graph."""

    def __init__(self, return_counts: str = "count") -> None:
        self.counts = return_counts

    def __call__(self, g: Any) -> Any:
        """Return the simple graph."""
        return to_simple(g, return_counts=self.counts)


def _share(name: str, p: float) -> float:
    if not 0 <= p <= 1:
        raise ValueError(f"expected {name} of 0 to 1, got {p}")
    return p


class DropEdge:
    """Drop each edge, of all types, with probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = _share("p", p)

    def __call__(self, g: Any) -> Any:
        """Return a graph without them; features of the others stay."""
        made = g.clone()
        for kind in g.canonical_etypes:
            draws = torch.rand(g.num_edges(kind), device=g.device)
            made.remove_edges((draws < self.p).nonzero().flatten(), etype=kind)
        return made


class DropNode:
    """Drop each node, of all types, with probability `p`, and its edges."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = _share("p", p)

    def __call__(self, g: Any) -> Any:
        """Return a graph without them; features of the others stay."""
        made = g.clone()
        for kind in g.ntypes:
            draws = torch.rand(g.num_nodes(kind), device=g.device)
            made.remove_nodes((draws < self.p).nonzero().flatten(), ntype=kind)
        return made


class _OfFeatures:
    """Change some features, by name, of nodes and edges of all types that have them;
    the graph that is given stays as it is."""

    def __init__(
        self,
        node_feat_names: Sequence[str] | None = None,
        edge_feat_names: Sequence[str] | None = None,
    ) -> None:
        self.nodes, self.edges = node_feat_names or (), edge_feat_names or ()

    def changed(self, rows: Tensor) -> Tensor:
        """Return other rows."""
        raise NotImplementedError

    def __call__(self, g: Any) -> Any:
        """Return a graph with other features."""
        made = g.local_var()
        frames = [(made.frame_of(n), self.nodes) for n in made.ntypes]
        frames += [(made[k].edata, self.edges) for k in made.canonical_etypes]
        for frame, names in frames:
            for name in names:
                if name in frame:
                    frame[name] = self.changed(frame[name])
        return made


class FeatMask(_OfFeatures):
    """Set each column of features to zeros with probability `p`."""

    def __init__(
        self,
        p: float = 0.5,
        node_feat_names: Sequence[str] | None = None,
        edge_feat_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(node_feat_names, edge_feat_names)
        self.p = _share("p", p)

    def changed(self, rows: Tensor) -> Tensor:
        """Return rows with zeros in some columns."""
        gone = torch.rand(rows.shape[1:], device=rows.device) < self.p
        return rows.masked_fill(gone, 0)


class RowFeatNormalizer(_OfFeatures):
    """Divide each row by its sum, and by no less than 1; with `subtract_min` after the
    least number of all rows is subtracted."""

    def __init__(
        self,
        subtract_min: bool = False,
        node_feat_names: Sequence[str] | None = None,
        edge_feat_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(node_feat_names, edge_feat_names)
        self.subtract_min = subtract_min

    def changed(self, rows: Tensor) -> Tensor:
        """Return rows that add up to at most one."""
        if self.subtract_min and rows.numel():
            rows = rows - rows.min()
        return rows / rows.sum(-1, keepdim=True).clamp(min=1.0)

"""`hector.message.Graph`: nodes and edges of one type, with features."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hector.indexing import count, integers, tensor_of
from hector.message.base import GraphBase
from hector.message.frame import EdgeFrame, Frame, ends_of
from hector.message.programs import Programs
from hector.message.relation import Message, Reduce, Relation
from hector.message.views import RowsView, TypeView
from hector.tracing import untraced

NID = EID = "_ID"
"""Feature that holds the ids of a whole graph, as DGL names it."""
NTYPES = ("_N", "_E", "_N")
"""The edge type of a graph of one type, as DGL names it."""
FILLS = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}


class Graph(GraphBase, Relation):
    """Hold directed edges between the nodes 0 to `num_nodes` - 1, with features.

    `ndata` and `edata` hold them by name. Functions with names of DGL do what DGL's do;
    see `hector.message.functions` for the built-in ones.
    """

    def __init__(
        self,
        src: Any,
        dst: Any,
        *,
        num_nodes: int | None = None,
        sampled: bool = False,
        programs: Programs | None = None,
    ) -> None:
        """Make edges from `src[i]` to `dst[i]`; edge ids are positions. Tensors may be
        written to later: every call runs on what they hold.

        `sampled`: one of many similar graphs, see `HeteroGraph.sampled`. Raises
        ValueError on non-integer, ragged or out-of-range input.
        """
        given = tensor_of(src), tensor_of(dst)
        if num_nodes is None:
            num_nodes = count(integers("src", given[0]), integers("dst", given[1]))
        nodes = Frame(int(num_nodes), given[0].device, "node")
        super().__init__(given, (nodes, nodes), sampled=sampled, programs=programs)

    # What a typed graph says of its types.

    is_homogeneous = True

    @property
    def ntypes(self) -> list[str]:
        """Return the only type of nodes."""
        return [NTYPES[0]]

    srctypes = dsttypes = ntypes

    @property
    def etypes(self) -> list[str]:
        """Return the relation of the only type of edges."""
        return [NTYPES[1]]

    @property
    def canonical_etypes(self) -> list[tuple[str, str, str]]:
        """Return the only type of edges, whole."""
        return [NTYPES]

    def to_canonical_etype(self, etype: Any = None) -> tuple[str, str, str]:
        """Return the whole name of the only edge type; ValueError for another."""
        if etype not in (None, NTYPES, NTYPES[1]):
            raise ValueError(f"expected the edge type '_E' of a Graph, got {etype!r}")
        return NTYPES

    def __getitem__(self, etype: Any) -> "Graph":
        self.to_canonical_etype(etype)
        return self

    def num_nodes(self, ntype: str | None = None) -> int:
        """Return how many nodes there are, those without edges among them."""
        return self.frame_of(ntype).num_rows

    number_of_nodes = num_nodes

    def num_edges(self, etype: Any = None) -> int:
        """Return how many edges there are."""
        self.to_canonical_etype(etype)
        return super().num_edges()

    number_of_edges = num_edges

    def update_all(
        self,
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Any = None,
        etype: Any = None,
    ) -> None:
        """Run `Relation.update_all`."""
        self.to_canonical_etype(etype)
        super().update_all(message_func, reduce_func, apply_node_func)

    def apply_edges(self, func: Message, edges: Any = None, etype: Any = None) -> None:
        """Run `Relation.apply_edges`."""
        self.to_canonical_etype(etype)
        super().apply_edges(func, edges)

    def in_degrees(self, v: Any = None, etype: Any = None) -> Any:
        """Run `Relation.in_degrees`."""
        self.to_canonical_etype(etype)
        return super().in_degrees(v)

    def out_degrees(self, u: Any = None, etype: Any = None) -> Any:
        """Run `Relation.out_degrees`."""
        self.to_canonical_etype(etype)
        return super().out_degrees(u)

    def frame_of(self, ntype: str | None = None, side: int = 1) -> Frame:
        """Return the features of nodes; ValueError for another type than "_N"."""
        if ntype not in (None, NTYPES[0]):
            raise ValueError(f"expected the node type '_N' of a Graph, got {ntype!r}")
        return self.dstdata

    @property
    def nodes(self) -> TypeView:
        """Return `nodes()`, the ids, int64 [nodes], and `nodes[ids].data`, the rows of
        some."""
        return TypeView(self._rows_of, self._node_ids)

    def _rows_of(self, nodes: Any) -> Any:
        if isinstance(nodes, str):
            return self.frame_of(nodes)
        return RowsView(self.ndata, self._dst_numbers("nodes", nodes))

    srcnodes = dstnodes = nodes

    @untraced
    def to(self, device: torch.device | str) -> "Graph":
        """Return the graph and its features on `device`."""
        made = Graph(
            self._src.to(device),
            self._dst.to(device),
            num_nodes=self.num_nodes(),
            sampled=self.sampled,
            programs=self.programs,
        )
        made.ndata.update({k: v.to(device) for k, v in self.ndata.items()})
        made.edata.update({k: v.to(device) for k, v in self.edata.items()})
        made.set_sizes(self)
        return made

    def local_var(self) -> "Graph":
        """Return a graph of the same edges and features; what is set in one is not seen
        in the other."""
        made = self._like(self._given[0], self._given[1], self.num_nodes())
        made.set_sizes(self)
        nodes = self.ndata.copied()
        made.set_frames(nodes, nodes, self.edata.copied())
        return made

    clone = local_var

    @untraced
    def prop_nodes(
        self,
        levels: Iterable[Tensor],
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Any = None,
    ) -> None:
        """Run `pull` for each set of nodes in turn."""
        for nodes in levels:
            self.pull(nodes, message_func, reduce_func, apply_node_func)

    @untraced
    def prop_edges(
        self,
        levels: Iterable[Any],
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Any = None,
    ) -> None:
        """Run `send_and_recv` for each set of edges in turn."""
        for edges in levels:
            self.send_and_recv(edges, message_func, reduce_func, apply_node_func)

    @untraced
    def topological_levels(self) -> Sequence[Tensor]:
        """Return nodes by the longest path that leads to them, found once.

        Raises ValueError if there is a cycle.
        """
        return self.now().levels

    # Other graphs. Features of a changed graph are gathered or padded.

    def _like(self, src: Tensor, dst: Tensor, num_nodes: int) -> "Graph":
        return Graph(src, dst, num_nodes=num_nodes, programs=self.programs)

    @untraced
    def reverse(self, copy_ndata: bool = True, copy_edata: bool = False) -> "Graph":
        """Return the graph whose edges lead back, with node features, and edge features
        if asked for."""
        made = self._like(self._dst, self._src, self.num_nodes())
        if copy_ndata:
            made.ndata.update(self.ndata)
        if copy_edata:
            made.edata.update(self.edata)
        return made

    def _changed(self, nodes: Tensor, ids: Tensor, position: Tensor) -> "Graph":
        src, dst = position[self._src[ids]], position[self._dst[ids]]
        made = self._like(src, dst, nodes.numel())
        rows = self.ndata.part(nodes)
        made.set_frames(rows, rows, self.edata.part(ids))
        return made

    @untraced
    def subgraph(self, nodes: Any) -> "Graph":
        """Return the graph of `nodes`, ids or a mask, in their order, and the edges
        between them; `ndata[NID]` and `edata[EID]` hold ids in this graph."""
        kept = self._dst_numbers("nodes", nodes)
        position = torch.full((self.num_nodes(),), -1, device=self.device)
        position[kept] = torch.arange(kept.numel(), device=self.device)
        inside = (position[self._src] >= 0) & (position[self._dst] >= 0)
        ids = inside.nonzero().flatten()
        made = self._changed(kept, ids, position)
        made.ndata[NID], made.edata[EID] = kept, ids
        return made

    @untraced
    def edge_subgraph(self, edges: Any, relabel_nodes: bool = True) -> "Graph":
        """Return the graph of `edges`, ids or a mask, and their ends, or all nodes;
        ids as in `subgraph`."""
        ids = self.edge_numbers(edges)
        nodes = self.nodes()
        if relabel_nodes:
            nodes = torch.cat((self._src[ids], self._dst[ids])).unique()
        position = torch.empty(self.num_nodes(), dtype=torch.int64, device=self.device)
        position[nodes] = torch.arange(nodes.numel(), device=self.device)
        made = self._changed(nodes, ids, position)
        if relabel_nodes:
            made.ndata[NID] = nodes
        made.edata[EID] = ids
        return made

    @untraced
    def add_self_loop(
        self,
        edge_feat_names: Any = None,
        fill_data: float | str = 1.0,
        etype: Any = None,
    ) -> "Graph":
        """Return the graph with an edge from each node to itself after its own. Their
        features are `fill_data`: a number, or the "sum", "mean", "max" or "min" of the
        edges into the node; of all features or of those named, others are zeros."""
        self.to_canonical_etype(etype)
        made = self.with_edges(self.nodes(), self.nodes())
        made.edata.update(
            looped(self.edata, self._dst, self.num_nodes(), edge_feat_names, fill_data)
        )
        return made

    @untraced
    def remove_self_loop(self, etype: Any = None) -> "Graph":
        """Return the graph without edges from a node to itself."""
        self.to_canonical_etype(etype)
        return self.without_edges(self._src == self._dst)

    @untraced
    def with_edges(self, u: Any, v: Any) -> "Graph":
        """Return the graph with more edges, whose features are zeros; new ids make new
        nodes."""
        more = ends_of(u, v, self.device)
        size = max(self.num_nodes(), count(*more))
        src, dst = torch.cat((self._src, more[0])), torch.cat((self._dst, more[1]))
        made = self._like(src, dst, size)
        made.ndata.update(self.ndata.padded(size))
        made.edata.update(self.edata.padded(src.numel()))
        return made

    @untraced
    def without_edges(self, edges: Any) -> "Graph":
        """Return the graph without `edges`, ids or a mask."""
        kept = torch.ones(self.num_edges(), dtype=torch.bool, device=self.device)
        kept[self.edge_numbers(edges)] = False
        made = self._changed(self.nodes(), kept.nonzero().flatten(), self.nodes())
        self.keep_sizes(made, {NTYPES: kept})
        return made

    # Changes in place, as DGL has them: the graph takes the edges of another one.

    def _become(self, made: "Graph") -> None:
        self._given = made.edges()
        self.set_frames(*made.frames())
        self._edges = self._new_edges()
        self.set_sizes(made)

    def add_edge(self, u: int, v: int, data: Any = None, etype: Any = None) -> None:
        """Add one edge; `data`: rows [1, ...]."""
        self.add_edges([u], [v], data, etype)

    def add_edges(
        self,
        u: Any,
        v: Any,
        data: Mapping[str, Tensor] | None = None,
        etype: Any = None,
    ) -> None:
        """Add edges; see `with_edges`. `data`: features of theirs."""
        self.to_canonical_etype(etype)
        made, before = self.with_edges(u, v), self.num_edges()
        new = torch.arange(before, made.num_edges(), device=self.device)
        for name, rows in (data or {}).items():
            made.edata.write(name, new, rows)
        self._become(made)

    def remove_edges(self, eids: Any, etype: Any = None) -> None:
        """Remove edges by ids or a mask; ids of later edges become smaller."""
        self.to_canonical_etype(etype)
        self._become(self.without_edges(eids))

    def add_nodes(
        self,
        num: int,
        data: Mapping[str, Tensor] | None = None,
        ntype: str | None = None,
    ) -> None:
        """Add nodes without edges, whose features are zeros, or `data`."""
        before = self.num_nodes(ntype)
        size = before + num
        made = self._like(self._src, self._dst, size)
        made.ndata.update(self.ndata.padded(size))
        made.edata.update(self.edata)
        new = torch.arange(before, size, device=self.device)
        for name, rows in (data or {}).items():
            made.ndata.write(name, new, rows)
        self._become(made)

    def remove_nodes(self, nids: Any, ntype: str | None = None) -> None:
        """Remove nodes by ids or a mask, and their edges; later ids become smaller."""
        self.frame_of(ntype)
        kept = torch.ones(self.num_nodes(), dtype=torch.bool, device=self.device)
        kept[self._dst_numbers("nids", nids)] = False
        made = self.subgraph(kept)
        del made.ndata[NID], made.edata[EID]
        self._become(made)

    def __repr__(self) -> str:
        return (
            f"Graph(num_nodes={self.num_nodes()}, num_edges={self.num_edges()}, "
            f"ndata={sorted(self.ndata)}, edata={sorted(self.edata)})"
        )


def looped(
    frame: EdgeFrame, dst: Tensor, num_nodes: int, names: Any, fill: float | str
) -> dict[str, Tensor]:
    """Return the columns of edges and, after them, of a self-loop for each node."""
    if isinstance(names, str):
        raise ValueError(f"expected edge_feat_names in a list, got {names!r}")
    if isinstance(fill, str) and fill not in FILLS:
        raise ValueError(f"expected fill_data a number or of {sorted(FILLS)}")
    found = {}
    for name, rows in frame.items():
        new = rows.new_zeros(num_nodes, *rows.shape[1:])
        if names is None or name in names:
            if isinstance(fill, str):
                at = dst.view(-1, *(1,) * (rows.dim() - 1)).expand_as(rows)
                new = new.scatter_reduce(0, at, rows, FILLS[fill], include_self=False)
            else:
                new = torch.full_like(new, fill)
        found[name] = torch.cat((rows, new))
    return found

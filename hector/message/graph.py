"""`hector.message.Graph`: nodes and edges of one type, with features."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hector.indexing import count, integers, tensor_of
from hector.message.frame import Frame, ends_of
from hector.message.programs import Programs
from hector.message.relation import Message, Reduce, Relation
from hector.tracing import untraced


class Graph(Relation):
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

        `sampled`: one of many graphs alike, see `HeteroGraph.sampled`. Raises
        ValueError on non-integer, ragged or out-of-range input.
        """
        given = tensor_of(src), tensor_of(dst)
        if num_nodes is None:
            num_nodes = count(integers("src", given[0]), integers("dst", given[1]))
        nodes = Frame(int(num_nodes), given[0].device, "node")
        super().__init__(given, (nodes, nodes), sampled=sampled, programs=programs)
        self.batch_num_nodes: tuple[int, ...] = (nodes.num_rows,)
        """Nodes of each graph of a batch; see `hector.message.batch`."""
        self.batch_num_edges: tuple[int, ...] = (given[0].numel(),)

    @property
    def ndata(self) -> Frame:
        """Return the features of nodes."""
        return self.dstdata

    @ndata.setter
    def ndata(self, frame: Frame) -> None:
        self.srcdata = self.dstdata = frame

    def num_nodes(self) -> int:
        """Return how many nodes there are, those without edges among them."""
        return self.ndata.num_rows

    number_of_nodes = num_nodes

    def nodes(self) -> Tensor:
        """Return the ids of the nodes, int64 [nodes]."""
        return torch.arange(self.num_nodes(), device=self.device)

    @property
    def batch_size(self) -> int:
        """Return how many graphs a batch has; 1 for a graph that is none."""
        return len(self.batch_num_nodes)

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
        made.batch_num_nodes = self.batch_num_nodes
        made.batch_num_edges = self.batch_num_edges
        return made

    def local_var(self) -> "Graph":
        """Return a graph of the same edges and features; what is set in one is not seen
        in the other."""
        made = self._like(self._given[0], self._given[1], self.num_nodes())
        made.batch_num_nodes = self.batch_num_nodes
        made.batch_num_edges = self.batch_num_edges
        nodes = self.ndata.copied()
        made.set_frames(nodes, nodes, self.edata.copied())
        return made

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
    def topological_levels(self) -> Sequence[Tensor]:
        """Return nodes by the longest path that leads to them, found once.

        Raises ValueError if there is a cycle.
        """
        return self._now().levels

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
    def add_self_loop(self) -> "Graph":
        """Return the graph with an edge from each node to itself behind its own, whose
        features are zeros."""
        return self.with_edges(self.nodes(), self.nodes())

    @untraced
    def remove_self_loop(self) -> "Graph":
        """Return the graph without edges from a node to itself."""
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
        return self._changed(self.nodes(), kept.nonzero().flatten(), self.nodes())

    # Changes in place, as DGL has them: the graph takes the edges of another one.

    def _become(self, made: "Graph") -> None:
        self._given = made.edges()
        self.set_frames(*made.frames())
        self._edges = self._new_edges()
        self.batch_num_nodes = (made.num_nodes(),)
        self.batch_num_edges = (made.num_edges(),)

    def add_edges(self, u: Any, v: Any) -> None:
        """Add edges; see `with_edges`."""
        self._become(self.with_edges(u, v))

    def remove_edges(self, eids: Any) -> None:
        """Remove edges by ids or a mask; ids of later edges become smaller."""
        self._become(self.without_edges(eids))

    def add_nodes(self, num: int) -> None:
        """Add nodes without edges, whose features are zeros."""
        size = self.num_nodes() + num
        made = self._like(self._src, self._dst, size)
        made.ndata.update(self.ndata.padded(size))
        made.edata.update(self.edata)
        self._become(made)

    def remove_nodes(self, nids: Any) -> None:
        """Remove nodes by ids or a mask, and their edges; later ids become smaller."""
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


NID = EID = "_ID"
"""Feature that holds the ids of a whole graph, as DGL names it."""

"""What graphs of one type and of several have in common: batches, devices, types."""

from typing import Any, TypeVar

import torch
from torch import Tensor

G = TypeVar("G", bound="GraphBase")
Sizes = tuple[int, ...]


class GraphBase:
    """Say how many nodes and edges each graph of a batch has, and where ids lie."""

    idtype = torch.int64
    """Ids may come as int32; they are int64 in results."""
    _nodes: dict[str, Sizes] | None = None
    _edges_of: dict[Any, Sizes] | None = None

    @property
    def _me(self) -> Any:
        """Return this graph with what its class has."""
        return self

    def node_sizes(self, ntype: str | None = None) -> Sizes:
        """Return the nodes of each graph of a batch, of all types without `ntype`."""
        if self._nodes is None:
            return (self._me.num_nodes(ntype),)
        return _of(self._nodes, ntype)

    def edge_sizes(self, etype: Any = None) -> Sizes:
        """Return the edges of each graph of a batch, of all types without `etype`."""
        if self._edges_of is None:
            return (self._me.num_edges(etype),)
        kind = None if etype is None else self._me.to_canonical_etype(etype)
        return _of(self._edges_of, kind)

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        """Return the nodes of each graph of a batch, int64 [graphs]."""
        return torch.tensor(self.node_sizes(ntype), device=self._me.device)

    def batch_num_edges(self, etype: Any = None) -> Tensor:
        """Return the edges of each graph of a batch, int64 [graphs]."""
        return torch.tensor(self.edge_sizes(etype), device=self._me.device)

    def set_batch_num_nodes(self, val: Any) -> None:
        """Say how many nodes each graph of a batch has: a list, or lists by type."""
        given = val if isinstance(val, dict) else {self._me.ntypes[0]: val}
        self._nodes = {n: tuple(map(int, v)) for n, v in given.items()}

    def set_batch_num_edges(self, val: Any) -> None:
        """Say how many edges each graph of a batch has: a list, or lists by type."""
        given = val if isinstance(val, dict) else {None: val}
        self._edges_of = {
            self._me.to_canonical_etype(k): tuple(map(int, v)) for k, v in given.items()
        }

    def set_sizes(self, other: "GraphBase | None") -> None:
        """Take over what a batch of the same edges knows of its graphs; None: this is
        no batch."""
        self._nodes = None if other is None else other._nodes
        self._edges_of = None if other is None else other._edges_of

    @property
    def batch_size(self) -> int:
        """Return how many graphs a batch has; 1 for a graph that is none."""
        return len(self.node_sizes())

    def has_nodes(self, vid: Any, ntype: str | None = None) -> Any:
        """Return whether there are nodes of these ids: a bool for one id, else bool
        [ids]."""
        ids = torch.as_tensor(vid, device=self._me.device)
        found = (ids >= 0) & (ids < self._me.num_nodes(ntype))
        return bool(found) if isinstance(vid, int) else found

    def cpu(self: G) -> G:
        """Return the graph and its features on the CPU."""
        found: G = self._me.to("cpu")
        return found

    def cuda(self: G) -> G:
        """Return the graph and its features on the GPU."""
        found: G = self._me.to("cuda")
        return found

    def create_formats_(self) -> None:
        """Do nothing: what programs read is made when they first run."""

    def get_ntype_id(self, ntype: str) -> Any:
        """Return the position of a node type in `ntypes`."""
        return self._me.ntypes.index(ntype)

    def get_etype_id(self, etype: Any) -> Any:
        """Return the position of an edge type in `canonical_etypes`."""
        return self._me.canonical_etypes.index(self._me.to_canonical_etype(etype))

    def adj(self, *_: Any, **__: Any) -> None:
        """Refuse: there are no sparse matrices."""
        raise ValueError(
            "expected no sparse matrix of a graph; write its product with update_all, "
            "or give torch.sparse_coo_tensor g.edges()"
        )

    adjacency_matrix = adj_external = adj

    def as_given(self: G) -> G:
        """Return the graph: int32 ids are taken, and int64 ones returned."""
        return self

    int = long = as_given


def _of(sizes: dict[Any, Sizes], kind: Any) -> Sizes:
    if kind is not None:
        return sizes[kind]
    return tuple(map(sum, zip(*sizes.values(), strict=True)))

"""What graphs of one type and of several have in common: batches, devices, types."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hector.indexing import group_by
from hector.message.batches import NodeBatch
from hector.message.frame import ids_of

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

    def keep_sizes(self, other: "GraphBase", kept: dict[Any, Tensor]) -> None:
        """Tell another graph, of the edges of which masks by type say true, how many of
        each graph of this batch it has."""
        if self._edges_of is None:
            return
        other.set_batch_num_nodes(self._nodes)
        other.set_batch_num_edges(
            {
                k: [int(part.sum()) for part in kept[k].split(list(sizes))]
                for k, sizes in self._edges_of.items()
            }
        )

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
        """Refuse: there are no matrices of `dgl.sparse`."""
        raise ValueError(
            "expected no dgl.sparse matrix of a graph; write its product with "
            "update_all, or take g.adj_external(), a torch.sparse_coo_tensor"
        )

    adjacency_matrix = adj

    def adj_external(
        self,
        transpose: bool = False,
        ctx: torch.device | str = "cpu",
        scipy_fmt: str | None = None,
        etype: Any = None,
    ) -> Any:
        """Return the sparse matrix [sources, destinations] of ones at edges, or its
        transpose: of PyTorch, uncoalesced, or of scipy ("coo", "csr")."""
        r = self._me[etype]
        ends, size = r.edges(), (r.num_src_nodes(), r.num_dst_nodes())
        if transpose:
            ends, size = ends[::-1], size[::-1]
        ones = torch.ones(r.num_edges(), device=ends[0].device)
        if scipy_fmt is None:
            pairs = torch.stack(ends)
            made = torch.sparse_coo_tensor(pairs, ones, size, check_invariants=True)
            return made.to(ctx)
        from scipy.sparse import coo_matrix

        row, col = (e.cpu().numpy() for e in ends)
        return coo_matrix((ones.cpu().numpy(), (row, col)), size).asformat(scipy_fmt)

    def adj_tensors(self, fmt: str, etype: Any = None) -> tuple[Tensor, ...]:
        """Return (sources, destinations) for "coo"; for "csr" and "csc" the offsets by
        source or destination, the other ends, and edge ids."""
        src, dst = self._me.edges(etype=etype)
        if fmt == "coo":
            return src, dst
        if fmt not in ("csr", "csc"):
            raise ValueError(f"expected fmt 'coo', 'csr' or 'csc', got {fmt!r}")
        r = self._me[etype]
        by, other, count = (src, dst, r.num_src_nodes())
        if fmt == "csc":
            by, other, count = (dst, src, r.num_dst_nodes())
        groups = group_by(by, count)
        return groups.ptr, other[groups.items], groups.items

    @property
    def is_multigraph(self) -> bool:
        """Return whether two edges of a type have the same ends."""
        for kind in self._me.canonical_etypes:
            pairs = torch.stack(self._me.edges(etype=kind), 1)
            if pairs.unique(dim=0).shape[0] != pairs.shape[0]:
                return True
        return False

    def all_edges(self, form: str = "uv", order: str = "eid", etype: Any = None) -> Any:
        """Return `edges(form, order, etype)`."""
        return self._me.edges(form, order, etype)

    def node_attr_schemes(self, ntype: str | None = None) -> dict[str, "Scheme"]:
        """Return the shape and dtype of each node feature."""
        return _schemes(self._me.frame_of(ntype))

    def edge_attr_schemes(self, etype: Any = None) -> dict[str, "Scheme"]:
        """Return the shape and dtype of each edge feature."""
        return _schemes(self._me[etype].edata)

    def filter_nodes(
        self, predicate: Any, nodes: Any = None, ntype: str | None = None
    ) -> Tensor:
        """Return the ids of the nodes, all or some, of which a function of them says
        true."""
        frame = self._me.frame_of(ntype)
        every = torch.arange(frame.num_rows, device=self._me.device)
        if nodes is not None:
            every = ids_of("nodes", nodes, frame.num_rows, self._me.device)
        batch = NodeBatch(frame.rows_at(every), {}, lambda: every)
        return every[predicate(batch).view(-1).bool()]

    def filter_edges(
        self, predicate: Any, edges: Any = None, etype: Any = None
    ) -> Tensor:
        """Return the ids of the edges, all or some, of which a function of them says
        true."""
        r = self._me[etype]
        found: dict[str, Tensor] = {}

        def call(batch: Any) -> dict[str, Tensor]:
            found["kept"] = predicate(batch).view(-1).bool()
            return {"kept": found["kept"]}

        with r.local_scope():
            r.apply_edges(call, edges)
        ids = torch.arange(r.num_edges(), device=self._me.device)
        return (ids if edges is None else r.edge_numbers(edges))[found["kept"]]

    def to_networkx(
        self, node_attrs: Sequence[str] = (), edge_attrs: Sequence[str] = ()
    ) -> Any:
        """Return a directed multigraph of networkx with these features; an edge's "id"
        is its own."""
        import networkx

        r, made = self._me[None], networkx.MultiDiGraph()
        nodes = {k: r.ndata[k].cpu() for k in node_attrs or ()}
        columns = {k: r.edata[k].cpu() for k in edge_attrs or ()}
        for i in range(r.num_src_nodes()):
            made.add_node(i, **{k: rows[i] for k, rows in nodes.items()})
        for i, (u, v) in enumerate(torch.stack(r.edges(), 1).tolist()):
            made.add_edge(u, v, id=i, **{k: c[i] for k, c in columns.items()})
        return made

    def metagraph(self) -> Any:
        """Return the multigraph of networkx of node types and edge types."""
        import networkx

        made = networkx.MultiDiGraph()
        made.add_nodes_from(self._me.ntypes)
        for start, name, end in self._me.canonical_etypes:
            made.add_edge(start, end, key=name)
        return made

    def formats(self: G, formats: Any = None) -> Any:
        """Return the graph: its formats are made when programs first run; without
        `formats`, the names of those."""
        names = ["coo", "csr", "csc"]
        if formats is None:
            return {"created": names, "not created": []}
        return self

    def set_n_initializer(self, initializer: Any, **_: Any) -> None:
        """Take `dgl.init.zero_initializer`, which features that are not set have."""
        if getattr(initializer, "__name__", "") != "zero_initializer":
            raise ValueError(
                "expected dgl.init.zero_initializer; set features of new nodes and "
                "edges by data= of add_nodes and add_edges"
            )

    set_e_initializer = set_n_initializer

    def pin_memory_(self: G) -> G:
        """Return the graph: samplers here read it where it lies."""
        return self

    unpin_memory_ = pin_memory_

    def is_pinned(self) -> bool:
        """Return False."""
        return False

    def as_given(self: G) -> G:
        """Return the graph: int32 ids are taken, and int64 ones returned."""
        return self

    int = long = as_given


class Scheme(NamedTuple):
    """What a feature's rows are."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _schemes(frame: Any) -> dict[str, Scheme]:
    return {k: Scheme(tuple(v.shape[1:]), v.dtype) for k, v in frame.items()}


def _of(sizes: dict[Any, Sizes], kind: Any) -> Sizes:
    if kind is not None:
        return sizes[kind]
    return tuple(map(sum, zip(*sizes.values(), strict=True)))

"""A heterogeneous graph, laid out the way compiled relational layers read it.

[Note: edge order] Edges are stored sorted by (edge type, destination, source).
Sorting by type makes every relation one segment, so a typed linear layer is a
segment matrix product (Wu, section 3.2.3). Sorting by destination inside the
segment makes the (edge type, destination) groups contiguous, so a mean over a
relation's in-edges is a segment reduction. `edge_order` leads back to the edges as
the caller gave them.

Node ids are global: the nodes of type 0 come first, then those of type 1, and so on.
"""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hector.compact import CompactMap, compact_map
from hector.indexing import (
    Grouping,
    check_parallel,
    check_range,
    count,
    edge_sort,
    endpoints,
    group_by,
    integers,
    offsets,
    segment_ptr,
    type_order,
    type_ptr,
)

if TYPE_CHECKING:
    from hector.indexing import IntArray

__all__ = [
    "CompactMap",
    "EdgeTypeName",
    "Grouping",
    "HeteroGraph",
    "type_order",
]

EdgeTypeName = tuple[str, str, str]


class GraphState:
    """What running on a graph leaves with it: it lives as long as the graph."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything; what is still in use elsewhere goes on to work."""
        self.arrays: Any = None
        """`hector.arrays.GraphArrays`."""
        self.executables: dict[Any, Any] = {}
        self.prepared: dict[Any, Any] = {}
        """Calls that layers prepared for the graph."""
        self.watch: Any = None
        """`hector.runtime.watch.Watch` over the tensors that it was made of."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeteroGraph:
    """A graph with typed nodes and typed edges. Build it with a `from_` method.

    All tensors lie on one device. Adjacency and compact maps are made on first use
    and kept. See [Note: edge order].
    """

    num_nodes: int
    node_type_ptr: Tensor
    """int64 [num_node_types + 1]: nodes of type t are ids [ptr[t], ptr[t + 1])."""
    etype_ptr: Tensor
    """int64 [num_edge_types + 1]: edges of type r are [ptr[r], ptr[r + 1])."""
    src: Tensor
    """int64 [num_edges]: source node of each stored edge."""
    dst: Tensor
    """int64 [num_edges]: destination node of each stored edge."""
    edge_type: Tensor
    """int64 [num_edges], ascending."""
    edge_order: Tensor
    """int64 [num_edges]: stored edge i is the caller's edge `edge_order[i]`."""
    node_type_names: tuple[str, ...]
    edge_type_names: tuple[EdgeTypeName, ...] | None = None
    """(source type, relation, destination type) a relation, when known."""
    state: GraphState = field(default_factory=GraphState, init=False, repr=False)

    @classmethod
    def from_arrays(
        cls,
        src: "IntArray",
        dst: "IntArray",
        edge_type: "IntArray",
        *,
        node_type: "IntArray | None" = None,
        num_nodes: int | None = None,
        num_edge_types: int | None = None,
    ) -> "HeteroGraph":
        """A graph from parallel integer arrays, edges in any order.

        `node_type` [num_nodes] must ascend: node ids are numbered type by type (see
        `type_order` to get there). Without it all nodes have one type.
        `num_nodes` and `num_edge_types` default to the largest id plus one; give
        them when the last nodes are isolated or the last relations empty.

        Raises ValueError on non-integer, ragged or out-of-range input.
        """
        s, d = integers("src", src), integers("dst", dst)
        r = integers("edge_type", edge_type)
        check_parallel(s, d, r)
        if node_type is None:
            num_nodes = count(s, d) if num_nodes is None else num_nodes
            ptr = offsets([num_nodes], s.device)
        else:
            ptr = type_ptr(integers("node_type", node_type), num_nodes).to(s.device)
            num_nodes = int(ptr[-1])
        num_edge_types = count(r) if num_edge_types is None else num_edge_types
        names = tuple(f"n{t}" for t in range(ptr.numel() - 1))
        return _build(_Edges(s, d, r), ptr, num_nodes, num_edge_types, names)

    @classmethod
    def from_pyg(
        cls,
        edge_index: Tensor,
        edge_type: Tensor,
        *,
        num_nodes: int | None = None,
        num_relations: int | None = None,
    ) -> "HeteroGraph":
        """A one-node-type graph from PyG's `edge_index` [2, E], `edge_type` [E]."""
        src, dst = endpoints("edge_index", edge_index)
        return cls.from_arrays(
            src,
            dst,
            edge_type,
            num_nodes=num_nodes,
            num_edge_types=num_relations,
        )

    @classmethod
    def from_hetero_data(cls, data: Any) -> "HeteroGraph":
        """A graph from a `torch_geometric.data.HeteroData`, types in its order.

        Edges are counted relation after relation: the caller's edge id used by
        `edge_order` is the position in that concatenation.
        """
        names = tuple(data.node_types)
        relations = tuple(tuple(t) for t in data.edge_types)
        if not relations:
            raise ValueError("expected HeteroData with at least one edge type, got 0")
        sizes = {n: _pyg_num_nodes(data, n) for n in names}
        ptr = offsets(list(sizes.values()), data[relations[0]].edge_index.device)
        first = dict(zip((*names, ""), ptr.tolist(), strict=True))
        src, dst, kind = [], [], []
        for i, (from_type, name, to_type) in enumerate(relations):
            ends = data[from_type, name, to_type].edge_index
            label = f"edge_index of {(from_type, name, to_type)}"
            s, d = endpoints(label, ends)
            check_range(f"{label}[0]", s, sizes[from_type], f"{from_type}.num_nodes")
            check_range(f"{label}[1]", d, sizes[to_type], f"{to_type}.num_nodes")
            src.append(s + first[from_type])
            dst.append(d + first[to_type])
            kind.append(torch.full_like(s, i))
        edges = _Edges(torch.cat(src), torch.cat(dst), torch.cat(kind))
        graph = _build(edges, ptr, sum(sizes.values()), len(relations), names)
        return graph.replace(edge_type_names=relations)

    def __post_init__(self) -> None:
        num_edges = self.src.numel()
        for name in ("src", "dst", "edge_type", "edge_order"):
            t: Tensor = getattr(self, name)
            if t.dtype != torch.int64 or t.shape != (num_edges,):
                raise ValueError(
                    f"expected {name} as int64 [{num_edges}], got {t.dtype} "
                    f"{list(t.shape)}; build the graph with from_arrays"
                )
        names = self.edge_type_names
        if names is not None and len(names) != self.num_edge_types:
            raise ValueError(
                f"expected {self.num_edge_types} edge type names, got {len(names)}"
            )
        if len(self.node_type_names) != self.num_node_types:
            raise ValueError(
                f"expected {self.num_node_types} node type names, got "
                f"{len(self.node_type_names)}"
            )

    @property
    def num_edges(self) -> int:
        return self.src.numel()

    @property
    def num_node_types(self) -> int:
        return self.node_type_ptr.numel() - 1

    @property
    def num_edge_types(self) -> int:
        return self.etype_ptr.numel() - 1

    @property
    def device(self) -> torch.device:
        return self.src.device

    @property
    def index_dtype(self) -> torch.dtype:
        """int32 where every node, edge and pair id fits, else int64."""
        largest = max(self.num_nodes, self.num_edges)
        return torch.int32 if largest < 2**31 - 1 else torch.int64

    @cached_property
    def etype_offsets(self) -> tuple[int, ...]:
        """`etype_ptr` on the host; one copy from the device, on first use."""
        return tuple(self.etype_ptr.tolist())

    @cached_property
    def node_type_offsets(self) -> tuple[int, ...]:
        """`node_type_ptr` on the host; one copy from the device, on first use."""
        return tuple(self.node_type_ptr.tolist())

    @cached_property
    def node_type(self) -> Tensor:
        """int64 [num_nodes]: the type of each node."""
        sizes = self.node_type_ptr.diff()
        types = torch.arange(self.num_node_types, device=self.device)
        return types.repeat_interleave(sizes, output_size=self.num_nodes)

    @cached_property
    def _csc(self) -> Grouping:
        return group_by(self.dst, self.num_nodes)

    @cached_property
    def _csr(self) -> Grouping:
        return group_by(self.src, self.num_nodes)

    @cached_property
    def _unique_src(self) -> CompactMap:
        return self._compact(self.src)

    @cached_property
    def _unique_dst(self) -> CompactMap:
        return self._compact(self.dst)

    def _compact(self, node: Tensor) -> CompactMap:
        return compact_map(self.edge_type, node, self.num_edge_types, self.num_nodes)

    def csc(self) -> Grouping:
        """In-edges (stored edge ids) by destination node."""
        return self._csc

    def csr(self) -> Grouping:
        """Out-edges (stored edge ids) by source node."""
        return self._csr

    def unique_src(self) -> CompactMap:
        """The (edge type, source) pairs."""
        return self._unique_src

    def unique_dst(self) -> CompactMap:
        """The (edge type, destination) pairs; its `edge_to_unique` ascends."""
        return self._unique_dst

    def edge_type_metadata(self) -> tuple[EdgeTypeName, ...]:
        """(source type, relation, destination type) of every relation, as PyG's HGT
        wants them.

        Given names are returned; else they are read off the edges, where an empty
        relation counts as going from the first node type to itself. Raises
        ValueError when one relation touches several node types on one side.
        """
        if self.edge_type_names is not None:
            return self.edge_type_names
        sides = [self._side(self.src, "sources"), self._side(self.dst, "destinations")]
        names = self.node_type_names
        return tuple(
            (names[s], f"r{i}", names[d])
            for i, (s, d) in enumerate(zip(*sides, strict=True))
        )

    def _side(self, ends: Tensor, label: str) -> list[int]:
        """The one node type of `ends` for each relation."""
        seen = torch.zeros(
            self.num_edge_types, self.num_node_types, dtype=torch.bool
        ).to(self.device)
        seen[self.edge_type, self.node_type[ends]] = True
        mixed = (seen.sum(1) > 1).nonzero().flatten().tolist()
        if mixed:
            types = [self.node_type_names[t] for t in seen[mixed[0]].nonzero()]
            raise ValueError(
                f"expected {label} of one node type in each relation, got {types} in "
                f"relation {mixed[0]}; split it by node type"
            )
        return [int(t) for t in seen.int().argmax(1).tolist()]

    def replace(self, **changes: Any) -> "HeteroGraph":
        """A copy with some fields changed and no cached maps."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return HeteroGraph(**{**values, **changes})

    def to(self, device: torch.device | str) -> "HeteroGraph":
        """The graph on `device`; maps are made anew there."""
        if torch.empty(0, device=device).device == self.device:
            return self
        tensors = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return self.replace(**tensors)


class _Edges(NamedTuple):
    src: Tensor
    dst: Tensor
    kind: Tensor


def _build(
    edges: _Edges,
    node_type_ptr: Tensor,
    num_nodes: int,
    num_edge_types: int,
    node_type_names: tuple[str, ...],
) -> HeteroGraph:
    """Check ids, sort the edges ([Note: edge order]) and make the graph."""
    src, dst, kind = edges
    check_range("src", src, num_nodes, "num_nodes")
    check_range("dst", dst, num_nodes, "num_nodes")
    check_range("edge_type", kind, num_edge_types, "num_edge_types")
    order = edge_sort(kind, dst, src, num_nodes)
    kind = kind[order]
    return HeteroGraph(
        num_nodes=num_nodes,
        node_type_ptr=node_type_ptr,
        etype_ptr=segment_ptr(kind, num_edge_types),
        src=src[order],
        dst=dst[order],
        edge_type=kind,
        edge_order=order,
        node_type_names=node_type_names,
    )


def _pyg_num_nodes(data: Any, name: str) -> int:
    count = data[name].num_nodes
    if count is None:
        raise ValueError(
            f"expected a node count for type {name!r}, got none; set "
            f"data[{name!r}].num_nodes"
        )
    return int(count)

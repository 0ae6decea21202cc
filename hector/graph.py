"""A heterogeneous graph, laid out the way compiled relational layers read it.

[Note: edge order] Edges are stored sorted by (edge type, destination, source).
Sorting by type makes every relation one segment, so a typed linear layer is a
segment matrix product (Wu, section 3.2.3). Sorting by destination inside the
segment makes the (edge type, destination) groups contiguous, so a mean over a
relation's in-edges is a segment reduction. `edge_order` leads back to the edges as
the caller gave them.

Node ids are global: the nodes of type 0 come first, then those of type 1, and so on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

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
from hector.kept import StaleGraphError, kept, lasting
from hector.tracing import untraced

if TYPE_CHECKING:
    from hector.indexing import IntArray

__all__ = [
    "CompactMap",
    "EdgeTypeName",
    "Grouping",
    "HeteroGraph",
    "type_order",
]

T = TypeVar("T")
_TENSORS = ("node_type_ptr", "etype_ptr", "src", "dst", "edge_type", "edge_order")
_HELD, _VERSION = attrgetter(*_TENSORS), attrgetter("_version")
EdgeTypeName = tuple[str, str, str]
Metadata = tuple[Sequence[str], Sequence[EdgeTypeName]]
"""PyG's: (node types, edge types)."""


class GraphState:
    """What running on a graph leaves with it: it lives as long as the graph."""

    def __init__(self, same: "GraphState | None" = None) -> None:
        """Take the watch of `same`, a state of the same tensors."""
        self.arrays: dict[type, Any] = {}
        """`hector.arrays.GraphArrays`, exact ones and bounded ones."""
        self.executables: dict[Any, Any] = {}
        self.found: dict[Any, Any] = {}
        """Executables by what is quickly asked of tensors."""
        self.prepared: dict[Any, Any] = {}
        """Calls that layers prepared for the graph."""
        self.watch: Any = None if same is None else same.watch
        """`hector.runtime.watch.Watch` over the tensors that it was made of."""

    def __reduce__(self) -> tuple[type["GraphState"], tuple[()]]:
        # A graph is copied and saved without what was compiled for it.
        return GraphState, ()


class _Mapped(Generic[T]):
    """A property that is made once and kept in the graph's `maps`."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, graph: Any, _: type) -> T:
        return kept(graph.maps, self._name, lambda: self._make(graph))


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
    sampled: bool = False
    """One of many similar graphs, such as a mini-batch: nothing that is made of it
    waits for the device, and what was compiled for the first one serves all."""
    maps: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """Adjacency and compact maps by name."""
    _versions: tuple[int, ...] = field(default=(), init=False, repr=False)
    """Of its tensors, when it was made."""
    state: GraphState = field(default_factory=GraphState, init=False, repr=False)

    @classmethod
    @untraced
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
    @untraced
    def from_pyg(
        cls,
        edge_index: Any,
        edge_type: Tensor,
        *,
        num_nodes: int | None = None,
        num_relations: int | None = None,
        sampled: bool = False,
    ) -> "HeteroGraph":
        """A one-node-type graph from PyG's `edge_index` [2, E], `edge_type` [E].

        A `sampled` graph needs `num_nodes` and `num_relations`: see `from_batch`.
        """
        src, dst = endpoints("edge_index", edge_index)
        if not sampled:
            return cls.from_arrays(
                src,
                dst,
                edge_type,
                num_nodes=num_nodes,
                num_edge_types=num_relations,
            )
        if num_nodes is None or num_relations is None:
            raise ValueError(
                "expected num_nodes and num_relations of a sampled graph, got none: "
                "counting them would wait for the device"
            )
        kind = integers("edge_type", edge_type)
        check_parallel(src, dst, kind)
        edges, ptr = _Edges(src, dst, kind), offsets([num_nodes], src.device)
        return _build(edges, ptr, num_nodes, num_relations, ("n0",), sampled=True)

    @classmethod
    @untraced
    def from_hetero_data(
        cls,
        data: Any,
        metadata: "Metadata | None" = None,
        *,
        sampled: bool = False,
    ) -> "HeteroGraph":
        """A graph from a `torch_geometric.data.HeteroData`, types in its order, or in
        that of `metadata` (node types, edge types), which may name types that the data
        lack.

        Edges are counted relation after relation: the caller's edge id used by
        `edge_order` is the position in that concatenation. Reads `edge_index`, or
        `adj_t` where there is none.
        """
        found = (tuple(data.node_types), tuple(tuple(t) for t in data.edge_types))
        names, relations = metadata or found
        sizes = {n: _pyg_num_nodes(data, n) for n in found[0]}
        edges = {r: _pyg_edges(data[r], r) for r in found[1]}
        types = (tuple(names), tuple(tuple(r) for r in relations))
        return cls.from_dicts(sizes, edges, types, sampled=sampled)

    @classmethod
    @untraced
    def from_batch(
        cls,
        batch: Any,
        metadata: "Metadata | None" = None,
        *,
        num_relations: int | None = None,
    ) -> "HeteroGraph":
        """A mini-batch of PyG's `NeighborLoader` or `HGTLoader` as it is: `HeteroData`,
        or `Data` with `edge_type` (then `num_relations` is needed); or one of
        pydirect's heterogeneous samplers.

        Making it and running compiled layers on it does not wait for the device and
        compiles nothing after the first batch. Ids are checked on a GPU too, there
        without waiting: results of ids out of range are NaN, and the next call raises.
        """
        if isinstance(getattr(batch, "node_ids", None), Mapping):
            # pydirect's samplers: ids and edges by type.
            sizes = {n: ids.numel() for n, ids in batch.node_ids.items()}
            types = metadata or (tuple(sizes), tuple(batch.edge_index))
            return cls.from_dicts(sizes, batch.edge_index, types, sampled=True)
        if hasattr(batch, "node_types") and hasattr(batch, "edge_types"):
            return cls.from_hetero_data(batch, metadata, sampled=True)
        edges = batch.edge_index
        if edges is None:
            edges = batch.adj_t
        return cls.from_pyg(
            edges,
            batch.edge_type,
            num_nodes=int(batch.num_nodes),
            num_relations=num_relations,
            sampled=True,
        )

    @classmethod
    @untraced
    def from_dicts(
        cls,
        num_nodes: "Mapping[str, int]",
        edges: "Mapping[EdgeTypeName, Any]",
        metadata: "Metadata",
        *,
        sampled: bool = False,
        device: torch.device | str | None = None,
    ) -> "HeteroGraph":
        """A graph from nodes and edges by type, local ids; a type of `metadata` that
        has none is empty. Edges are [2, num_edges] or `adj_t`; `device` is that of a
        graph without edges."""
        names, relations = metadata
        if not relations:
            raise ValueError("expected a graph with at least one edge type, got 0")
        unknown = [*(set(num_nodes) - set(names)), *(set(edges) - set(relations))]
        if unknown:
            raise ValueError(
                f"expected types of the metadata {list(names)} and {list(relations)}, "
                f"got {unknown}"
            )
        if not edges:
            none = torch.zeros(2, 0, dtype=torch.int64, device=device)
            edges = {relations[0]: none}
        sizes = {n: num_nodes.get(n, 0) for n in names}
        first = dict(zip(names, accumulate(sizes.values(), initial=0), strict=False))
        parts: list[_Edges] = []
        for i, relation in enumerate(relations):
            if relation not in edges:
                continue
            label = f"edge_index of {relation}"
            s, d = endpoints(label, edges[relation])
            part = _Edges(s, d, torch.full_like(s, i))
            ends = (relation[0], relation[2])
            part = _checked(part, tuple(sizes[e] for e in ends), label, ends, sampled)
            parts.append(part.moved(first[ends[0]], first[ends[1]]))
        joined = _Edges(
            torch.cat([p.src for p in parts]),
            torch.cat([p.dst for p in parts]),
            torch.cat([p.kind for p in parts]),
            _any([p.wrong for p in parts]),
        )
        ptr = offsets(list(sizes.values()), joined.src.device)
        total = sum(sizes.values())
        made = _build(joined, ptr, total, len(relations), tuple(names), sampled=sampled)
        return made.replace(edge_type_names=tuple(relations))

    def __post_init__(self) -> None:
        if self.src.is_cuda:
            from hector.runtime.launch import prepare_compiler

            prepare_compiler()
        for name in _TENSORS:
            object.__setattr__(self, name, lasting(getattr(self, name)))
        object.__setattr__(self, "_versions", self._versions_now())
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Versions of copied or loaded tensors begin anew.
        self.__dict__.update(state)
        object.__setattr__(self, "_versions", self._versions_now())

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(map(_VERSION, _HELD(self)))

    def check_unchanged(self) -> None:
        """Raise StaleGraphError if a tensor of this graph was changed in place: what is
        kept of it would be another graph's."""
        if tuple(map(_VERSION, _HELD(self))) != self._versions:
            raise StaleGraphError(
                "expected the tensors of a HeteroGraph as they were when it was made, "
                "but one was changed in place; build a new graph of the changed ids"
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

    @_Mapped
    def etype_offsets(self) -> tuple[int, ...]:
        """`etype_ptr` on the host; one copy from the device, on first use."""
        return tuple(self.etype_ptr.tolist())

    @_Mapped
    def node_type_offsets(self) -> tuple[int, ...]:
        """`node_type_ptr` on the host; one copy from the device, on first use."""
        return tuple(self.node_type_ptr.tolist())

    @_Mapped
    def node_type(self) -> Tensor:
        """int64 [num_nodes]: the type of each node."""
        sizes = self.node_type_ptr.diff()
        types = torch.arange(self.num_node_types, device=self.device)
        return types.repeat_interleave(sizes, output_size=self.num_nodes)

    @_Mapped
    def _csc(self) -> Grouping:
        return group_by(self.dst, self.num_nodes)

    @_Mapped
    def _csr(self) -> Grouping:
        return group_by(self.src, self.num_nodes)

    @_Mapped
    def _unique_src(self) -> CompactMap:
        return self._compact(self.src)

    @_Mapped
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
            self.num_edge_types,
            self.num_node_types,
            dtype=torch.bool,
            device=self.device,
        )
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
        made = HeteroGraph(**{**values, **changes})
        made.state.watch = self.state.watch
        return made

    def bare(self) -> "HeteroGraph":
        """The same graph, its maps shared, with a state of its own.

        What is kept in `state` refers to this one: a graph then goes, with the memory
        of what ran on it, when its last user does.
        """
        made = object.__new__(HeteroGraph)
        made.__dict__.update(self.__dict__, state=GraphState(self.state))
        return made

    @untraced
    def to(self, device: torch.device | str) -> "HeteroGraph":
        """The graph on `device`; maps are made anew there."""
        if torch.empty(0, device=device).device == self.device:
            return self
        tensors = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        made = self.replace(**tensors)
        if self.state.watch is not None:
            made.state.watch = self.state.watch.moved(made.device)
        return made


class _Edges(NamedTuple):
    src: Tensor
    dst: Tensor
    kind: Tensor
    wrong: Tensor | None = None
    """bool []: whether an id was out of range, where that was not waited for."""

    def moved(self, source: int, target: int) -> "_Edges":
        return self._replace(src=self.src + source, dst=self.dst + target)


def _any(found: Sequence[Tensor | None]) -> Tensor | None:
    wrong = [w for w in found if w is not None]
    return torch.stack(wrong).any() if wrong else None


def _checked(
    edges: _Edges,
    sizes: tuple[int, ...],
    label: str,
    names: tuple[str, ...],
    sampled: bool,
) -> _Edges:
    """Edges with ids below the sizes of both ends; see `HeteroGraph.from_batch`."""
    if not (sampled and edges.src.is_cuda):
        for i, (ids, size) in enumerate(zip(edges[:2], sizes, strict=True)):
            check_range(f"{label}[{i}]", ids, size, f"{names[i]}.num_nodes")
        return edges
    wrong = [(ids < 0) | (ids >= n) for ids, n in zip(edges[:2], sizes, strict=True)]
    kept = [i.clamp(0, max(n - 1, 0)) for i, n in zip(edges[:2], sizes, strict=True)]
    return edges._replace(src=kept[0], dst=kept[1], wrong=(wrong[0] | wrong[1]).any())


def _build(
    edges: _Edges,
    node_type_ptr: Tensor,
    num_nodes: int,
    num_edge_types: int,
    node_type_names: tuple[str, ...],
    sampled: bool = False,
) -> HeteroGraph:
    """Check ids, sort the edges ([Note: edge order]) and make the graph."""
    known = edges.wrong
    if sampled and edges.src.is_cuda:
        ends = ("src", "dst")
        edges = _checked(edges, (num_nodes,) * 2, "edges", ends, sampled)
        high = (edges.kind < 0) | (edges.kind >= num_edge_types)
        kinds = edges.kind.clamp(0, max(num_edge_types - 1, 0))
        wrong = _any([known, edges.wrong, high.any()])
        edges = edges._replace(kind=kinds, wrong=wrong)
    else:
        check_range("src", edges.src, num_nodes, "num_nodes")
        check_range("dst", edges.dst, num_nodes, "num_nodes")
        check_range("edge_type", edges.kind, num_edge_types, "num_edge_types")
    src, dst, kind, wrong = edges
    order = edge_sort(kind, dst, src, num_nodes, num_edge_types)
    kind = kind[order]
    made = HeteroGraph(
        num_nodes=num_nodes,
        node_type_ptr=node_type_ptr,
        etype_ptr=segment_ptr(kind, num_edge_types),
        src=src[order],
        dst=dst[order],
        edge_type=kind,
        edge_order=order,
        node_type_names=node_type_names,
        sampled=sampled,
    )
    if wrong is not None:
        from hector.runtime.watch import RangeWatch

        made.state.watch = RangeWatch(wrong)
    return made


def sampled_subgraph(
    graph: HeteroGraph, node_ids: Tensor, edge_ids: Tensor
) -> HeteroGraph:
    """A sampled graph of ascending `node_ids` and stored `edge_ids` between them."""
    ends = (graph.src, graph.dst)
    src, dst = (torch.searchsorted(node_ids, e[edge_ids]) for e in ends)
    edges = _Edges(src, dst, graph.edge_type[edge_ids])
    ptr = torch.searchsorted(node_ids, graph.node_type_ptr)
    return _sampled(graph, edges, ptr, node_ids.numel())


def padded_subgraph(
    graph: HeteroGraph, node_ids: Tensor, edge_ids: Tensor, num_nodes: Tensor
) -> HeteroGraph:
    """`sampled_subgraph` with room after it: of `node_ids` the first `num_nodes`
    (int64 [], on the device) are nodes and the others, at least one, are larger
    than any id; edges of id -1 join those. Sizes are those of the tensors, so
    nothing waits for the device."""
    size, real = node_ids.numel(), edge_ids >= 0
    at = edge_ids.clamp(min=0)
    # Spread over all spare nodes: no group of edges is longer than others.
    place = torch.arange(edge_ids.numel(), device=node_ids.device)
    spare = num_nodes + place % (size - num_nodes)
    src, dst = (
        torch.where(real, torch.searchsorted(node_ids, e[at]), spare)
        for e in (graph.src, graph.dst)
    )
    ptr = torch.searchsorted(node_ids, graph.node_type_ptr)
    # Spare nodes are of the last type.
    ptr = torch.cat((ptr[:-1], torch.full_like(ptr[-1:], size)))
    return _sampled(graph, _Edges(src, dst, graph.edge_type[at]), ptr, size)


def _sampled(
    graph: HeteroGraph, edges: _Edges, node_type_ptr: Tensor, num_nodes: int
) -> HeteroGraph:
    """A part of a graph, its edges sorted ([Note: edge order])."""
    src, dst, kind, _ = edges
    order = edge_sort(kind, dst, src, num_nodes, graph.num_edge_types)
    kind = kind[order]
    return HeteroGraph(
        num_nodes=num_nodes,
        node_type_ptr=node_type_ptr,
        etype_ptr=segment_ptr(kind, graph.num_edge_types),
        src=src[order],
        dst=dst[order],
        edge_type=kind,
        edge_order=order,
        node_type_names=graph.node_type_names,
        edge_type_names=graph.edge_type_names,
        sampled=True,
    )


def _pyg_edges(store: Any, relation: EdgeTypeName) -> Any:
    """`edge_index`, or `adj_t`, of one edge type."""
    for name in ("edge_index", "adj_t"):
        if name in store:
            return store[name]
    raise ValueError(f"expected edge_index or adj_t of {relation}, got neither")


def _pyg_num_nodes(data: Any, name: str) -> int:
    count = data[name].num_nodes
    if count is None:
        raise ValueError(
            f"expected a node count for type {name!r}, got none; set "
            f"data[{name!r}].num_nodes"
        )
    return int(count)

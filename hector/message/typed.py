"""Nodes and edges of several types, with features."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from hector.indexing import count, endpoints, integers, tensor_of
from hector.message.base import GraphBase
from hector.message.frame import EdgeFrame, Frame, ids_of
from hector.message.functions import ReduceFunction, Reducer
from hector.message.joined import send_all, sent_by
from hector.message.programs import Programs
from hector.message.relation import (
    Apply,
    Message,
    Reduce,
    Relation,
    T,
    apply_nodes,
)
from hector.message.views import ColumnsByType, RowsView, TypeView
from hector.tracing import untraced

Typed = TypeVar("Typed", bound="TypedGraph")
EdgeType = tuple[str, str, str]
"""(source type, relation, destination type)."""

CROSS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "stack": lambda rows: rows.transpose(0, 1),
}
"""Of results [relations, nodes, ...] for one type of nodes."""


class TypedGraph(GraphBase):
    """Types, frames, relations, and messages along them: `HeteroGraph` without the
    methods that make other graphs of it."""

    def __init__(
        self,
        data_dict: Mapping[EdgeType, Any],
        num_nodes_dict: Mapping[str, int] | None = None,
        idtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        sampled: bool = False,
        programs: Programs | None = None,
    ) -> None:
        """Make a graph of edges by type: (sources, destinations), `edge_index` [2,
        edges], `adj_t`, or pairs. `num_nodes_dict` defaults to the largest ids plus
        one.

        `idtype` is DGL's: ids may come as int32 or int64, and are int64 in results.
        `sampled`: one of many similar graphs, see `HeteroGraph.sampled` of hector.
        Raises ValueError on types that are no triples and on ids that are none.
        """
        if idtype not in (None, torch.int32, torch.int64):
            raise ValueError(f"expected idtype int32 or int64, got {idtype}")
        for kind in data_dict:
            if not isinstance(kind, tuple) or len(kind) != 3:
                raise ValueError(
                    f"expected edge types (source, relation, destination), got {kind!r}"
                )
        edges = {k: _ends(k, e, device) for k, e in data_dict.items()}
        sizes: dict[str, int] = {}
        for (start, _, end), ends in edges.items():
            for name, ids in ((start, ends[0]), (end, ends[1])):
                sizes[name] = max(sizes.get(name, 0), count(integers(name, ids)))
        if num_nodes_dict is not None:
            missing = sorted(set(sizes) - set(num_nodes_dict))
            if missing:
                raise ValueError(
                    f"expected num_nodes_dict with all node types, it lacks {missing}"
                )
            sizes = {n: int(c) for n, c in num_nodes_dict.items()}
        where = next((e[0].device for e in edges.values()), torch.device("cpu"))
        where = where if device is None else torch.device(device)
        names = sorted(sizes)
        frames = {n: Frame(sizes[n], where, "node") for n in names}
        self._set(frames, frames, _ordered(edges), programs, sampled)

    def _set(
        self,
        sources: dict[str, Frame],
        destinations: dict[str, Frame],
        edges: Mapping[EdgeType, tuple[Tensor, Tensor]],
        programs: Programs | None,
        sampled: bool = False,
    ) -> None:
        self.programs = programs
        self._frames = (sources, destinations)
        self._relations = {
            k: Relation(
                e,
                (sources[k[0]], destinations[k[2]]),
                sampled=sampled,
                programs=programs,
                kind=k,
                is_block=self.is_block,
            )
            for k, e in edges.items()
        }

    @classmethod
    def block(
        cls: type[Typed],
        sources: Mapping[str, Frame],
        destinations: Mapping[str, Frame],
        edges: Mapping[EdgeType, tuple[Tensor, Tensor]],
        edata: Mapping[EdgeType, EdgeFrame],
        programs: Programs | None = None,
    ) -> Typed:
        """Make a block: sources and destinations are numbered apart, and destinations
        are the first sources of their type. What was compiled for one block serves the
        next."""
        made = cls.__new__(cls)
        made._set(dict(sources), dict(destinations), edges, programs, sampled=True)
        made._take_frames(edata)
        return made

    @classmethod
    def from_hetero_data(cls: type[Typed], data: Any) -> Typed:
        """Make a graph of PyG's `HeteroData`, with what it holds by node and edge in
        `nodes[type].data` and `edges[type].data`."""
        sizes = {n: int(data[n].num_nodes) for n in data.node_types}
        edges, kept = {}, {}
        for kind in map(tuple, data.edge_types):
            store = data[kind]
            edges[kind] = store.edge_index if "edge_index" in store else store.adj_t
            kept[kind] = {
                k: v
                for k, v in store.items()
                if store.is_edge_attr(k) and k not in ("edge_index", "adj_t")
            }
        made = cls(edges, sizes)
        for n in data.node_types:
            for name, value in data[n].items():
                if isinstance(value, Tensor) and data[n].is_node_attr(name):
                    made.nodes[n].data[name] = value
        for kind, columns in kept.items():
            made[kind].edata.update(
                {k: v for k, v in columns.items() if isinstance(v, Tensor)}
            )
        return made

    # Types.

    @property
    def is_block(self) -> bool:
        """Return whether sources and destinations are numbered apart."""
        return self._frames[0] is not self._frames[1]

    @property
    def ntypes(self) -> list[str]:
        """Return the types of nodes."""
        return list(self._frames[0])

    srctypes = dsttypes = ntypes

    @property
    def canonical_etypes(self) -> list[EdgeType]:
        """Return the types of edges, whole."""
        return list(self._relations)

    @property
    def etypes(self) -> list[str]:
        """Return the relations of the types of edges."""
        return [r for _, r, _ in self._relations]

    @property
    def device(self) -> torch.device:
        """Return where the graph lies."""
        for frame in self._frames[0].values():
            return frame.device
        return torch.device("cpu")

    @property
    def is_homogeneous(self) -> bool:
        """Return whether there is one type of nodes and one of edges."""
        return len(self._relations) == 1 and len(self._frames[0]) == 1

    def to_canonical_etype(self, etype: Any = None) -> EdgeType:
        """Return the whole name of an edge type; None: of the only one.

        Raises ValueError where there is no such type, or more than one.
        """
        if type(etype) is tuple and etype in self._relations:
            return etype
        found = [k for k in self._relations if etype in (None, k, k[1])]
        if len(found) != 1:
            what = "one edge type" if etype is None else f"an edge type {etype!r}"
            raise ValueError(
                f"expected {what} among {self.canonical_etypes}, found {len(found)}; "
                "name it by (source, relation, destination)"
            )
        return found[0]

    def __getitem__(self, etype: Any) -> Relation:
        """Return the edges of one type, with the graph's features."""
        return self._relations[self.to_canonical_etype(etype)]

    def frame_of(self, ntype: str | None, side: int = 1) -> Frame:
        """Return the features of nodes of a type; `side` 0: as sources, 1: as
        destinations.

        Raises ValueError where there is no such type.
        """
        frames = self._frames[side]
        if ntype is None and len(frames) == 1:
            return next(iter(frames.values()))
        if ntype not in frames:
            raise ValueError(f"expected a node type of {self.ntypes}, got {ntype!r}")
        return frames[ntype]

    def num_nodes(self, ntype: str | None = None) -> int:
        """Return how many nodes of a type there are, None: of all types; of a block,
        sources."""
        if ntype is None:
            return sum(f.num_rows for f in self._frames[0].values())
        return self.frame_of(ntype, 0).num_rows

    num_src_nodes = number_of_nodes = number_of_src_nodes = num_nodes

    def num_dst_nodes(self, ntype: str | None = None) -> int:
        """Return how many destinations of a type there are, None: of all types."""
        if ntype is None:
            return sum(f.num_rows for f in self._frames[1].values())
        return self.frame_of(ntype).num_rows

    number_of_dst_nodes = num_dst_nodes

    def num_edges(self, etype: Any = None) -> int:
        """Return how many edges of a type there are, None: of all types."""
        if etype is None:
            return sum(r.num_edges() for r in self._relations.values())
        return self[etype].num_edges()

    number_of_edges = num_edges

    # Features.

    @property
    def nodes(self) -> TypeView:
        """Return `nodes[type].data`, and `nodes(type)`, the ids of a type."""
        return TypeView(self._rows_of, self._node_ids)

    def _rows_of(self, key: Any) -> Any:
        if key is None or isinstance(key, str):
            return self.frame_of(key, 0)
        frame = self.frame_of(None, 0)
        return RowsView(frame, ids_of("nodes", key, frame.num_rows, self.device))

    srcnodes = nodes

    @property
    def dstnodes(self) -> TypeView:
        """Return `dstnodes[type].data`, and `dstnodes(type)`, the ids of a type."""
        return TypeView(self.frame_of, lambda n=None: _ids(self.frame_of(n)))

    def _node_ids(self, ntype: str | None = None) -> Tensor:
        return _ids(self.frame_of(ntype, 0))

    @property
    def edges(self) -> TypeView:
        """Return `edges[type].data`, and `edges(form, order, etype)`, the edges of a
        type."""

        def listed(form: str = "uv", order: str = "eid", etype: Any = None) -> Any:
            return self[etype].edges(form, order)

        return TypeView(lambda e: self[e].edata, listed)

    def _data(self, side: int) -> Any:
        frames = self._frames[side]
        if len(frames) == 1:
            return next(iter(frames.values()))
        return ColumnsByType(frames)

    @property
    def srcdata(self) -> Any:
        """Return the features of sources: by name, then by type where there are
        several."""
        return self._data(0)

    @property
    def dstdata(self) -> Any:
        """Return the features of destinations; see `srcdata`."""
        return self._data(1)

    @property
    def ndata(self) -> Any:
        """Return the features of nodes; see `srcdata`.

        Raises ValueError for a block, whose nodes have two kinds of rows.
        """
        if self.is_block:
            raise ValueError("expected srcdata or dstdata of a block, got ndata")
        return self._data(0)

    @property
    def edata(self) -> Any:
        """Return the features of edges: by name, then by type where there are
        several."""
        if len(self._relations) == 1:
            return self[None].edata
        return ColumnsByType({k: r.edata for k, r in self._relations.items()})

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """Drop features that are set inside when it ends."""
        frames, relations = self._frames, self._relations
        before = {k: r.frames() for k, r in relations.items()}
        self._frames = self._copied_frames()
        self._relations = dict(relations)
        self._take_frames({k: f[2].copied() for k, f in before.items()})
        try:
            yield
        finally:
            self._frames, self._relations = frames, relations
            for k, r in relations.items():
                r.set_frames(*before[k])

    def _copied_frames(self) -> tuple[dict[str, Frame], dict[str, Frame]]:
        sources = {n: f.copied() for n, f in self._frames[0].items()}
        if not self.is_block:
            return sources, sources
        return sources, {n: f.copied() for n, f in self._frames[1].items()}

    def _take_frames(self, edata: Mapping[EdgeType, Any]) -> None:
        for k, r in self._relations.items():
            r.set_frames(self._frames[0][k[0]], self._frames[1][k[2]], edata[k])

    def local_var(self: Typed) -> Typed:
        """Return a graph of the same edges and features; what is set in one is not seen
        in the other."""
        made = type(self).__new__(type(self))
        made.programs, made._frames = self.programs, self._copied_frames()
        made._relations = {k: r.local_var() for k, r in self._relations.items()}
        made._take_frames({k: r.edata for k, r in made._relations.items()})
        made.set_sizes(self)
        return made

    clone = local_var

    # Messages.

    def update_all(
        self,
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Apply | None = None,
        etype: Any = None,
    ) -> None:
        """Run `Relation.update_all` on one type of edges."""
        self[etype].update_all(message_func, reduce_func, apply_node_func)

    def derived(self, make: Callable[[Any], T], etype: Any = None) -> T:
        """Return `Relation.derived` of one type of edges."""
        return self[etype].derived(make)

    @untraced
    def multi_update_all(
        self,
        etype_dict: Mapping[Any, tuple[Any, ...]],
        cross_reducer: str | Callable[[list[Tensor]], Tensor],
        apply_node_func: Apply | None = None,
    ) -> None:
        """Run `update_all` on several types of edges, and make one row a node of the
        results: their sum, mean, max, min, or stack [nodes, relations, ...], or what a
        function makes of their list.

        `etype_dict`: (message, reduce) or (message, reduce, apply) by type. Results are
        joined by name, among types with one destination type, in the graph's order of
        types. A node without messages along a type counts with zeros there; where
        messages and results are reduced by max both times, or by min, it does not
        count. `apply_node_func` is applied to the joined results.
        """
        if not callable(cross_reducer) and cross_reducer not in CROSS:
            raise ValueError(
                f"expected a cross_reducer of {sorted(CROSS)} or a function, got "
                f"{cross_reducer!r}"
            )
        calls = {self.to_canonical_etype(e): c for e, c in etype_dict.items()}
        sent = [(k, self[k], sent_by(self[k], *c)) for k, c in calls.items()]
        at_once = send_all([(k, r, s) for k, r, s in sent if s is not None])
        found: dict[str, dict[str, list[Tensor]]] = {}
        silent: dict[tuple[str, str], list[Tensor]] = {}
        for kind, relation in self._relations.items():
            if kind not in calls:
                continue
            message, reduce, *rest = calls[kind]
            if kind in at_once:
                made = {reduce.out: at_once[kind]}
            else:
                made = relation.propagate(message, reduce, rest[0] if rest else None)
            extreme = not rest and _is(reduce, cross_reducer)
            for name, rows in made.items():
                found.setdefault(kind[2], {}).setdefault(name, []).append(rows)
                if extreme:
                    none = relation.in_degrees() == 0
                    silent.setdefault((kind[2], name), []).append(none)
        for ntype, columns in found.items():
            frame = self.frame_of(ntype)
            for name, parts in columns.items():
                quiet = silent.get((ntype, name), [])
                frame[name] = _joined(parts, cross_reducer, quiet)
            if apply_node_func is not None:
                apply_nodes(frame, apply_node_func)

    def apply_edges(self, func: Message, edges: Any = None, etype: Any = None) -> None:
        """Run `Relation.apply_edges` on one type of edges."""
        self[etype].apply_edges(func, edges)

    @untraced
    def apply_nodes(self, func: Apply, v: Any = None, ntype: str | None = None) -> None:
        """Set features of nodes of a type, of all or of those of ids `v`."""
        apply_nodes(self.frame_of(ntype), func, v)

    def send_and_recv(
        self,
        edges: Any,
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Apply | None = None,
        etype: Any = None,
    ) -> None:
        """Run `Relation.send_and_recv` on one type of edges."""
        self[etype].send_and_recv(edges, message_func, reduce_func, apply_node_func)

    def pull(
        self,
        v: Any,
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Apply | None = None,
        etype: Any = None,
    ) -> None:
        """Run `Relation.pull` on one type of edges."""
        self[etype].pull(v, message_func, reduce_func, apply_node_func)

    def push(
        self,
        u: Any,
        message_func: Message,
        reduce_func: Reduce,
        apply_node_func: Apply | None = None,
        etype: Any = None,
    ) -> None:
        """Run `Relation.push` on one type of edges."""
        self[etype].push(u, message_func, reduce_func, apply_node_func)

    def in_degrees(self, v: Any = None, etype: Any = None) -> Any:
        """Return how many edges of a type end in each node."""
        return self[etype].in_degrees(v)

    def out_degrees(self, u: Any = None, etype: Any = None) -> Any:
        """Return how many edges of a type begin in each node."""
        return self[etype].out_degrees(u)

    def in_edges(self, v: Any, form: str = "uv", etype: Any = None) -> Any:
        """Return the edges of a type into the nodes `v`."""
        return self[etype].in_edges(v, form)

    def out_edges(self, u: Any, form: str = "uv", etype: Any = None) -> Any:
        """Return the edges of a type out of the nodes `u`."""
        return self[etype].out_edges(u, form)

    def find_edges(self, eid: Any, etype: Any = None) -> tuple[Tensor, Tensor]:
        """Return the sources and destinations of edges of a type."""
        return self[etype].find_edges(eid)

    def edge_ids(
        self, u: Any, v: Any, return_uv: bool = False, etype: Any = None
    ) -> Any:
        """Run `Relation.edge_ids` on one type of edges."""
        return self[etype].edge_ids(u, v, return_uv)

    def predecessors(self, v: Any, etype: Any = None) -> Tensor:
        """Return the sources of the edges of a type into `v`."""
        return self[etype].predecessors(v)

    def successors(self, v: Any, etype: Any = None) -> Tensor:
        """Return the destinations of the edges of a type out of `v`."""
        return self[etype].successors(v)

    def has_edges_between(self, u: Any, v: Any, etype: Any = None) -> Any:
        """Return whether there is an edge of a type from each `u` to each `v`."""
        return self[etype].has_edges_between(u, v)

    # Other graphs.

    @classmethod
    def made_of(
        cls: type[Typed],
        edges: Mapping[EdgeType, tuple[Tensor, Tensor]],
        frames: Mapping[str, Frame],
        edata: Mapping[EdgeType, EdgeFrame],
        programs: Programs | None,
    ) -> Typed:
        """Return a graph of edges and frames; node features are copied by column."""
        nodes = {n: f.copied() for n, f in frames.items()}
        made = cls.__new__(cls)
        made._set(nodes, nodes, edges, programs)
        for k, columns in edata.items():
            relation = made[k]
            relation.set_frames(relation.srcdata, relation.dstdata, columns)
        return made

    def become(self, made: "TypedGraph") -> None:
        """Take the nodes, edges and features of another graph."""
        self._frames, self._relations = made._frames, made._relations
        self.set_sizes(made)


def _ids(frame: Frame) -> Tensor:
    return torch.arange(frame.num_rows, device=frame.device)


def _ordered(edges: Mapping[EdgeType, Any]) -> dict[EdgeType, Any]:
    """Sort types by their names, as DGL does."""
    return {k: edges[k] for k in sorted(edges)}


def _ends(
    kind: EdgeType, edges: Any, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """Return sources and destinations as the caller's tensors, where they are."""
    if isinstance(edges, tuple) and len(edges) == 2:
        found = tensor_of(edges[0]), tensor_of(edges[1])
    elif isinstance(edges, Tensor) or hasattr(edges, "coo"):
        found = endpoints(str(kind), edges)
    else:
        pairs = torch.as_tensor(list(edges), dtype=torch.int64, device="cpu").view(
            -1, 2
        )
        found = pairs[:, 0], pairs[:, 1]
    return found if device is None else (found[0].to(device), found[1].to(device))


def _is(reduce: Any, cross_reducer: Any) -> bool:
    extremes = {"max": Reducer.MAX, "min": Reducer.MIN}
    return (
        isinstance(reduce, ReduceFunction)
        and isinstance(cross_reducer, str)
        and reduce.reducer is extremes.get(cross_reducer)
    )


def _joined(parts: list[Tensor], how: Any, silent: list[Tensor]) -> Tensor:
    """Return one column of the results of several relations; `silent`: nodes without
    messages of each, where they do not count."""
    if callable(how):
        found: Tensor = how(parts)
        return found
    if len(parts) == 1 and how != "stack":
        return parts[0].clone()  # it may be written to, which a part of more may not
    if len(silent) != len(parts):
        return CROSS[how](torch.stack(parts))
    worst = -torch.inf if how == "max" else torch.inf
    none = torch.stack(silent)
    none = none.view(*none.shape, *(1,) * (parts[0].dim() - 1))
    made = CROSS[how](torch.where(none, worst, torch.stack(parts)))
    return torch.where(none.all(0), 0.0, made)

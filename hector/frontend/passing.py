"""DGL's calls in layer code: `g.update_all`, `g.apply_edges`, the batches that message
and reduce functions get, and graphs of `hector.message` as arguments."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hector.frontend.functions import (
    as_sym,
    edge_softmax,
    linear,
    reshape,
    select,
)
from hector.frontend.values import (
    DataVar,
    FrontendError,
    IndexVar,
    Param,
    RowVar,
    State,
    Sym,
)
from hector.graph import HeteroGraph
from hector.graph_cache import GraphCache
from hector.ir.node import Node, Op
from hector.ir.types import Domain, Index
from hector.typed_linear import TypedLinear

EDGE_TYPES = ("edge_type", "edge_types", "etype", "etypes", "rel_type", "rel_types")
"""Arguments that hold the type of each edge."""
TYPE = "_TYPE"
"""Feature that holds types, as DGL names it."""


@dataclass(frozen=True)
class Boxed:
    """A row a message: what `nodes.mailbox["m"]` holds, [nodes, messages, ...]."""

    sym: Sym


@dataclass(frozen=True)
class Batch:
    """What a message function (edges) or a reduce or apply function (nodes) gets."""

    domain: Domain
    mailbox: Mapping[str, Boxed] = field(default_factory=dict)

    def attribute(self, name: str) -> Any:
        """`src`, `dst`, `data` or `mailbox`; None for anything else."""
        if self.domain is Domain.NODE:
            found: dict[str, Any] = {"mailbox": self.mailbox}
        else:
            ends = {"src": Index.SRC, "dst": Index.DST}
            found = {k: RowVar(Domain.EDGE, index) for k, index in ends.items()}
        return {**found, "data": RowVar(self.domain)}.get(name)


class Calls(Protocol):
    """What this needs of the interpreter."""

    state: State

    def invoke(self, function: Any, args: list[Any]) -> Any: ...

    def module_tensor(self, node: ast.AST, owner: Any, attr: str) -> Param: ...


# Messages.


def update_all(
    reader: Calls, message: Any, reduce: Any, apply: Any = None, etype: None = None
) -> None:
    """`g.update_all`; of an apply function, the results alone are stored."""
    if etype is not None:
        raise FrontendError("expected a graph of one type of edges: no etype")
    data = reader.state.data
    messages = _messages(reader, message)
    if _is_built_in(reduce):
        if reduce.message not in messages:
            raise FrontendError(f"no message {reduce.message!r}, got {list(messages)}")
        rows = messages[reduce.message]
        node = _reduce_node(reader.state, rows.node, reduce)
        found = {reduce.out: Sym(node, rows.rank)}
    else:
        box = {k: Boxed(m) for k, m in messages.items()}
        found = _results(reader, reduce, Batch(Domain.NODE, box))
    if apply is not None:
        before = dict(data)
        data.update({(Domain.NODE, k): s for k, s in found.items()})
        found = _results(reader, apply, Batch(Domain.NODE))
        data.clear()
        data.update(before)
    data.update({(Domain.NODE, k): s for k, s in found.items()})


def apply_edges(reader: Calls, func: Any, etype: None = None) -> None:
    """`g.apply_edges` on all edges."""
    if etype is not None:
        raise FrontendError("expected a graph of one type of edges: no etype")
    for name, rows in _messages(reader, func).items():
        reader.state.data[Domain.EDGE, name] = rows


def apply_nodes(reader: Calls, func: Any) -> None:
    """`g.apply_nodes` on all nodes."""
    found = _results(reader, func, Batch(Domain.NODE))
    reader.state.data.update({(Domain.NODE, k): s for k, s in found.items()})


def _is_built_in(function: Any) -> bool:
    """Whether it is one of `hector.message.functions`."""
    return type(function).__module__ == "hector.message.functions"


def _messages(reader: Calls, function: Any) -> dict[str, Sym]:
    if not _is_built_in(function):
        return _results(reader, function, Batch(Domain.EDGE))
    from hector.message.traced import combined

    left = _side(reader.state, *function.left)
    right = None if function.right is None else _side(reader.state, *function.right)
    return {function.out: combined(reader.state.builder, function, left, right)}


def _side(s: State, side: Any, name: str) -> Sym:
    ends = {"u": Index.SRC, "v": Index.DST}
    row = RowVar(Domain.EDGE, ends.get(side.value))
    found = data(s, row, name)
    if not isinstance(found, Sym):
        raise FrontendError(f"expected rows {name!r}, got {type(found).__name__}")
    return found


def _reduce_node(s: State, rows: Node, function: Any) -> Node:
    from hector.message.traced import FUSED, reduce_node

    if function.reducer not in FUSED:
        raise FrontendError(f"reducer {function.reducer.value} is not compiled")
    return reduce_node(s.builder, rows, function.reducer, function.temperature)


def _results(reader: Calls, function: Any, batch: Batch) -> dict[str, Sym]:
    """What a function of one's own returns for a batch, as rows of its domain."""
    made = reader.invoke(function, [batch])
    if not isinstance(made, dict):
        raise FrontendError(f"expected a dict of rows, got {type(made).__name__}")
    found = {k: as_sym(reader.state, v) for k, v in made.items()}
    for name, rows in found.items():
        if rows.node.domain is not batch.domain:
            raise FrontendError(
                f"expected {name!r} with a row a {batch.domain.value}, got one a "
                f"{rows.node.domain.value}"
            )
    return found


# Features.


def data(s: State, owner: RowVar | DataVar, name: str) -> Any:
    """A feature of nodes or edges that was set, or an argument of that name."""
    domain = owner.domain if isinstance(owner, DataVar) else owner.data_domain
    found = s.data.get((domain, name))
    if found is None:
        source = s.order.get(name)
        if not isinstance(source, Param):
            raise FrontendError(f"{domain.value} data {name!r} was never set")
        found = s.rows_of(source, domain)
    if isinstance(owner, RowVar) and owner.via is not None and isinstance(found, Sym):
        return Sym(s.read(found.node, owner.via, owner.domain), found.rank)
    return found


def pop(s: State, owner: DataVar, name: str) -> Any:
    """`g.ndata.pop("h")`."""
    found = data(s, owner, name)
    s.data.pop((owner.domain, name), None)
    return found


def store(s: State, owner: DataVar | RowVar, name: str, value: Any) -> None:
    """`e["name"] = value`, `g.ndata["name"] = value`."""
    if isinstance(value, IndexVar):
        s.data[owner.domain, name] = value
        return
    if isinstance(owner, DataVar) and isinstance(value, Param):
        value = argument_rows(s, owner, value)
    b = s.builder
    rows = as_sym(s, value, b.const(0.0, owner.domain))
    node = rows.node
    if node.op is Op.CONST:
        node = b.const(node.number("value"), owner.domain)
    if node.domain is not owner.domain:
        raise FrontendError(
            f"{owner.domain.value} data cannot hold {node.domain.value} values"
        )
    s.data[owner.domain, name] = Sym(node, rows.rank)


def update(s: State, owner: DataVar, columns: Mapping[str, Any]) -> None:
    """`g.ndata.update({"h": h})`."""
    for name, value in columns.items():
        store(s, owner, name, value)


def argument_rows(s: State, owner: DataVar | RowVar, value: Param) -> Sym:
    """An argument that is set as a feature: `g.ndata["h"] = feat`."""
    if owner.domain is Domain.EDGE and value.name not in s.edge_params:
        raise FrontendError(
            f"expected {value.name} to be named edge_..., or to be set as a feature of "
            "edges in the compiled function itself: its rows are sorted with the edges"
        )
    if owner.domain is Domain.NODE and value.shape[:1] != (s.num_nodes,):
        raise FrontendError(
            f"expected {value.name} with {s.num_nodes} rows, got {list(value.shape)}"
        )
    return s.rows_of(value, owner.domain)


# Mailboxes.


def boxed(call: Callable[..., Any], args: list[Any], named: dict[str, Any]) -> Any:
    """`call`; with a mailbox among its arguments, its result has a row a message."""
    plain = [a.sym if isinstance(a, Boxed) else a for a in args]
    found = call(*plain, **named)
    box = any(isinstance(a, Boxed) for a in args)
    return Boxed(found) if box and isinstance(found, Sym) else found


def box_call(
    s: State, name: str, call: Callable[..., Any], args: list[Any], named: Any
) -> Any:
    """A function of a mailbox; axis 1 counts the messages of a node."""
    box: Boxed = args[0]
    if name in ("max", "min"):
        raise FrontendError(
            f"{name} with indices is not compiled: write a{name}(dim=1)"
        )
    if name not in (*_REDUCED, "softmax", "unsqueeze", "squeeze"):
        return boxed(call, [s, *args], named)
    dim = named.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(dim, int):
        raise FrontendError(f"expected {name} of a mailbox along one axis")
    dim = dim if dim >= 0 else box.sym.rank + 1 + dim + (name == "unsqueeze")
    if name == "softmax":
        if dim != 1:
            raise FrontendError("expected softmax over the messages, axis 1")
        return Boxed(edge_softmax(s, box.sym))
    if dim == 1 and name in _REDUCED:
        from hector.message.functions import Reducer
        from hector.message.traced import reduce_node

        how = Reducer(_REDUCED[name])
        return Sym(reduce_node(s.builder, box.sym.node, how), box.sym.rank)
    if dim < 2 or name in ("amax", "amin"):
        raise FrontendError(f"{name} of a mailbox along axis {dim} is not compiled")
    keep = {"keepdim": named["keepdim"]} if "keepdim" in named else {}
    return boxed(call, [s, box, dim - 1], keep)


_REDUCED = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}


# Modules.


def module_call(
    reader: Calls, node: ast.AST, module: nn.Module, args: list[Any]
) -> Any:
    """A call of a module that is no `nn.Linear`."""
    if isinstance(module, TypedLinear):
        return _typed_linear(reader, node, module, *args)
    guards = reader.state.guards
    if isinstance(module, nn.Identity):
        return args[0]
    if isinstance(module, nn.Dropout):
        guards.attribute(module, "p", module.p)
        guards.attribute(module, "training", module.training)
        if module.p and module.training:
            raise FrontendError(
                "dropout is not compiled: apply it outside, or call eval()"
            )
        return args[0]
    if not type(module).__module__.startswith("torch."):
        return reader.invoke(module.forward, args)
    found = _ACTIVATIONS.get(type(module))
    if found is None:
        raise FrontendError(f"{type(module).__name__} is not compiled")
    function, facts = found
    for fact in facts:
        guards.attribute(module, fact, getattr(module, fact))
    return reader.invoke(function, [*args, *(getattr(module, f) for f in facts)])


_ACTIVATIONS: dict[type, tuple[Callable[..., Any], tuple[str, ...]]] = {
    nn.ReLU: (nn.functional.relu, ()),
    nn.LeakyReLU: (nn.functional.leaky_relu, ("negative_slope",)),
    nn.Sigmoid: (torch.sigmoid, ()),
    nn.Tanh: (torch.tanh, ()),
    nn.GELU: (nn.functional.gelu, ("approximate",)),
}


def _typed_linear(
    reader: Calls,
    node: ast.AST,
    module: TypedLinear,
    x: Any,
    kinds: Any,
    sorted_by_etype: bool = False,
) -> Sym:
    """One product for all types."""
    if not isinstance(kinds, IndexVar) or kinds.index not in (Index.ETYPE, Index.NTYPE):
        raise FrontendError(
            f"expected the types of the graph's edges or nodes: an argument named one "
            f"of {EDGE_TYPES}, or the feature {TYPE!r}"
        )
    weight = reader.module_tensor(node, module, "W")
    if module.coeff is not None:
        weight = reader.state.order[f"{weight.name.removesuffix('W')}get_weight"]
    s, matrices = reader.state, select(reader.state, weight, kinds)
    if module.regularizer != "bdd":
        return linear(s, x, matrices)
    made = linear(s, reshape(s, x, module.num_bases, -1), matrices)
    return reshape(s, made, -1)


def in_degrees(s: State) -> Sym:
    """`g.in_degrees()`, as numbers."""
    return Sym(s.builder.graph("in_degree", Domain.NODE), 1)


def out_degrees(s: State) -> Sym:
    """`g.out_degrees()`, as numbers."""
    return Sym(s.builder.graph("out_degree", Domain.NODE), 1)


# Arguments.


def message_graph(values: dict[str, Any], cache: GraphCache) -> HeteroGraph | None:
    """The graph of an argument that is a graph of `hector.message`, None if there is
    none; its features become arguments `g.n:name` and `g.e:name`.

    Raises FrontendError for a block.
    """
    from hector import message

    for name, value in values.items():
        if isinstance(value, message.Graph):
            graph, edges = _one_type(value, values, cache), value.edata
            nodes = {k: value.ndata[k] for k in value.ndata}
            columns = {k: edges[k] for k in edges}
        elif isinstance(value, message.HeteroGraph):
            if value.is_block:
                raise FrontendError("expected a graph, got a block: update_all of it")
            graph = _typed(value, cache)
            nodes = _joined({n: value.nodes[n].data for n in value.ntypes})
            columns = _joined({e: value[e].edata for e in value.canonical_etypes})
        else:
            continue
        values[name] = graph
        order = graph.edge_order
        for side, found in (("n", nodes), ("e", columns)):
            for key, rows in found.items():
                if rows.is_floating_point() and rows.dim() <= 3:
                    row = rows if side == "n" else rows[order]
                    values[f"{name}.{side}:{key}"] = row
        return graph
    return None


def _one_type(graph: Any, values: dict[str, Any], cache: GraphCache) -> HeteroGraph:
    kinds = next((values[n] for n in EDGE_TYPES if values.get(n) is not None), None)
    for name in (TYPE, *EDGE_TYPES):
        if kinds is None and name in graph.edata:
            kinds = graph.edata[name]
    if not isinstance(kinds, Tensor):
        found: HeteroGraph = graph.structure
        return found
    src, dst = graph.edges()
    relations, types = _num_types(values), kinds
    facts = (graph.num_nodes(), relations)

    def make(sampled: bool) -> HeteroGraph:
        return HeteroGraph.from_pyg(
            torch.stack((src, dst)),
            types,
            num_nodes=facts[0],
            num_relations=relations,
            sampled=sampled and relations is not None,
        )

    return cache.get((src, dst, types), facts, make)


def _num_types(values: Mapping[str, Any]) -> int | None:
    for name in ("num_relations", "num_rels"):
        if isinstance(values.get(name), int):
            return int(values[name])
    sizes = [
        part.num_types
        for value in values.values()
        if isinstance(value, nn.Module)
        for part in value.modules()
        if isinstance(part, TypedLinear)
    ]
    return max(sizes, default=None)


def _typed(graph: Any, cache: GraphCache) -> HeteroGraph:
    sizes = {n: graph.num_nodes(n) for n in graph.ntypes}
    kinds = tuple(graph.canonical_etypes)
    ends = [graph[k].edges() for k in kinds]
    facts = (tuple(sizes.items()), kinds)

    def make(sampled: bool) -> HeteroGraph:
        edges = {k: torch.stack(e) for k, e in zip(kinds, ends, strict=True)}
        return HeteroGraph.from_dicts(
            sizes, edges, (tuple(sizes), kinds), sampled=sampled, device=graph.device
        )

    return cache.get([t for e in ends for t in e], facts, make)


def _joined(frames: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Features that all types have with rows of one shape, type after type."""
    found = {}
    for name in next(iter(frames.values()), {}):
        rows = [f[name] for f in frames.values() if name in f]
        alike = len({(r.shape[1:], r.dtype) for r in rows}) == 1
        if len(rows) == len(frames) and alike:
            found[name] = torch.cat(rows)
    return found


def graph_features(s: State) -> None:
    """Make features of graphs that are arguments known by their names."""
    s.data[Domain.EDGE, TYPE] = IndexVar(Index.ETYPE)
    s.data[Domain.NODE, TYPE] = IndexVar(Index.NTYPE)
    for name, value in s.order.items():
        _, _, feature = name.partition(".")
        side, colon, key = feature.partition(":")
        if colon and side in ("n", "e"):
            domain = Domain.NODE if side == "n" else Domain.EDGE
            s.data[domain, key] = s.rows_of(value, domain)

"""`@hector.compile`: from layer code to compiled programs (Wu, section 3.3.2)."""

import ast
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, overload

import torch
from torch import Tensor, nn

from hector.frontend import passing
from hector.frontend.guards import Guards, snapshot
from hector.frontend.interpreter import Interpreter
from hector.frontend.source import parse
from hector.frontend.values import (
    EdgeIndex,
    FrontendError,
    GraphVar,
    IndexVar,
    Param,
    State,
    Sym,
)
from hector.graph import HeteroGraph
from hector.graph_cache import GraphCache
from hector.ir.builder import Builder
from hector.ir.node import Program
from hector.ir.types import Domain, Index
from hector.runtime import Compiled, Executable, Options
from hector.tracing import untraced
from hector.typed_linear import TypedLinear

MAX_PROGRAMS = 8
"""Programs of one signature that differ in what their guards saw."""


@dataclass
class _Specialized:
    """The program of one set of argument shapes."""

    compiled: Compiled
    sources: tuple[str, ...]
    """Argument of each program input."""
    results: tuple[Sym, ...]
    single: bool
    guards: Guards


class CompiledLayer:
    """A compiled function; calling it runs generated kernels.

    Three styles are read. Listing 3.1's: the first argument is a `HeteroGraph` (named
    `g` or `graph`), loops say what an edge or a node does. PyG's: `edge_index` and
    `edge_type` are arguments. DGL's: a graph of `hector.message` and its `update_all`
    and `apply_edges`; what the function sets on the graph stays in the function.
    Per-edge arguments and results are in the caller's edge order. An argument may be a
    dict of tensors by node type or by relation.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, function)
        self.function, self.options = function, options
        self.signature = inspect.signature(function)
        self._programs: dict[object, list[_Specialized]] = {}
        self._graphs = GraphCache()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def with_options(self, **changes: Any) -> "CompiledLayer":
        """The same layer with other options, compiled anew."""
        return CompiledLayer(self.function, replace(self.options, **changes))

    @untraced
    def __call__(self, *args: Any, **named: Any) -> Any:
        graph, values = self._bind(args, named)
        made = self._specialize(graph, values)
        return _call(made, graph, [values[s] for s in made.sources])

    @untraced
    def prepare(self, *args: Any, **named: Any) -> "Prepared":
        """A call with its look-ups done, for arguments of these shapes and dtypes.

        The layers of `hector.nn` keep one for each graph: on small graphs the host
        decides the time of a layer.
        """
        graph, values = self._bind(args, named)
        made = self._specialize(graph, values)
        tensors = [values[s] for s in made.sources]
        return Prepared(made, made.compiled.executable(graph, tensors))

    @untraced
    def executable(self, *args: Any, **named: Any) -> Executable:
        """What a call with these arguments runs: plans, generated lines, fallbacks."""
        graph, values = self._bind(args, named)
        made = self._specialize(graph, values)
        return made.compiled.executable(graph, [values[s] for s in made.sources])

    @untraced
    def program(self, *args: Any, **named: Any) -> Compiled:
        """The compiled program for arguments of these shapes."""
        graph, values = self._bind(args, named)
        return self._specialize(graph, values).compiled

    # Arguments.

    def _bind(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[HeteroGraph, dict[str, Any]]:
        bound = self.signature.bind(*args, **named)
        bound.apply_defaults()
        values = dict(bound.arguments)
        graph = self._graph(values)
        for name, value in list(values.items()):
            if isinstance(value, nn.Module | SimpleNamespace):
                for path, tensor in _tensors_of(value):
                    values[f"{name}.{path}"] = tensor
            elif isinstance(value, Mapping):
                values[name] = _flatten(name, value, graph)
            elif isinstance(value, Tensor) and self._is_edge_data(name, value, graph):
                values[name] = value[graph.edge_order]
        return graph, values

    def _graph(self, values: dict[str, Any]) -> HeteroGraph:
        for value in values.values():
            if isinstance(value, HeteroGraph):
                types = [
                    n for n in passing.EDGE_TYPES if isinstance(values.get(n), Tensor)
                ]
                if types:
                    raise FrontendError(
                        f"expected no {types[0]} beside a HeteroGraph, which has types"
                    )
                return value
        found = passing.message_graph(values, self._graphs)
        if found is not None:
            return found
        edge_index = values.get("edge_index")
        if not isinstance(edge_index, Tensor):
            raise FrontendError(
                "expected a HeteroGraph argument, or tensors edge_index [2, edges] and "
                "edge_type [edges]"
            )
        edge_type = values.get("edge_type")
        x = values.get("x")
        rows = x.shape[0] if isinstance(x, Tensor) else None
        relations = values.get("num_relations")

        def make(sampled: bool) -> HeteroGraph:
            known = rows is not None and relations is not None
            kinds = edge_type
            if kinds is None:
                kinds = torch.zeros_like(edge_index[0])
            return HeteroGraph.from_pyg(
                edge_index,
                kinds,
                num_nodes=rows,
                num_relations=relations,
                sampled=sampled and known,
            )

        tensors = [t for t in (edge_index, edge_type) if isinstance(t, Tensor)]
        return self._graphs.get(tensors, (rows, relations), make)

    @functools.cached_property
    def _edge_names(self) -> set[str]:
        return _set_as_features(self.function, ("edata",))

    def _is_edge_data(self, name: str, value: Tensor, graph: HeteroGraph) -> bool:
        named = name.startswith("edge_") or name in self._edge_names
        named = named and "." not in name
        known = named and name not in ("edge_index", *passing.EDGE_TYPES)
        return known and value.shape[:1] == (graph.num_edges,)

    def _specialize(self, graph: HeteroGraph, values: dict[str, Any]) -> _Specialized:
        key = tuple(self._signature(name, v, graph) for name, v in values.items())
        known = self._programs.setdefault(key, [])
        for made in known:
            if made.guards.hold(values):
                return made
        # A value that changes in every call would otherwise be kept for ever.
        del known[:-MAX_PROGRAMS]
        known.append(self._read(graph, values))
        return known[-1]

    def _signature(self, name: str, value: Any, graph: HeteroGraph) -> object:
        if isinstance(value, Tensor):
            # Rows of nodes and edges may change without a new program.
            rows = value.shape[:1] == (graph.num_nodes,)
            return (name, len(value.shape), tuple(value.shape[1:]), rows)
        if isinstance(value, HeteroGraph):
            return name
        if isinstance(value, SimpleNamespace):
            rest = {k: v for k, v in vars(value).items() if not isinstance(v, Tensor)}
            return name, snapshot(rest)
        if isinstance(value, nn.Module):
            # Held weakly; what is read of it is guarded.
            return name, weakref.ref(value, self._forget), value.training
        return name, _argument(value)

    def _forget(self, module: "weakref.ref[nn.Module]") -> None:
        """The programs of a module that is gone."""
        gone = [
            key
            for key in self._programs
            if isinstance(key, tuple)
            and any(isinstance(part, tuple) and module in part for part in key)
        ]
        for key in gone:
            del self._programs[key]

    def _read(self, graph: HeteroGraph, values: dict[str, Any]) -> _Specialized:
        state = State(Builder(), graph.num_nodes)
        state.node_params = _node_arguments(self.function)
        state.edge_params = {
            n
            for n, v in values.items()
            if isinstance(v, Tensor) and self._is_edge_data(n, v, graph)
        }
        if any(isinstance(v, nn.Module) for v in values.values()):
            # A module holds its parameters: other tensors of a row a node are features.
            state.node_params |= {n for n in values if "." not in n}
        symbols: dict[str, Any] = {}
        for name, value in values.items():
            symbols[name] = _symbol(name, value, graph)
            state.order[name] = symbols[name]
            if "." in name:
                state.tensors[name] = value
        passing.graph_features(state)
        names = {n: v for n, v in symbols.items() if "." not in n}
        found = Interpreter(state, self.function).call(names)
        single = isinstance(found, Sym)
        results = (found,) if single else found
        if not isinstance(results, tuple) or not all(
            isinstance(r, Sym) for r in results
        ):
            raise FrontendError(
                f"expected {self.function.__name__} to return node or edge values"
            )
        program = Program(
            outputs=tuple((f"out{i}", r.node) for i, r in enumerate(results))
        )
        shapes = [_row_shape(r) for r in results]
        compiled = Compiled(state.builder, program, self.options, shapes)
        sources = tuple(state.bound[n] for n in compiled.inputs)
        return _Specialized(compiled, sources, tuple(results), single, state.guards)


class Prepared:
    """A compiled function bound to a graph and to its arguments' shapes."""

    def __init__(self, made: _Specialized, executable: Executable) -> None:
        self._made, self.executable = made, executable
        self.sources = made.sources
        domains = [s.node.domain for s in made.results]
        self._of_edges = [i for i, d in enumerate(domains) if d is Domain.EDGE]

    def __call__(self, values: Mapping[str, Tensor]) -> Any:
        """The function's results for its tensor arguments by name."""
        outputs = self.executable([*map(values.__getitem__, self.sources)])
        if self._of_edges:
            graph, found = self.executable.arrays.graph, list(outputs)
            for i in self._of_edges:
                found[i] = _in_callers_order(found[i], graph)
            outputs = tuple(found)
        return outputs[0] if self._made.single else outputs


def _call(made: _Specialized, graph: HeteroGraph, tensors: list[Tensor]) -> Any:
    return Prepared(made, made.compiled.executable(graph, tensors))(
        dict(zip(made.sources, tensors, strict=True))
    )


def _row_shape(s: Sym) -> tuple[int, ...]:
    return {1: (), 2: (s.node.type.width,)}.get(s.rank, s.node.shape)


def _tensors_of(owner: nn.Module | SimpleNamespace) -> list[tuple[str, Tensor]]:
    if isinstance(owner, SimpleNamespace):
        return [(k, v) for k, v in vars(owner).items() if isinstance(v, Tensor)]
    made = [
        (f"{path}.get_weight" if path else "get_weight", part.get_weight())
        for path, part in owner.named_modules()
        if isinstance(part, TypedLinear) and part.coeff is not None
    ]
    return [*owner.named_parameters(), *owner.named_buffers(), *made]


def _flatten(name: str, value: Mapping[Any, Any], graph: HeteroGraph) -> Tensor:
    """A dict of tensors by node type (rows joined) or by relation (stacked)."""
    keys = list(value)
    if set(keys) == set(graph.node_type_names):
        return torch.cat([value[k] for k in graph.node_type_names])
    relations = graph.edge_type_names or ()
    by_name = {r: "__".join(r) for r in relations}
    if relations and all(r in value or by_name[r] in value for r in relations):
        return torch.stack([value[r if r in value else by_name[r]] for r in relations])
    raise FrontendError(
        f"expected {name} to have one tensor a node type "
        f"{list(graph.node_type_names)} or one a relation, got keys {keys[:8]}"
    )


def _argument(value: Any) -> object:
    """An argument that is no tensor: by its value if its class compares values."""
    kind = type(value)
    plain = kind.__module__ == "builtins" or "__eq__" not in _defined(kind)
    return snapshot(value) if plain else (kind, value)


def _defined(kind: type) -> set[str]:
    """Names that a class or its bases define, next to what every object has."""
    return {name for base in kind.__mro__[:-1] for name in vars(base)}


def _symbol(name: str, value: Any, graph: HeteroGraph) -> Any:
    if isinstance(value, HeteroGraph):
        return GraphVar()
    if name == "edge_index":
        return EdgeIndex()
    if name in passing.EDGE_TYPES and isinstance(value, Tensor):
        return IndexVar(Index.ETYPE)
    if name == "node_type":
        return IndexVar(Index.NTYPE)
    if isinstance(value, Tensor):
        return Param(name, tuple(value.shape))
    return value


def _set_as_features(function: Callable[..., Any], owners: Sequence[str]) -> set[str]:
    """Arguments that the source sets as features: `g.edata["w"] = w`."""
    found = set()
    for node in ast.walk(parse(inspect.unwrap(function)).tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:
                owner = getattr(target, "value", None)
                if isinstance(owner, ast.Attribute) and owner.attr in owners:
                    found.add(node.value.id)
    return found


def _node_arguments(function: Callable[..., Any]) -> set[str]:
    """Arguments that the source indexes by an endpoint: `x[src]`."""
    tree = parse(inspect.unwrap(function)).tree
    ends = {"src", "dst", "row", "col"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            if node.value.id == "edge_index" and isinstance(node.targets[0], ast.Tuple):
                ends |= {e.id for e in node.targets[0].elts if isinstance(e, ast.Name)}
    found = _set_as_features(function, ("ndata", "srcdata", "dstdata"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            text = ast.unparse(node.slice)
            if text in ends or text.startswith("edge_index["):
                found.add(node.value.id)
    return found


def _in_callers_order(value: Tensor, graph: HeteroGraph) -> Tensor:
    """Edge rows in the order in which the caller gave the edges."""
    order = torch.empty_like(graph.edge_order)
    order[graph.edge_order] = torch.arange(
        graph.num_edges, device=graph.edge_order.device
    )
    return value[order]


@overload
def compile(function: Callable[..., Any]) -> CompiledLayer: ...
@overload
def compile(**options: Any) -> Callable[[Callable[..., Any]], CompiledLayer]: ...
def compile(
    function: Callable[..., Any] | None = None, **options: Any
) -> CompiledLayer | Callable[[Callable[..., Any]], CompiledLayer]:
    """Compile a relational GNN layer: `@hector.compile` or
    `@hector.compile(backend=..., optimizations=..., tune=...)`; see `Options`."""
    chosen = Options(**options)
    if function is None:
        return lambda f: CompiledLayer(f, chosen)
    return CompiledLayer(function, chosen)

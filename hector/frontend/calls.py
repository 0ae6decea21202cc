"""Calls in layer code: built-in functions, methods, modules, PyG's propagate."""

import ast
import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from hector.frontend import passing
from hector.frontend.functions import (
    FUNCTIONS,
    METHODS,
    aggregate,
    as_sym,
    edge_softmax,
    select,
    transposed_linear,
)
from hector.frontend.source import UnsupportedPythonError
from hector.frontend.values import (
    DataVar,
    FrontendError,
    GraphVar,
    IndexVar,
    Param,
    RowLoop,
    RowVar,
    State,
    Sym,
    Typed,
)
from hector.functions import StandIn
from hector.ir.types import Domain, Index


class Reader(Protocol):
    """What calls need of the interpreter."""

    state: State
    tree: ast.FunctionDef
    names: dict[str, Any]

    def value(self, node: ast.expr) -> Any: ...

    def items(self, nodes: list[ast.expr]) -> list[Any]: ...

    def error(self, node: ast.AST, why: str) -> UnsupportedPythonError: ...

    def module_tensor(self, node: ast.AST, owner: Any, attr: str) -> Param: ...

    def size(self, owner: Param, axis: int) -> int: ...

    def run(self, body: list[ast.stmt], names: dict[str, Any]) -> Any: ...

    def invoke(self, function: Any, args: list[Any]) -> Any: ...

    def spawn(self, function: Callable[..., Any]) -> "Reader": ...

    def call(self, args: dict[str, Any]) -> Any: ...


class Closure:
    """A lambda or a function that layer code defines, with the names around it."""

    def __init__(self, outer: Reader, node: ast.Lambda | ast.FunctionDef) -> None:
        self.outer, self.node = outer, node
        if node.args.vararg or node.args.kwarg or node.args.kwonlyargs:
            raise outer.error(node, "expected a function of plain arguments")

    def call(self, args: list[Any], named: Mapping[str, Any]) -> Any:
        """The value that it returns."""
        names = [a.arg for a in self.node.args.args]
        values = [self.outer.value(d) for d in self.node.args.defaults]
        given = dict(zip(names[len(names) - len(values) :], values, strict=True))
        given.update(zip(names, args, strict=False), **named)
        if set(given) != set(names) or len(args) > len(names):
            raise FrontendError(f"expected arguments {names}, got {list(given)}")
        inner = copy.copy(self.outer)
        names_around = {**self.outer.names, **given}
        if isinstance(self.node, ast.FunctionDef):
            return inner.run(self.node.body, names_around)
        inner.names = names_around
        return inner.value(self.node.body)


class BoundMethod:
    """A method of a symbol, not called yet."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name


SCOPE = object()
"""What `g.local_scope()` gives."""
_SYMBOLS = (Sym, Param, Typed, IndexVar, GraphVar, passing.Boxed)
_GRAPH_LOOPS = {
    "edges": RowLoop(Domain.EDGE),
    "nodes": RowLoop(Domain.NODE),
    "dst_nodes": RowLoop(Domain.NODE),
    "src_nodes": RowLoop(Domain.NODE),
}


def call(reader: Reader, node: ast.Call) -> Any:
    function = reader.value(node.func)
    args = reader.items(node.args)
    named = {k.arg: reader.value(k.value) for k in node.keywords if k.arg}
    if len(named) != len(node.keywords):
        raise reader.error(node, "** arguments are not supported")
    if isinstance(function, BoundMethod):
        return _method(reader, node, function, args, named)
    if isinstance(function, nn.Linear):
        return _linear_module(reader, node, function, args[0])
    if isinstance(function, nn.Module):
        return passing.module_call(reader, node, function, args)
    if function is range:
        return range(*args)
    if function in (isinstance, len, int, float) and not named:
        return function(*args)
    return _named(reader, node, function, args, named)


def _named(
    reader: Reader,
    node: ast.Call,
    function: Any,
    args: list[Any],
    named: dict[str, Any],
) -> Any:
    """A call of a Python function: built in by its name, or read like the layer."""
    name = getattr(function, "__name__", "")
    if getattr(function, "__module__", "") == "hector.message.functions":
        return function(*args, **named)
    if any(isinstance(a, GraphVar) for a in args) and name == "edge_softmax":
        return _softmax_in_place(reader, args, function)
    owner = getattr(function, "__self__", None)
    if name == "propagate" and isinstance(owner, nn.Module):
        return _propagate(reader, owner, named)
    if name in FUNCTIONS and not _is_layer_code(function, owner):
        items = (*args, *named.values())
        ours = isinstance(function, StandIn)
        if ours or any(isinstance(a, (*_SYMBOLS, tuple)) for a in items):
            if args and isinstance(args[0], passing.Boxed):
                return passing.box_call(
                    reader.state, name, FUNCTIONS[name], args, named
                )
            return FUNCTIONS[name](reader.state, *args, **named)
    own = inspect.isfunction(function) or inspect.ismethod(function)
    if own or isinstance(function, Closure):
        return inline(reader, function, args, named)
    raise reader.error(node, f"{name or function!r} is not supported")


def inline(
    reader: Reader, function: Any, args: list[Any], named: dict[str, Any]
) -> Any:
    """The value of a function, read like the layer; built-in ones by their names."""
    name = getattr(function, "__name__", "")
    if name in FUNCTIONS and not _is_layer_code(function, None):
        return FUNCTIONS[name](reader.state, *args, **named)
    if isinstance(function, Closure):
        return function.call(args, named)
    bound = inspect.signature(function).bind(*args, **named)
    bound.apply_defaults()
    names = dict(bound.arguments)
    owner = getattr(function, "__self__", None)
    inner = reader.spawn(getattr(function, "__func__", function))
    if owner is not None:
        names[inner.tree.args.args[0].arg] = owner
    return inner.call(names)


def _softmax_in_place(reader: Reader, args: list[Any], function: Any) -> Any:
    """`edge_softmax(g, score)` of DGL, and `edge_softmax(g)` of Listing 3.1: the user's
    own if it has source, else the built-in one on e["att"] (or the named data)."""
    name = args[1] if len(args) > 1 else "att"
    if not isinstance(name, str):
        return edge_softmax(reader.state, name)
    if inspect.isfunction(function):
        inline(reader, function, args, {})
        return None
    old = reader.state.data[Domain.EDGE, name]
    reader.state.data[Domain.EDGE, name] = edge_softmax(reader.state, old)
    return None


def _linear_module(reader: Reader, node: ast.AST, module: nn.Linear, x: Any) -> Sym:
    weight = reader.module_tensor(node, module, "weight")
    bias = None
    if module.bias is not None:
        bias = reader.module_tensor(node, module, "bias")
    return transposed_linear(reader.state, x, weight, bias)


def _method(
    reader: Reader,
    node: ast.AST,
    bound: "BoundMethod",
    args: list[Any],
    named: dict[str, Any],
) -> Any:
    owner, name = bound.owner, bound.name
    if isinstance(owner, GraphVar) and name in _GRAPH_LOOPS and not args:
        return _GRAPH_LOOPS[name]
    if isinstance(owner, GraphVar):
        return _graph_method(reader, node, name, args, named)
    if isinstance(owner, DataVar) and name in ("pop", "update"):
        return getattr(passing, name)(reader.state, owner, *args)
    if isinstance(owner, passing.Boxed) and name in _OF_MAILBOXES:
        how = METHODS.get(name, FUNCTIONS.get(name, passing.boxed))
        return passing.box_call(reader.state, name, how, [owner, *args], named)
    if isinstance(owner, RowVar):
        end = Index.DST if name == "incoming_edges" else Index.SRC
        return RowLoop(Domain.EDGE, end)
    if isinstance(owner, Param) and name in ("size", "dim"):
        return reader.size(owner, args[0]) if args else len(owner.shape)
    if isinstance(owner, Sym | Param) and name in METHODS:
        return METHODS[name](reader.state, owner, *args, **named)
    raise reader.error(node, f"method {name} is not supported")


def _graph_method(
    reader: Reader, node: ast.AST, name: str, args: list[Any], named: dict[str, Any]
) -> Any:
    """DGL's methods of a graph."""
    if name == "local_scope":
        return SCOPE
    if name in _GRAPH_CALLS:
        return _GRAPH_CALLS[name](reader, *args, **named)
    raise reader.error(node, f"method {name} of a graph is not supported")


_OF_MAILBOXES = (*METHODS, "softmax", "amax", "amin", "max", "min")
_GRAPH_CALLS: dict[str, Callable[..., Any]] = {
    "update_all": passing.update_all,
    "apply_edges": passing.apply_edges,
    "apply_nodes": passing.apply_nodes,
    "in_degrees": lambda reader: passing.in_degrees(reader.state),
    "out_degrees": lambda reader: passing.out_degrees(reader.state),
}


def _propagate(reader: Reader, module: nn.Module, named: dict[str, Any]) -> Any:
    """PyG's propagate: message on edges, reduction to destinations, update."""
    message: Any = module.message
    wanted = inspect.signature(message).parameters
    values: dict[str, Any] = {}
    for name in wanted:
        stem, _, end = name.rpartition("_")
        if end in ("i", "j") and stem in named:
            index = IndexVar(Index.DST if end == "i" else Index.SRC)
            values[name] = select(reader.state, named[stem], index)
        elif name == "index":
            values[name] = IndexVar(Index.DST)
        elif name in ("ptr", "size_i", "size_j"):
            values[name] = None
        else:
            values[name] = named.get(name)
    rows = as_sym(reader.state, inline(reader, message, [], values))
    how = str(getattr(module, "aggr", "add"))
    out = Sym(aggregate(reader.state, rows.node, Index.DST, how), rows.rank)
    update = getattr(type(module), "update", None)
    if update is None or update.__module__.startswith("torch_geometric.nn.conv.mess"):
        return out
    return inline(reader, module.update, [out], {})


def _is_layer_code(function: Any, owner: Any) -> bool:
    """A function of the user's own that happens to share a built-in's name."""
    module = str(getattr(function, "__module__", "") or "")
    known = module.startswith(("torch", "hector")) or module in ("math", "builtins", "")
    return not known or isinstance(owner, nn.Module)

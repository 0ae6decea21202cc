"""Reads the source of a layer and builds its inter-operator IR.

An abstract interpreter of Python's syntax tree: numbers and module attributes have
their values, tensors are symbols. A loop over edges or nodes is read once, since its
body says what one row does. Whatever is not understood is an error with its line.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from hector.frontend import passing
from hector.frontend.calls import SCOPE, BoundMethod, Closure, call, inline
from hector.frontend.functions import aggregate, as_sym, binary, select, unary
from hector.frontend.source import UnsupportedPythonError, parse
from hector.frontend.values import (
    DataVar,
    EdgeIndex,
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
from hector.ir.builder import IRTypeError
from hector.ir.node import Op
from hector.ir.types import Domain, Index

MAX_UNROLL = 64


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class Interpreter:
    """Reads one function; functions that it calls get interpreters of their own."""

    def __init__(self, state: State, function: Callable[..., Any]) -> None:
        self.state = state
        self.function = inspect.unwrap(function)
        self.source = parse(self.function)
        self.tree = self.source.tree
        self.names: dict[str, Any] = {}

    def call(self, args: dict[str, Any]) -> Any:
        """The value that the function returns for these arguments."""
        return self.run(self.tree.body, dict(args))

    def run(self, body: list[ast.stmt], names: dict[str, Any]) -> Any:
        """The value that statements return."""
        self.names = names
        try:
            self.block(body)
        except _Return as done:
            return done.value
        return None

    # Statements.

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            try:
                self.statement(statement)
            except UnsupportedPythonError:
                raise
            except (FrontendError, IRTypeError) as wrong:
                raise self.error(statement, str(wrong)) from wrong

    def error(self, node: ast.AST, why: str) -> UnsupportedPythonError:
        """An error that shows where it is."""
        line = getattr(node, "lineno", 1) - 1
        text = self.source.lines[line].strip()
        where = f"{self.source.file}:{self.source.first + line}"
        return UnsupportedPythonError(f"{where}: {why}\n    {text}")

    def statement(self, node: ast.stmt) -> None:
        handler = _STATEMENTS.get(type(node))
        if handler is None:
            raise self.error(node, f"{type(node).__name__} is not supported")
        handler(self, node)

    def _expression(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.value(node.value)

    def _return(self, node: ast.Return) -> None:
        raise _Return(None if node.value is None else self.value(node.value))

    def _assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.store(target, value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.store(node.target, self.value(node.value))

    def _augmented(self, node: ast.AugAssign) -> None:
        value = self.value(node.value)
        if self._is_accumulation(node):
            group = self.state.inner_group
            if group is None or not isinstance(node.op, ast.Add):
                raise self.error(node, "expected += on node data inside an edge loop")
            rows = as_sym(self.state, value)
            edge = (
                self.state.builder.spread(rows.node, Domain.EDGE)
                if (rows.node.op is Op.CONST)
                else rows.node
            )
            value = Sym(aggregate(self.state, edge, group, "sum"), rows.rank)
        old = self.value(_load(node.target))
        self.store(node.target, binary(self.state, node.op, old, value))

    def _is_accumulation(self, node: ast.AugAssign) -> bool:
        if self.state.inner_group is None or not isinstance(node.target, ast.Subscript):
            return False
        owner = self.value(node.target.value)
        return isinstance(owner, RowVar) and owner.domain is Domain.NODE

    def _if(self, node: ast.If) -> None:
        test = self.value(node.test)
        if isinstance(test, Sym | Typed):
            raise self.error(node, "a condition on tensor values is not supported")
        self.block(node.body if test else node.orelse)

    def _for(self, node: ast.For) -> None:
        loop = self.value(node.iter)
        if isinstance(loop, range):
            if len(loop) > MAX_UNROLL:
                raise self.error(node, f"a loop of {len(loop)} steps is too long")
            for item in loop:
                self.store(node.target, item)
                self.block(node.body)
            return
        if not isinstance(loop, RowLoop) or node.orelse:
            raise self.error(
                node,
                "expected a loop over g.edges(), g.nodes(), g.dst_nodes(), "
                "g.src_nodes(), n.incoming_edges(), n.outgoing_edges() or a range",
            )
        self.store(node.target, RowVar(loop.domain))
        before = self.state.inner_group
        self.state.inner_group = loop.group
        self.block(node.body)
        self.state.inner_group = before

    def _pass(self, node: ast.Pass) -> None:
        return

    def _with(self, node: ast.With) -> None:
        for item in node.items:
            if self.value(item.context_expr) is not SCOPE or item.optional_vars:
                raise self.error(node, "expected with g.local_scope()")
        before = dict(self.state.data)
        try:
            self.block(node.body)
        finally:
            self.state.data.clear()
            self.state.data.update(before)

    def _define(self, node: ast.FunctionDef) -> None:
        self.names[node.name] = Closure(self, node)

    def store(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple):
            items = _unpack(value)
            if len(items) != len(target.elts):
                raise self.error(target, f"cannot unpack {len(items)} values")
            for part, item in zip(target.elts, items, strict=True):
                self.store(part, item)
        elif isinstance(target, ast.Subscript):
            self._store_data(target, value)
        else:
            raise self.error(target, f"assignment to {type(target).__name__}")

    def _store_data(self, target: ast.Subscript, value: Any) -> None:
        owner, name = self.value(target.value), self.value(target.slice)
        row = isinstance(owner, DataVar) or (
            isinstance(owner, RowVar) and owner.via is None
        )
        if not row or not isinstance(name, str):
            raise self.error(target, 'expected e["name"], n["name"] or g.ndata["name"]')
        passing.store(self.state, owner, name, value)

    # Expressions.

    def value(self, node: ast.expr) -> Any:
        handler = _EXPRESSIONS.get(type(node))
        if handler is None:
            raise self.error(node, f"{type(node).__name__} is not supported")
        try:
            return handler(self, node)
        except UnsupportedPythonError:
            raise
        except (FrontendError, IRTypeError) as wrong:
            raise self.error(node, str(wrong)) from wrong

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id in self.names:
            return self.names[node.id]
        guards = self.state.guards
        cells = dict(
            zip(
                self.function.__code__.co_freevars,
                self.function.__closure__ or (),
                strict=True,
            )
        )
        if node.id in cells:
            guards.cell(cells[node.id], cells[node.id].cell_contents)
            return cells[node.id].cell_contents
        names = self.function.__globals__
        if node.id in names:
            guards.scope(names, node.id, names[node.id])
            return names[node.id]
        if node.id in _BUILTINS:
            return _BUILTINS[node.id]
        raise self.error(node, f"{node.id} is not defined")

    def _binary(self, node: ast.BinOp) -> Any:
        args = [self.state, node.op, self.value(node.left), self.value(node.right)]
        return passing.boxed(binary, args, {})

    def _unary(self, node: ast.UnaryOp) -> Any:
        x = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            return not x
        if not isinstance(node.op, ast.USub):
            raise self.error(node, "only minus and not are supported")
        if isinstance(x, int | float):
            return -x
        return passing.boxed(unary(Op.NEG), [self.state, x], {})

    def _compare(self, node: ast.Compare) -> bool:
        left, right = self.value(node.left), self.value(node.comparators[0])
        if isinstance(right, RowVar | DataVar):
            kind = right.domain if isinstance(right, DataVar) else right.data_domain
            right = [name for domain, name in self.state.data if domain is kind]
        test = _COMPARISONS.get(type(node.ops[0]))
        if test is None or len(node.ops) > 1:
            raise self.error(node, "this comparison is not supported")
        if isinstance(left, Sym) or isinstance(right, Sym):
            if isinstance(node.ops[0], ast.Is | ast.IsNot):
                return bool(test(left, right))
            raise self.error(node, "a comparison of tensor values is not supported")
        return bool(test(left, right))

    def _bool(self, node: ast.BoolOp) -> Any:
        values = [self.value(v) for v in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)

    def _conditional(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.value(node.test) else node.orelse)

    def _tuple(self, node: ast.Tuple | ast.List) -> tuple[Any, ...]:
        return tuple(self.items(node.elts))

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        keys = [None if k is None else self.value(k) for k in node.keys]
        if None in keys:
            raise self.error(node, "** in a dict is not supported")
        return dict(zip(keys, map(self.value, node.values), strict=True))

    def _lambda(self, node: ast.Lambda) -> Closure:
        return Closure(self, node)

    def items(self, nodes: list[ast.expr]) -> list[Any]:
        """Values of a list of expressions, `*these` unpacked."""
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found.extend(_unpack(self.value(node.value)))
            else:
                found.append(self.value(node))
        return found

    def _subscript(self, node: ast.Subscript) -> Any:
        owner, key = self.value(node.value), self.value(node.slice)
        if isinstance(owner, EdgeIndex) and key in (0, 1):
            return IndexVar(Index.DST if key else Index.SRC)
        if isinstance(key, str) and isinstance(owner, RowVar | DataVar):
            return passing.data(self.state, owner, key)
        if isinstance(key, IndexVar):
            return select(self.state, owner, key)
        if isinstance(owner, nn.ModuleList | nn.ModuleDict):
            guards = self.state.guards
            guards.attribute(owner, "_modules", owner._modules)
            return owner[key]
        if isinstance(owner, tuple | list | Mapping):
            # All of it is compared where it was read: see [Note: guards].
            return owner[key]
        raise self.error(node, "expected data['name'], x[src] or W[e.etype]")

    def _attribute(self, node: ast.Attribute) -> Any:
        owner = self.value(node.value)
        if isinstance(owner, RowVar):
            return self._row_attribute(node, owner)
        if isinstance(owner, GraphVar):
            if node.attr in _DATA:
                return DataVar(_DATA[node.attr])
            return BoundMethod(owner, node.attr)
        if isinstance(owner, passing.Batch):
            found = owner.attribute(node.attr)
            if found is None:
                raise self.error(node, f"{node.attr} of a batch is not supported")
            return found
        if isinstance(owner, Sym | Param | DataVar | passing.Boxed):
            return BoundMethod(owner, node.attr)
        value = getattr(owner, node.attr, None)
        if isinstance(value, Tensor):
            return self.module_tensor(node, owner, node.attr)
        if not hasattr(owner, node.attr):
            raise self.error(node, f"{type(owner).__name__} has no {node.attr}")
        if not self._is_argument(owner):
            self.state.guards.attribute(owner, node.attr, value)
        return value

    def _is_argument(self, owner: Any) -> bool:
        """What a namespace holds that is passed is part of the program's key."""
        passed = any(owner is value for value in self.state.order.values())
        return passed and isinstance(owner, SimpleNamespace)

    def size(self, owner: Param, axis: int) -> int:
        """The size of an argument's tensor, which then is part of the program."""
        self.state.guards.size(owner.name, axis, owner.shape[axis])
        return owner.shape[axis]

    def module_tensor(self, node: ast.AST, owner: Any, attr: str) -> Param:
        """A module's parameter as an argument named by its path."""
        tensor = getattr(owner, attr)
        for name, value in self.state.order.items():
            if isinstance(value, Param) and self.state.tensors.get(name) is tensor:
                if not self._is_argument(owner):
                    self.state.guards.tensor(owner, attr, name)
                return value
        raise self.error(node, f"{attr} is no parameter or buffer of the layer")

    def _row_attribute(self, node: ast.Attribute, owner: RowVar) -> Any:
        if owner.domain is Domain.EDGE and owner.via is None:
            found = _EDGE_ATTRIBUTES.get(node.attr)
            if found is not None:
                return found
        if node.attr == "ntype" and owner.data_domain is Domain.NODE:
            if owner.via is not None:
                raise self.error(node, "expected n.ntype of a node loop")
            return IndexVar(Index.NTYPE)
        if node.attr in ("incoming_edges", "outgoing_edges"):
            return BoundMethod(owner, node.attr)
        return passing.data(self.state, owner, node.attr)

    def _call(self, node: ast.Call) -> Any:
        return call(self, node)

    def invoke(self, function: Any, args: list[Any]) -> Any:
        """The value of a function of the layer's own for symbols."""
        return inline(self, function, args, {})

    def spawn(self, function: Callable[..., Any]) -> "Interpreter":
        """A reader for a function that this one calls."""
        return Interpreter(self.state, function)


_DATA = {
    "ndata": Domain.NODE,
    "srcdata": Domain.NODE,
    "dstdata": Domain.NODE,
    "edata": Domain.EDGE,
}
_EDGE_ATTRIBUTES = {
    "src": RowVar(Domain.EDGE, Index.SRC),
    "dst": RowVar(Domain.EDGE, Index.DST),
    "etype": IndexVar(Index.ETYPE),
}
_BUILTINS: dict[str, Any] = {
    "range": range,
    "len": len,
    "int": int,
    "float": float,
    "isinstance": isinstance,
    "True": True,
    "False": False,
    "None": None,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Gt: lambda a, b: a > b,
    ast.Lt: lambda a, b: a < b,
    ast.GtE: lambda a, b: a >= b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.LtE: lambda a, b: a <= b,
}


def _load(target: ast.expr) -> ast.expr:
    """The same place, read instead of written."""
    copy = ast.parse(ast.unparse(target), mode="eval").body
    return ast.copy_location(copy, target)


def _unpack(value: Any) -> tuple[Any, ...]:
    if isinstance(value, EdgeIndex):
        return (IndexVar(Index.SRC), IndexVar(Index.DST))
    if isinstance(value, tuple | list):
        return tuple(value)
    raise FrontendError(f"cannot unpack {type(value).__name__}")


_STATEMENTS: dict[type[ast.stmt], Callable[[Interpreter, Any], None]] = {
    ast.Expr: Interpreter._expression,
    ast.Return: Interpreter._return,
    ast.Assign: Interpreter._assign,
    ast.AnnAssign: Interpreter._annotated,
    ast.AugAssign: Interpreter._augmented,
    ast.If: Interpreter._if,
    ast.For: Interpreter._for,
    ast.Pass: Interpreter._pass,
    ast.With: Interpreter._with,
    ast.FunctionDef: Interpreter._define,
}
_EXPRESSIONS: dict[type[ast.expr], Callable[[Interpreter, Any], Any]] = {
    ast.Constant: Interpreter._constant,
    ast.Name: Interpreter._name,
    ast.BinOp: Interpreter._binary,
    ast.UnaryOp: Interpreter._unary,
    ast.Compare: Interpreter._compare,
    ast.BoolOp: Interpreter._bool,
    ast.IfExp: Interpreter._conditional,
    ast.Tuple: Interpreter._tuple,
    ast.List: Interpreter._tuple,
    ast.Dict: Interpreter._dict,
    ast.Lambda: Interpreter._lambda,
    ast.Subscript: Interpreter._subscript,
    ast.Attribute: Interpreter._attribute,
    ast.Call: Interpreter._call,
}
__all__ = ["Interpreter", "UnsupportedPythonError"]

"""User functions run on symbols, so that what they do becomes one compiled program.

[Note: traced functions] A message, reduce or apply function is called with symbols in
place of features, in every call: whatever the function looks at is up to date, and no
guards are needed. What it does to the symbols is written down in the compiler's IR. A
function that does something unknown raises `UntraceableError` inside, and the call goes
on with real tensors (see `hector.message.eager`); the graph counts those calls.
"""

import ast
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hector.frontend import functions as rules
from hector.frontend.values import FrontendError, Param, State, Sym
from hector.ir.builder import Builder, IRTypeError
from hector.ir.node import Node, Op, Program
from hector.ir.types import Domain, Index
from hector.message.functions import (
    Combine,
    MessageFunction,
    ReduceFunction,
    Reducer,
    Side,
)
from hector.passes.canonicalize import softmax_of_edges


class UntraceableError(Exception):
    """Say that a user function did what has no meaning in the IR."""


Shapes = Callable[[Side, str], tuple[int, ...]]
"""The shape of a row of a feature."""
Names = Callable[[Side], Collection[str]]
"""The features that there are."""


class Trace:
    """Build one program: its inputs, and the tensors that functions bring."""

    def __init__(
        self,
        shapes: Shapes,
        names: Names = lambda side: (),
        two_sided: bool = False,
    ) -> None:
        """`two_sided`: sources' features are others than the destinations'."""
        self.state = State(Builder(), num_nodes=-1)
        self.shapes, self.names, self.two_sided = shapes, names, two_sided
        self.captured: dict[str, tuple[Tensor, int]] = {}
        """Tensors by name, each with how many leading axes of size 1 are dropped."""
        self.reads: list[tuple[Side, str, tuple[int, ...]]] = []
        """Features and the shapes of their rows."""
        self._inputs: dict[tuple[str, str], Sym] = {}

    @property
    def builder(self) -> Builder:
        return self.state.builder

    def feature(self, side: Side, name: str) -> "Rows":
        """Return a node or edge feature as edges see it."""
        letter = "e" if side is Side.EDGE else "n"
        if side is Side.SOURCE and self.two_sided:
            letter = "s"
        sym = self._input(letter, name, self._shape(side, name))
        if side is not Side.EDGE:
            index = Index.SRC if side is Side.SOURCE else Index.DST
            sym = Sym(self.builder.read(sym.node, index, Domain.EDGE), sym.rank)
        return Rows(self, sym)

    def node_feature(self, name: str) -> "Rows":
        """Return a feature of the nodes themselves."""
        shape = self._shape(Side.DESTINATION, name)
        return Rows(self, self._input("n", name, shape))

    def _shape(self, side: Side, name: str) -> tuple[int, ...]:
        shape = self.shapes(side, name)
        self.reads.append((side, name, shape))
        return shape

    def _input(self, letter: str, name: str, shape: tuple[int, ...]) -> Sym:
        key = (letter, name)
        if key not in self._inputs:
            if len(shape) > 2:
                raise UntraceableError(f"rows of {name} have shape {list(shape)}")
            domain = Domain.EDGE if letter == "e" else Domain.NODE
            param = Param(f"{letter}:{name}", (-1, *shape))
            self._inputs[key] = self.state.rows_of(param, domain)
        return self._inputs[key]

    def parameter(self, tensor: Tensor, rank: int) -> Param:
        """Return a tensor that a function brought as an operand of rows of `rank`."""
        shape, dropped = tuple(tensor.shape), 0
        while len(shape) > max(rank - 1, 0) and shape[0] == 1:
            shape, dropped = shape[1:], dropped + 1
        if len(shape) > rank - 1 or not tensor.is_floating_point():
            raise UntraceableError(f"a tensor of shape {list(shape)} with rows")
        return self.matrix(tensor, dropped)

    def matrix(self, tensor: Tensor, dropped: int = 0) -> Param:
        """Return a tensor as it is, but for leading axes of size 1."""
        shape = tuple(tensor.shape)[dropped:]
        for name, (known, axes) in self.captured.items():
            if known is tensor and axes == dropped:
                return Param(name, shape)
        name = f"t:{len(self.captured)}"
        self.captured[name] = (tensor, dropped)
        return Param(name, shape)

    def program(self, results: Sequence[Sym]) -> Program:
        named = tuple((f"out{i}", s.node) for i, s in enumerate(results))
        return Program(outputs=named)


class Rows:
    """Stand for a value with a row an edge or a node while a user function is traced.

    In a mailbox (`boxed`) it stands for [nodes, messages, ...], otherwise for
    [rows, ...].
    """

    def __init__(self, trace: Trace, sym: Sym, boxed: bool = False) -> None:
        self.trace, self.sym, self.boxed = trace, sym, boxed

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        # `relu_` would have to change what others hold; `__mul__` is mul.
        found = _FUNCTIONS.get(name.strip("_") if name.startswith("__") else name)
        if found is None:
            raise UntraceableError(f"torch's {name} is not known to the compiler")
        try:
            return found(*args, **(kwargs or {}))
        except TypeError as error:
            raise UntraceableError(f"arguments of {name}: {error}") from error

    def __getattr__(self, name: str) -> Any:
        found = _METHODS.get(name)
        if found is None:
            raise UntraceableError(f"{name} of a traced value")
        return functools.partial(self._call, name, found)

    def _call(self, name: str, found: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        try:
            return found(self, *args, **kw)
        except TypeError as error:
            raise UntraceableError(f"arguments of {name}: {error}") from error

    def __add__(self, other: Any) -> "Rows":
        return _binary(ast.Add(), self, other)

    def __radd__(self, other: Any) -> "Rows":
        return _binary(ast.Add(), other, self)

    def __sub__(self, other: Any) -> "Rows":
        return _binary(ast.Sub(), self, other)

    def __rsub__(self, other: Any) -> "Rows":
        return _binary(ast.Sub(), other, self)

    def __mul__(self, other: Any) -> "Rows":
        return _binary(ast.Mult(), self, other)

    def __rmul__(self, other: Any) -> "Rows":
        return _binary(ast.Mult(), other, self)

    def __truediv__(self, other: Any) -> "Rows":
        return _binary(ast.Div(), self, other)

    def __rtruediv__(self, other: Any) -> "Rows":
        return _binary(ast.Div(), other, self)

    def __matmul__(self, other: Any) -> "Rows":
        return _matmul(self, other)

    def __pow__(self, power: Any) -> "Rows":
        return _power(self, power)

    def __neg__(self) -> "Rows":
        return _unary(Op.NEG)(self)

    def __bool__(self) -> bool:
        raise UntraceableError("a decision that depends on features")

    def _unknown(self, *_: Any) -> Any:
        raise UntraceableError("an operator that the compiler does not know")

    # What Python would answer by itself, or refuse with another error.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __rpow__ = __rmatmul__ = __mod__ = __rmod__ = _unknown
    __floordiv__ = __rfloordiv__ = __abs__ = __invert__ = __float__ = __int__ = _unknown
    __hash__ = object.__hash__

    def __getitem__(self, key: Any) -> Any:
        raise UntraceableError("an index into a traced value")

    def __iter__(self) -> Any:
        raise UntraceableError("a loop over a traced value")

    def __len__(self) -> int:
        raise UntraceableError("the length of a traced value")

    def reduced(self, node: Node, rank: int | None = None) -> "Rows":
        """Return another value of the same trace, one row a node."""
        return Rows(self.trace, Sym(node, rank or self.sym.rank))


def _with(x: Rows, sym: Sym) -> Rows:
    return Rows(x.trace, sym, x.boxed)


def _unary(op: Op) -> Callable[..., Rows]:
    def apply(x: Rows) -> Rows:
        return _with(x, rules.unary(op)(x.trace.state, x.sym))

    return apply


def _binary(op: ast.operator, a: Any, b: Any) -> Rows:
    like = a if isinstance(a, Rows) else b
    operands: list[Any] = []
    for x in (a, b):
        if isinstance(x, Rows):
            if x.boxed is not like.boxed or x.sym.rank != like.sym.rank:
                raise UntraceableError("rows of different ranks")
            operands.append(x.sym)
        elif isinstance(x, Tensor):
            operands.append(like.trace.parameter(x, like.sym.rank))
        elif isinstance(x, int | float) and not isinstance(x, bool):
            operands.append(x)
        else:
            raise UntraceableError(f"{type(x).__name__} with a traced value")
    made = rules.binary(like.trace.state, op, *operands)
    return _with(like, Sym(made.node, like.sym.rank))


def _maximum(a: Any, b: Any) -> Rows:
    if not isinstance(a, Rows) or not isinstance(b, Rows) or a.sym.rank != b.sym.rank:
        raise UntraceableError("maximum of other than two traced values")
    node = a.trace.builder.binary(Op.MAXIMUM, a.sym.node, b.sym.node)
    return _with(a, Sym(node, a.sym.rank))


def _check_numbers(*values: Any) -> None:
    """Refuse tensors, which would be read once, when the trace is made."""
    for value in values:
        if not isinstance(value, Real):
            raise UntraceableError(f"{type(value).__name__} instead of a number")


def _power(x: Rows, power: Any) -> Rows:
    _check_numbers(power)
    if power == 2:
        return x * x
    if power == 0.5:
        return _unary(Op.SQRT)(x)
    raise UntraceableError(f"power {power}")


def _leaky_relu(x: Rows, negative_slope: float = 0.01, inplace: bool = False) -> Rows:
    _new(inplace)
    _check_numbers(negative_slope)
    return _with(x, rules.leaky_relu(x.trace.state, x.sym, negative_slope))


def _gelu(x: Rows, approximate: str = "none") -> Rows:
    return _with(x, rules.gelu(x.trace.state, x.sym, approximate))


def _elu(x: Rows, alpha: float = 1.0, inplace: bool = False) -> Rows:
    _new(inplace)
    _check_numbers(alpha)
    if alpha != 1.0:
        raise UntraceableError("elu with another alpha")
    return _unary(Op.ELU)(x)


def _new(inplace: bool) -> None:
    if inplace:
        raise UntraceableError("a change in place")


def _relu(x: Rows, inplace: bool = False) -> Rows:
    _new(inplace)
    return _unary(Op.RELU)(x)


def _linear(x: Rows, weight: Tensor, bias: Tensor | None = None) -> Rows:
    """Apply `nn.Linear` to edge rows; on nodes PyTorch's own product is faster."""
    if x.boxed or x.sym.rank != 2 or x.sym.node.domain is not Domain.EDGE:
        raise UntraceableError("a product other than of edge rows [width]")
    w = x.trace.matrix(weight)
    b = None if bias is None else x.trace.matrix(bias)
    return _with(x, rules.transposed_linear(x.trace.state, x.sym, w, b))


def _matmul(x: Any, w: Any) -> Rows:
    if not isinstance(x, Rows) or not isinstance(w, Tensor) or w.dim() != 2:
        raise UntraceableError("a product other than rows @ matrix")
    if x.boxed or x.sym.rank != 2 or x.sym.node.domain is not Domain.EDGE:
        raise UntraceableError("a product other than of edge rows [width]")
    return _with(x, rules.linear(x.trace.state, x.sym, x.trace.matrix(w)))


def _cat(parts: Sequence[Any], dim: int = 0) -> Rows:
    if not all(isinstance(p, Rows) for p in parts):
        raise UntraceableError("cat of traced and other values")
    first: Rows = parts[0]
    rank = first.sym.rank + first.boxed
    if dim not in (-1, rank - 1) or first.sym.rank == 1:
        raise UntraceableError(f"cat along axis {dim}")
    out = first.sym.node
    for p in parts[1:]:
        if p.sym.rank != first.sym.rank or p.sym.node.shape[0] != out.shape[0]:
            raise UntraceableError("cat of rows of different ranks")
        out = first.trace.builder.concat(out, p.sym.node)
    return _with(first, Sym(out, first.sym.rank))


def _axis(x: Rows, dim: Any) -> int:
    """Return 0 for the messages of a mailbox, else the axis inside a row, from 1."""
    if isinstance(dim, tuple | list) and len(dim) == 1:
        (dim,) = dim
    if not isinstance(dim, int):
        raise UntraceableError("a reduction over all axes")
    rank = x.sym.rank + x.boxed
    dim = dim if dim >= 0 else rank + dim
    inner = int(dim - 1 if x.boxed else dim)
    if inner < 0 or (inner == 0 and not x.boxed):
        raise UntraceableError("a reduction over rows")
    return inner


def _sum(x: Rows, dim: Any = None, keepdim: bool = False) -> Rows:
    inner = _axis(x, dim)
    if not inner:
        return x.reduced(reduce_node(x.trace.builder, x.sym.node, Reducer.SUM))
    return _with(x, rules.total(x.trace.state, x.sym, inner, keepdim))


def _mean(x: Rows, dim: Any = None, keepdim: bool = False) -> Rows:
    inner = _axis(x, dim)
    if not inner:
        return x.reduced(reduce_node(x.trace.builder, x.sym.node, Reducer.MEAN))
    return _with(x, rules.mean(x.trace.state, x.sym, inner, keepdim))


def _extreme(kind: Reducer) -> Callable[..., Rows]:
    def apply(x: Rows, dim: Any = None, keepdim: bool = False) -> Rows:
        if keepdim or _axis(x, dim):
            raise UntraceableError("an extreme over other than the messages")
        return x.reduced(reduce_node(x.trace.builder, x.sym.node, kind))

    return apply


def _extremes(name: str) -> Callable[..., Any]:
    def apply(x: Rows, *_: Any, **__: Any) -> Any:
        # One of equal messages gets the gradient, and which one PyTorch alone knows.
        raise UntraceableError(f"{name} with indices; a{name} is compiled")

    return apply


def _softmax(x: Rows, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Rows:
    if dtype is not None or _axis(x, dim):
        raise UntraceableError("a softmax over other than the messages")
    return softmax_rows(x)


def softmax_rows(x: Rows) -> Rows:
    """Return the softmax of edge rows over the edges with the same destination."""
    node = softmax_of_edges(x.trace.builder, x.sym.node, Index.DST)
    return _with(x, Sym(node, x.sym.rank))


def _unsqueeze(x: Rows, dim: int) -> Rows:
    _check_numbers(dim)
    rank = x.sym.rank + x.boxed
    dim = dim if dim >= 0 else rank + 1 + dim
    inner = dim - x.boxed
    if inner < 1:
        raise UntraceableError("a new axis before the rows")
    return _with(x, rules.unsqueeze(x.trace.state, x.sym, inner))


def _squeeze(x: Rows, dim: int | None = None) -> Rows:
    if dim is None:
        raise UntraceableError("squeeze of all axes")
    _check_numbers(dim)
    dim = dim if dim >= 0 else x.sym.rank + x.boxed + dim
    inner = dim - x.boxed
    if inner < 1:
        raise UntraceableError("squeeze of the rows")
    return _with(x, rules.squeeze(x.trace.state, x.sym, inner))


def _view(x: Rows, *shape: Any) -> Rows:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    _check_numbers(*sizes)
    if x.boxed or not sizes or sizes[0] != -1:
        raise UntraceableError(f"a view as {list(sizes)}; rows are counted by -1")
    if math.prod(sizes[1:]) != x.sym.node.type.width:
        raise UntraceableError(f"a view as {list(sizes)}")
    return _with(x, rules.view(x.trace.state, x.sym, *sizes))


def _flatten(x: Rows, start_dim: int = 0, end_dim: int = -1) -> Rows:
    _check_numbers(start_dim, end_dim)
    if x.boxed or start_dim != 1 or end_dim != -1:
        raise UntraceableError("flatten of other than rows")
    node = x.trace.builder.reshape(x.sym.node, (1, x.sym.node.type.width))
    return _with(x, Sym(node, 2))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": _unary(Op.EXP),
    "log": _unary(Op.LOG),
    "sqrt": _unary(Op.SQRT),
    "sigmoid": _unary(Op.SIGMOID),
    "tanh": _unary(Op.TANH),
    "cos": _unary(Op.COS),
    "sin": _unary(Op.SIN),
    "neg": _unary(Op.NEG),
    "relu": _relu,
    "elu": _elu,
    "gelu": _gelu,
    "leaky_relu": _leaky_relu,
    "square": lambda x: x * x,
    "pow": _power,
    "add": lambda a, b: _binary(ast.Add(), a, b),
    "sub": lambda a, b: _binary(ast.Sub(), a, b),
    "mul": lambda a, b: _binary(ast.Mult(), a, b),
    "div": lambda a, b: _binary(ast.Div(), a, b),
    "rsub": lambda a, b: _binary(ast.Sub(), b, a),
    "truediv": lambda a, b: _binary(ast.Div(), a, b),
    "true_divide": lambda a, b: _binary(ast.Div(), a, b),
    "radd": lambda a, b: _binary(ast.Add(), b, a),
    "rmul": lambda a, b: _binary(ast.Mult(), b, a),
    "rdiv": lambda a, b: _binary(ast.Div(), b, a),
    "rtruediv": lambda a, b: _binary(ast.Div(), b, a),
    "maximum": _maximum,
    "linear": _linear,
    "matmul": _matmul,
    "cat": _cat,
    "sum": _sum,
    "mean": _mean,
    "amax": _extreme(Reducer.MAX),
    "amin": _extreme(Reducer.MIN),
    "max": _extremes("max"),
    "min": _extremes("min"),
    "softmax": _softmax,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "reshape": _view,
    "flatten": _flatten,
}
"""By the names of PyTorch's functions. Their operators on tensors arrive here too."""

_METHODS: dict[str, Callable[..., Any]] = {
    name: _FUNCTIONS[name]
    for name in (
        *("exp", "log", "sqrt", "sigmoid", "tanh", "cos", "sin", "neg", "relu"),
        *("square", "pow", "add", "sub", "mul", "div", "sum", "mean", "amax", "amin"),
        *("max", "min", "softmax", "unsqueeze", "squeeze", "reshape", "flatten"),
    )
}
_METHODS["view"] = _view
_METHODS["contiguous"] = lambda x: x


# Built-in functions.

_COMBINE: dict[Combine, Op] = {
    Combine.ADD: Op.ADD,
    Combine.SUB: Op.SUB,
    Combine.MUL: Op.MUL,
    Combine.DIV: Op.DIV,
}


def message_rows(trace: Trace, f: MessageFunction) -> Rows:
    """Return the messages of a built-in function. As in DGL, missing leading axes of a
    row count as 1."""
    left = trace.feature(*f.left)
    right = None if f.right is None else trace.feature(*f.right).sym
    return Rows(trace, combined(trace.builder, f, left.sym, right))


def combined(b: Builder, f: MessageFunction, left: Sym, right: Sym | None) -> Sym:
    """Return what a built-in message function makes of the rows that it reads."""
    if f.right is None or right is None:
        return left
    rank = max(left.rank, right.rank)
    try:
        if f.combine is Combine.DOT:
            return Sym(b.sum_width(b.mul(left.node, right.node)), rank)
        return Sym(b.binary(_COMBINE[f.combine], left.node, right.node), rank)
    except IRTypeError as error:
        raise ValueError(
            f"expected features {f.left[1]!r} and {f.right[1]!r} with rows of equal or "
            f"broadcastable shape: {error}"
        ) from error


FUSED = frozenset((Reducer.SUM, Reducer.MEAN, Reducer.MAX, Reducer.MIN))
FUSED |= {Reducer.STD, Reducer.SOFTMAX}
"""Reducers that are sums and maxima: a compiled program has no messages in memory."""


def reduce_rows(x: Rows, f: ReduceFunction) -> Rows:
    """Return node rows of a built-in reducer of `FUSED`."""
    node = reduce_node(x.trace.builder, x.sym.node, f.reducer, f.temperature)
    return Rows(x.trace, Sym(node, x.sym.rank))


def reduce_node(
    b: Builder, x: Node, reducer: Reducer, temperature: float = 1.0
) -> Node:
    """Return node rows of edge rows, by a reducer of `FUSED`."""
    match reducer:
        case Reducer.SUM:
            return b.agg(x, Index.DST)
        case Reducer.MEAN:
            return b.div(b.agg(x, Index.DST), _count(b))
        case Reducer.MAX:
            return b.agg(x, Index.DST, "max")
        case Reducer.MIN:
            # Of nodes without messages the maximum is 0, and -0 is made 0.
            lowest = b.agg(b.unary(Op.NEG, x), Index.DST, "max")
            return b.sub(b.const(0.0, Domain.NODE), lowest)
        case Reducer.STD:
            mean = b.div(b.agg(x, Index.DST), _count(b))
            off = b.sub(x, b.read(mean, Index.DST, Domain.EDGE))
            var = b.div(b.agg(b.mul(off, off), Index.DST), _count(b))
            # The root has no slope at 0; there the gradient is 0, as torch.std's.
            none = b.binary(Op.EQ, var, b.const(0.0, Domain.NODE))
            return b.sub(b.unary(Op.SQRT, b.add(var, none)), none)
        case Reducer.SOFTMAX:
            weight = softmax_of_edges(b, b.mul(x, b.const(temperature)), Index.DST)
            return b.agg(b.mul(weight, x), Index.DST)
    raise UntraceableError(f"{reducer.value} is no sum of messages")


def _count(b: Builder) -> Node:
    return b.binary(Op.MAXIMUM, b.graph("in_degree", Domain.NODE), b.const(1.0))


TRACE_ERRORS = (UntraceableError, FrontendError, IRTypeError)
"""What says that a user function is not for the compiler."""


def is_float(t: Tensor) -> bool:
    return t.is_floating_point() and t.layout is torch.strided

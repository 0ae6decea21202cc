"""Built-in message and reduce functions, with DGL's names and semantics.

A message function reads node features by endpoint (`u` is the source, `v` the
destination) and edge features (`e`); a reduce function makes one row a destination of
the messages that it receives. Both are data: what runs is compiled from them.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from torch import Tensor, nn

__all__ = [
    "Combine",
    "MessageFunction",
    "PureCall",
    "ReduceFunction",
    "Reducer",
    "Side",
    "copy_e",
    "copy_u",
    "lstm",
    "max",
    "mean",
    "median",
    "min",
    "mul",
    "prod",
    "pure",
    "softmax",
    "std",
    "sum",
]


class Side(Enum):
    """Name whose feature an operand of a message is."""

    __hash__ = object.__hash__

    SOURCE = "u"
    DESTINATION = "v"
    EDGE = "e"


class Combine(Enum):
    """Name how a message is made of its two operands."""

    __hash__ = object.__hash__

    COPY = "copy"
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    DOT = "dot"
    """Products summed over the last axis, which stays with size 1."""


class Reducer(Enum):
    """Name how the messages of one destination become one row. Nodes without messages
    get zeros."""

    __hash__ = object.__hash__

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    STD = "std"
    """Root of the mean squared deviation, not corrected for the sample's size."""
    SOFTMAX = "softmax"
    """Messages weighted by their softmax, element by element."""
    MUL = "mul"
    MEDIAN = "median"
    """The lower one of two middle messages, as `torch.median`."""
    LSTM = "lstm"
    """The last state of an LSTM that reads messages in the order of the edges."""


@dataclass(frozen=True)
class MessageFunction:
    """Combine `left` with `right`, a (`Side`, field) each; `right` is None for a
    copy."""

    combine: Combine
    left: tuple[Side, str]
    right: tuple[Side, str] | None
    out: str

    @property
    def sides(self) -> tuple[tuple[Side, str], ...]:
        """Return both operands, or the one of a copy."""
        return (self.left,) if self.right is None else (self.left, self.right)


@dataclass(frozen=True)
class ReduceFunction:
    """Reduce message field `message` to node field `out`."""

    reducer: Reducer
    message: str
    out: str
    temperature: float = 1.0
    """Of SOFTMAX."""
    module: nn.LSTM | None = None
    """Of LSTM."""


@dataclass(frozen=True, eq=False)
class PureCall:
    """Bind a user function to the values that it reads besides its batch."""

    function: Callable[..., Any]
    values: tuple[Any, ...]

    def __call__(self, batch: Any) -> Any:
        return self.function(batch, *self.values)

    @property
    def facts(self) -> Hashable:
        """Return what its program depends on.

        Raises:
            ValueError: a value is neither a tensor nor hashable.
        """
        found = (self.function, *map(_fact, self.values))
        try:
            hash(found)
        except TypeError as error:
            raise ValueError(
                f"expected tensors and hashable values for a pure function, got "
                f"{[type(v).__name__ for v in self.values]}: {error}"
            ) from error
        return found


def _fact(value: Any) -> Hashable:
    """Return what a trace sees of a value. True, 1 and 1.0 are equal, as are zeros of
    either sign; what is computed with them is not."""
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, tuple):
        return tuple(map(_fact, value))
    if isinstance(value, bool | int | float):
        return (type(value), repr(value))
    found: Hashable = value
    return found


def pure(function: Callable[..., Any]) -> Callable[..., PureCall]:
    """Declare that a function of a batch and more values depends on nothing else.

    It is then traced once for each shape and not in every call, which is most of the
    host's time of a small graph: `g.update_all(attend(self.slope), ...)` for `attend`
    with arguments (edges, slope). Values are tensors, which get gradients, or hashable.

    The function must not read tensors as numbers, as by `float(t)`, `t.item()` or
    `if t > 0:`. What they hold is no part of what a trace is found by, so later calls
    would have the first call's numbers: pass a number instead.
    """

    @functools.wraps(function)
    def bind(*values: Any) -> PureCall:
        return PureCall(function, values)

    return bind


F = TypeVar("F", bound=Callable[..., Any])


def _one_object(make: F) -> F:
    """Return one object for equal arguments: it is compared in every call."""
    return cast("F", functools.lru_cache(maxsize=1024)(make))


@_one_object
def copy_u(u: str, out: str) -> MessageFunction:
    """Return the message function that copies the source's feature `u`."""
    return MessageFunction(Combine.COPY, (Side.SOURCE, u), None, out)


@_one_object
def copy_e(e: str, out: str) -> MessageFunction:
    """Return the message function that copies the edge's feature `e`."""
    return MessageFunction(Combine.COPY, (Side.EDGE, e), None, out)


def _binary(left: Side, combine: Combine, right: Side) -> Any:
    @_one_object
    def make(lhs_field: str, rhs_field: str, out: str) -> MessageFunction:
        return MessageFunction(combine, (left, lhs_field), (right, rhs_field), out)

    make.__name__ = make.__qualname__ = f"{left.value}_{combine.value}_{right.value}"
    make.__doc__ = (
        f"`{combine.value}` of the features of {left.value} and {right.value}."
    )
    return make


for _left in Side:
    for _right in Side:
        for _combine in Combine:
            if _left is not _right and _combine is not Combine.COPY:
                _made = _binary(_left, _combine, _right)
                globals()[_made.__name__] = _made
                __all__.append(_made.__name__)


def _reducer(kind: Reducer) -> Any:
    @_one_object
    def make(msg: str, out: str) -> ReduceFunction:
        return ReduceFunction(kind, msg, out)

    make.__name__ = make.__qualname__ = kind.value
    make.__doc__ = f"See `Reducer.{kind.name}`."
    return make


sum = _reducer(Reducer.SUM)
mean = _reducer(Reducer.MEAN)
max = _reducer(Reducer.MAX)
min = _reducer(Reducer.MIN)
std = _reducer(Reducer.STD)
mul = prod = _reducer(Reducer.MUL)
median = _reducer(Reducer.MEDIAN)


@_one_object
def softmax(msg: str, out: str, temperature: float = 1.0) -> ReduceFunction:
    """Return the reducer that sums messages m weighted by softmax(temperature * m).

    Raises:
        ValueError: a temperature that is no number; one to be trained belongs into a
            reduce function.
    """
    if not isinstance(temperature, int | float):
        raise ValueError(
            f"expected a number as temperature, got {type(temperature).__name__}: to "
            "train it, write a reduce function, (softmax(t * m, 1) * m).sum(1)"
        )
    return ReduceFunction(Reducer.SOFTMAX, msg, out, temperature=temperature)


def lstm(msg: str, out: str, module: nn.LSTM) -> ReduceFunction:
    """Return the reducer that gives the last hidden state of `module` over the messages
    [width] of a node."""
    return ReduceFunction(Reducer.LSTM, msg, out, module=module)

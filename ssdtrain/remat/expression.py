"""A saved tensor as a function of other saved tensors."""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Longest chain of recipes from one saved tensor down to stored bytes. NewGELU of a
# dropped-out, cast activation needs 9; more costs more time than bytes are worth.
MAX_CHAIN = 12
# Most nodes that are looked at for one tensor: a tree of sums has many more than a
# chain, and would cost more than it saves.
MAX_NODES = 24


class Layout(NamedTuple):
    """What a tensor looks like, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """The layout of a strided tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the order of their indices, without gaps."""
        dense = 1
        for size, stride in zip(
            reversed(self.shape), reversed(self.stride), strict=True
        ):
            if stride != dense:
                return False
            if size > 1:
                dense *= size
        return True

    @property
    def shape_class(self) -> Hashable:
        """Layouts of one class run the same kernels (vector width, loop, reduction)."""
        size = self.num_bytes
        last = self.shape[-1:], self.stride[-1:]
        dense = self.is_contiguous
        return self.dtype, len(self.shape), last, dense, size.bit_length(), size % 64


class Epsilon(NamedTuple):
    """A known epsilon."""

    value: float | None
    """None: the dtype's own."""


class State(NamedTuple):
    """The state a random generator had before it drew."""

    state: Tensor
    """Of `get_state`, on the host."""

    @property
    def signature(self) -> Hashable:
        """All states are of one class."""
        return "random"


# Not frozen, here and below: several are made at every saved tensor, and that would
# cost more than all else they do.


@dataclass(kw_only=True, eq=False, slots=True)
class Held:
    """A tensor that somebody else keeps; its holder can bring it back."""

    holder: Any
    """Opaque here. The expression's life is the holder's life."""
    layout: Layout
    depth: int = 0
    """Recipes between this tensor and stored bytes."""
    parameter: nn.Parameter | None = None
    """Set when the tensor is a parameter."""
    stored_bytes: int = 0
    """Bytes that are stored for the expression's sake alone."""
    owner: object = None
    """Holds the tensor's bytes; all its handles have the same."""
    is_noted: bool = False
    """Found by a note: who saved it may be on no gradient's path."""
    epsilon: Epsilon | None = None
    """Of the normalization that saved it: [Note: epsilon] in scene.py."""

    @property
    def signature(self) -> Hashable:
        """What admission may depend on."""
        return self.layout.shape_class


@dataclass(kw_only=True, eq=False, slots=True)
class Expression:
    """`function(*operands, **constants)`, a tensor."""

    recipe: str
    function: Callable[..., Tensor]
    operands: tuple["Operand", ...]
    constants: tuple[tuple[str, Hashable], ...]
    faster: tuple["Expression", ...] = ()
    """Others of the same tensor, best first. See [Note: faster kernels]."""
    is_compared_always: bool = False
    """Equal once says nothing of the next time: its own bytes are compared."""
    depth: int = field(init=False)
    """Length of the longest chain below, this one included."""
    held: tuple[Held, ...] = field(init=False)
    """Every tensor it is made of, in the order `compute` takes them."""

    def __post_init__(self) -> None:
        deepest, held = 0, []
        for operand in self.operands:
            if isinstance(operand, Held):
                held.append(operand)
            elif isinstance(operand, Expression):
                held.extend(operand.held)
            else:
                continue
            if operand.depth > deepest:
                deepest = operand.depth
        self.depth, self.held = deepest + 1, tuple(held)

    @property
    def signature(self) -> Hashable:
        """Two expressions with one signature are admitted together."""
        parts = tuple(
            operand if isinstance(operand, int | float) else operand.signature
            for operand in self.operands
        )
        return self.recipe, self.function, self.constants, parts

    def without_holders(self) -> "Expression":
        """The same function of the same operands, whoever holds them."""
        return replace(
            self,
            operands=tuple(_without_holder(operand) for operand in self.operands),
            faster=(),
        )

    def compute(self, tensors: Iterator[Tensor]) -> Tensor:
        """The value, given the tensors of `held`."""
        values: list[Any] = []
        for operand in self.operands:
            if isinstance(operand, Held):
                values.append(next(tensors))
            elif isinstance(operand, Expression):
                values.append(operand.compute(tensors))
            else:
                values.append(operand)
        return self.function(*values, **dict(self.constants))


Operand = Held | Expression | State | int | float


def _without_holder(operand: Operand) -> Operand:
    if isinstance(operand, Held):
        return replace(operand, holder=None, parameter=None, owner=None)
    return operand.without_holders() if isinstance(operand, Expression) else operand


def evaluate(expression: Expression, tensors: list[Tensor]) -> Tensor:
    """Run an expression as the forward ran its operators: no graph, no autocast.

    Autocast is off because its casts are nodes of their own in the graph, and so
    recipes of their own.
    """
    device = tensors[0].device.type if tensors else "cpu"
    with torch.no_grad():
        if not torch.is_autocast_enabled(device):  # backward mostly runs without
            return expression.compute(iter(tensors))
        with torch.autocast(device, enabled=False):
            return expression.compute(iter(tensors))

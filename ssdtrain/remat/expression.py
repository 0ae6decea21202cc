"""A saved tensor as a function of other saved tensors."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Longest chain of recipes from one saved tensor down to stored bytes. NewGELU of a
# dropped-out, cast activation needs 9; more costs more time than bytes are worth.
MAX_CHAIN = 16
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

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a strided tensor looks so."""
        return (
            tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
        )

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
    """Of the normalization that saved it: [Note: epsilon] in frame.py."""

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
    exact: Hashable = None
    """What else its class depends on."""
    faster: tuple["Expression", ...] = ()
    """Others of the same tensor, best first. See [Note: faster kernels]."""
    needs_digest: bool = False
    """Its result is compared with a digest: [Note: unproved tensors] in node.py."""
    is_compared_always: bool = False
    """Equal once says nothing of the next time: its own bytes are compared."""
    depth: int = field(init=False)
    """Length of the longest chain below, this one included."""
    held: tuple[Held, ...] = field(init=False)
    """Every tensor it is made of, once, in the order `compute` takes them."""
    is_expensive: bool = False
    """Whether a product or an attention is among its functions."""
    _program: "_Program | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        deepest, held = 0, {}
        for operand in self.operands:
            if isinstance(operand, Held):
                held[id(operand)] = operand
            elif isinstance(operand, Expression):
                held.update((id(each), each) for each in operand.held)
                self.is_expensive = self.is_expensive or operand.is_expensive
            else:
                continue
            if operand.depth > deepest:
                deepest = operand.depth
        self.depth, self.held = deepest + 1, tuple(held.values())

    @property
    def signature(self) -> Hashable:
        """Two expressions with one signature are admitted together."""
        parts = tuple(
            operand if isinstance(operand, int | float) else operand.signature
            for operand in self.operands
        )
        return self.recipe, self.function, self.constants, self.exact, parts

    def without_holders(self) -> "Expression":
        """The same function of the same operands, whoever holds them."""
        return _without_holders(self, {})

    def compute(self, tensors: Sequence[Tensor]) -> Tensor:
        """The value, given the tensors of `held`. What several parts of it read is made
        once, and dropped when the last of them has read it."""
        if self._program is None:
            self._program = _program(self)
        values: list[Any] = [*tensors, *self._program.numbers]
        for step in self._program.steps:
            made = step.function(*[values[at] for at in step.reads], **step.constants)
            for at in step.last_reads:
                values[at] = None
            values.append(made)
        return values[-1]  # type: ignore[no-any-return]


class _Step(NamedTuple):
    """One function; its result is the next value."""

    function: Callable[..., Tensor]
    constants: dict[str, Any]
    reads: tuple[int, ...]
    """Numbers of values."""
    last_reads: tuple[int, ...]
    """Of these: what nothing after it reads."""


class _Program(NamedTuple):
    """An expression in the order in which it runs."""

    numbers: tuple[Any, ...]
    """Values after the tensors of `held`: Python numbers and random states."""
    steps: tuple[_Step, ...]


def _append(expression: Expression, order: list[Expression]) -> None:
    """Behind the expressions that it reads; each once."""
    for operand in expression.operands:
        if isinstance(operand, Expression):
            if not any(operand is before for before in order):
                _append(operand, order)
    order.append(expression)


def _program(root: Expression) -> _Program:
    at = {id(held): number for number, held in enumerate(root.held)}
    order: list[Expression] = []
    _append(root, order)
    numbers = [
        operand
        for each in order
        for operand in each.operands
        if not isinstance(operand, Held | Expression)
    ]
    first = len(root.held) + len(numbers)
    at.update((id(each), first + number) for number, each in enumerate(order))
    next_number = iter(range(len(root.held), first))
    reads = [
        tuple(
            at[id(operand)]
            if isinstance(operand, Held | Expression)
            else next(next_number)
            for operand in each.operands
        )
        for each in order
    ]
    last = {value: step for step, read in enumerate(reads) for value in read}
    steps = [
        _Step(
            each.function,
            dict(each.constants),
            read,
            tuple(value for value in set(read) if last[value] == step),
        )
        for step, (each, read) in enumerate(zip(order, reads, strict=True))
    ]
    return _Program(tuple(numbers), tuple(steps))


Operand = Held | Expression | State | int | float


def _without_holders(of: Expression, known: dict[int, Any]) -> Expression:
    operands: list[Operand] = []
    for operand in of.operands:
        if isinstance(operand, Held | Expression) and id(operand) not in known:
            if isinstance(operand, Held):
                bare: Operand = replace(
                    operand, holder=None, parameter=None, owner=None
                )
            else:
                bare = _without_holders(operand, known)
            known[id(operand)] = bare
        operands.append(known.get(id(operand), operand))
    return replace(of, operands=tuple(operands), faster=())


def evaluate(expression: Expression, tensors: list[Tensor]) -> Tensor:
    """Run an expression as the forward ran its operators: no graph, no autocast.

    Autocast is off because its casts are nodes of their own in the graph, and so
    recipes of their own.
    """
    device = tensors[0].device.type if tensors else "cpu"
    if not (torch.is_grad_enabled() or torch.is_autocast_enabled(device)):
        return expression.compute(tensors)  # so it is in most backwards
    with torch.no_grad(), without_autocast(device):
        return expression.compute(tensors)


@contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """A block without autocast. Not `torch.autocast`: where a program has set it on
    without a context, the end of that one would empty its cache of cast weights."""
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before)

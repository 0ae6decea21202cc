"""A saved tensor as a function of other saved tensors."""

import math
from collections import Counter
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


class GeneratorState(NamedTuple):
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
class TensorInput:
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
    is_compared_always: bool = False
    """Equal once says nothing of the next time: its own bytes are compared."""
    depth: int = field(init=False)
    """Length of the longest chain below, this one included."""
    inputs: tuple[TensorInput, ...] = field(init=False)
    """Every tensor it is made of, once, in the order `compute` takes them."""
    is_expensive: bool = False
    """Whether a product or an attention is among its functions."""
    _shared: dict[int, int] | None = field(init=False, default=None)
    """How often expressions are read that are read more than once, by id."""

    def __post_init__(self) -> None:
        deepest, inputs = 0, {}
        for operand in self.operands:
            if isinstance(operand, TensorInput):
                inputs[id(operand)] = operand
            elif isinstance(operand, Expression):
                inputs.update((id(each), each) for each in operand.inputs)
                self.is_expensive = self.is_expensive or operand.is_expensive
            else:
                continue
            if operand.depth > deepest:
                deepest = operand.depth
        self.depth, self.inputs = deepest + 1, tuple(inputs.values())

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
        """The value, given the tensors of `inputs`. What several parts of it read is
        made once, and dropped when the last of them has read it."""
        if self._shared is None:
            reads: Counter[int] = Counter()
            _count_reads(self, reads)
            self._shared = {at: number for at, number in reads.items() if number > 1}
        known = {id(one): each for one, each in zip(self.inputs, tensors, strict=True)}
        return _value_of(self, known, dict(self._shared))


def _count_reads(of: Expression, reads: Counter[int]) -> None:
    """How often each expression below is read, by id."""
    for operand in of.operands:
        if isinstance(operand, Expression):
            reads[id(operand)] += 1
            if reads[id(operand)] == 1:
                _count_reads(operand, reads)


def _value_of(of: Expression, known: dict[int, Tensor], left: dict[int, int]) -> Tensor:
    """Args: known: values by id. left: how often shared expressions are still read."""
    found = known.get(id(of))
    if found is None:
        operands: list[Any] = [
            _value_of(operand, known, left)
            if isinstance(operand, Expression)
            else known[id(operand)]
            if isinstance(operand, TensorInput)
            else operand
            for operand in of.operands
        ]
        constants: dict[str, Any] = dict(of.constants)
        found = of.function(*operands, **constants)
    if id(of) in left:
        left[id(of)] -= 1
        known[id(of)] = found
        if not left[id(of)]:
            del known[id(of)]
    return found


Operand = TensorInput | Expression | GeneratorState | int | float


def _without_holders(of: Expression, known: dict[int, Any]) -> Expression:
    operands: list[Operand] = []
    for operand in of.operands:
        if isinstance(operand, TensorInput | Expression) and id(operand) not in known:
            if isinstance(operand, TensorInput):
                bare: Operand = replace(
                    operand, holder=None, parameter=None, owner=None
                )
            else:
                bare = _without_holders(operand, known)
            known[id(operand)] = bare
        operands.append(known.get(id(operand), operand))
    return replace(of, operands=tuple(operands))


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

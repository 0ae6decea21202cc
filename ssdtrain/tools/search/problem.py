"""What is to be split: operators, tensors, and which of them are split the same way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.calls import OperatorCall
from ssdtrain.tools.search.placement import COPIED, Cut, Placement, Placements
from ssdtrain.tools.search.strategies import Shape, Strategy, whole

Chosen = tuple[Strategy, ...]
"""An operator's strategy on each axis."""


@dataclass(frozen=True)
class Extent:
    """Sizes of a tensor."""

    shape: Shape
    element_bytes: int = 4
    stride: Shape = ()
    """In elements."""

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True)
class Operation:
    """An operator of a step. Operands and results are numbers of tensors."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    sizes: Mapping[str, int]
    """Of the index variables that strategies split."""
    module: str = ""
    """Path of the module in whose forward it ran."""
    call: OperatorCall | None = None
    """None: made for a test."""
    is_elementwise: bool = False

    @property
    def unsplit(self) -> Strategy:
        """Every worker runs all of it."""
        return whole(len(self.operands), len(self.results))


@dataclass(frozen=True)
class Problem:
    """A step. Every tensor is to be cut on every axis, if a dimension allows it."""

    tensors: Mapping[int, Extent]
    operations: tuple[Operation, ...]
    ties: tuple[tuple[int, int], ...] = ()
    """Tensors that are placed alike: a weight and its gradient."""
    alike: Mapping[int, int] = field(default_factory=dict)
    """Operators that are split as another one is: by index, the other's index."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """Tensors of the model's parameters that are trained, by name."""

    @cached_property
    def group_of(self) -> Mapping[int, int]:
        """Representative of the tensors that are placed alike."""
        parent = {number: number for number in self.tensors}

        def find(number: int) -> int:
            while parent[number] != number:
                parent[number] = parent[parent[number]]
                number = parent[number]
            return number

        for one, two in self.ties:
            if self.tensors[one].shape != self.tensors[two].shape:
                raise ConfigError(
                    f"tensors {one} and {two} expect one shape to be placed alike"
                )
            parent[find(one)] = find(two)
        return {number: find(number) for number in self.tensors}


def tensor_choices(
    extent: Extent, before: Sequence[Placement], ways: Sequence[int]
) -> list[Placement]:
    """Return the ways to cut a tensor on the axis after `before`; copies if none."""
    found: list[Placement] = [
        Cut(dim)
        for dim, size in enumerate(extent.shape)
        if divides(size, [p == Cut(dim) for p in before], ways)
    ]
    return found or [COPIED]


def _is_free(one: Strategy, before: Sequence[Strategy]) -> bool:
    """True unless rows of neighbours would be asked for on two axes."""
    halo = any(isinstance(need, Cut) and need.has_halo for need in one.needs)
    return not (halo and one.index in [other.index for other in before])


def operation_choices(
    one: Operation, before: Sequence[Strategy], ways: Sequence[int]
) -> list[Strategy]:
    """Return the ways to split an operator on the axis after `before`, or whole."""
    found = [
        each
        for each in one.strategies
        if _is_free(each, before)
        and divides(
            one.sizes[each.index], [s.index == each.index for s in before], ways
        )
    ]
    return found or [one.unsplit]


def divides(size: int, is_cut: Sequence[bool], ways: Sequence[int]) -> bool:
    """True if a dimension that some axes cut can be cut equally on the next one too."""
    pieces = ways[len(is_cut)]
    for cut, number in zip(is_cut, ways, strict=False):
        pieces *= number if cut else 1
    return size > 0 and size % pieces == 0


def one_dimension_cuts(
    problem: Problem, number: int, ways: Sequence[int]
) -> list[Placements]:
    """Return placements that cut one dimension on every axis; else copies."""
    found: list[Placements] = []
    for dim in range(len(problem.tensors[number].shape)):
        own: Placements = ()
        for _ in ways:
            choices = tensor_choices(problem.tensors[number], own, ways)
            own = (*own, Cut(dim)) if Cut(dim) in choices else own
        found += [own] * (len(own) == len(ways))
    return found or [(COPIED,) * len(ways)]


def strategies_along(one: Operation, ways: Sequence[int]) -> list[Chosen]:
    """Return every index variable that can be split on every axis; else whole."""
    found: list[Chosen] = []
    for strategy in one.strategies:
        own: Chosen = ()
        for _ in ways:
            if strategy in operation_choices(one, own, ways):
                own = (*own, strategy)
        found += [own] * (len(own) == len(ways))
    return found or [(one.unsplit,) * len(ways)]

"""The search for placements: level by level, with what earlier levels fetch.

[Note: recursion with true sizes]
A level's plan is the exact minimum of the cost of *all* axes so far, given what earlier
levels chose. So an operand that an earlier level fetched whole is paid at its true
size, which formula A.2 of the dissertation halves. With such operands its proof of
optimality does not hold, and one level at a time may cost half as much again as the
best plan. So after each level two are searched at once, all pairs given the others,
until nothing gets better.
(tests/ssdtrain/tools/search/test_search.py)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

import numpy as np

from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.coarsen import coarsen
from ssdtrain.tools.search.elimination import LARGEST, Factor, Table, minimize
from ssdtrain.tools.search.moves import WorkerAxis, cost, moves
from ssdtrain.tools.search.placement import Cut, Placements
from ssdtrain.tools.search.problem import (
    Chosen,
    Operation,
    Problem,
    one_dimension_cuts,
    operation_choices,
    strategies_along,
    tensor_choices,
)
from ssdtrain.tools.search.strategies import Shape

Item = TypeVar("Item")
TOGETHER = 2
"""Levels that are searched at once."""
SWEEPS = 4
"""Times that all levels are searched again at most."""


@dataclass(frozen=True)
class Partition:
    """A way to split a step: placements of tensors and strategies of operators."""

    axes: tuple[WorkerAxis, ...]
    placements: Mapping[int, Placements]
    """By tensor, one for each axis."""
    chosen: tuple[Chosen, ...]
    """By operator, one strategy for each axis."""
    cost: float
    """Microseconds, or bytes that a worker sends, where an axis has no fabric."""
    is_exact: bool = True
    """No table of the search was too large."""

    @property
    def ways(self) -> tuple[int, ...]:
        """Workers of each axis."""
        return tuple(axis.ways for axis in self.axes)


class Space:
    """Which placements and strategies a search may choose from."""

    def __init__(self, problem: Problem, axes: Sequence[WorkerAxis]) -> None:
        self.problem = problem
        self.axes = tuple(axes)
        self.ways = tuple(axis.ways for axis in axes)
        self._known: dict[tuple[object, ...], Table] = {}

    def best(
        self,
        tensors: Mapping[int, Sequence[Placements]],
        operations: Sequence[Sequence[Chosen]],
        given: Partition | None = None,
        largest: int = LARGEST,
    ) -> Partition:
        """Return the cheapest of these options of each group of tensors and operator.
        `given`: one of them that is known; `largest`: entries of a table."""
        group, alike = self.problem.group_of, self.problem.alike
        names = sorted(set(group.values()))
        at = {name: number for number, name in enumerate(names)}
        sizes = [len(tensors[name]) for name in names] + list(map(len, operations))
        tables: dict[tuple[int, int], Table] = {}
        for index, one in enumerate(self.problem.operations):
            number = alike.get(index, index)
            for is_operand, tensor, sides in self._edges(one, operations[number]):
                name = group[tensor]
                table = self._table(tensor, tensors[name], sides, is_operand)
                scope = len(names) + number, at[name]
                tables[scope] = tables[scope] + table if scope in tables else table
        before = None
        if given is not None:
            before = [tensors[name].index(given.placements[name]) for name in names]
            before += [
                options.index(own)
                for options, own in zip(operations, given.chosen, strict=True)
            ]
        factors = [Factor(*each) for each in tables.items()]
        found = minimize(sizes, factors, before, largest)
        values = found.values
        placements = {
            tensor: tensors[name][values[at[name]]] for tensor, name in group.items()
        }
        numbers = (alike.get(index, index) for index in range(len(operations)))
        chosen = tuple(operations[n][values[len(names) + n]] for n in numbers)
        partition = Partition(self.axes, placements, chosen, 0.0, found.is_exact)
        return replace(partition, cost=self.price(partition))

    def price(self, partition: Partition) -> float:
        """Return what the moves of all operators cost."""
        total = 0.0
        for one, chosen in zip(self.problem.operations, partition.chosen, strict=True):
            for is_operand, tensor, [side] in self._edges(one, [chosen]):
                own, extent = partition.placements[tensor], self.problem.tensors[tensor]
                sizes = extent.shape, extent.num_bytes
                total += self._cost(is_operand, own, side, *sizes)
        return total

    def _edges(
        self, one: Operation, options: Sequence[Chosen]
    ) -> Iterable[tuple[bool, int, tuple[Placements, ...]]]:
        """An operator's operands (True) and results, with what each option asks."""
        for at, tensor in enumerate(one.operands):
            yield True, tensor, tuple(tuple(s.needs[at] for s in c) for c in options)
        for at, tensor in enumerate(one.results):
            yield False, tensor, tuple(tuple(s.gives[at] for s in c) for c in options)

    def _table(
        self,
        tensor: int,
        placements: Sequence[Placements],
        sides: tuple[Placements, ...],
        is_operand: bool,
    ) -> Table:
        extent = self.problem.tensors[tensor]
        sizes = extent.shape, extent.num_bytes
        key = (sizes, tuple(placements), sides, is_operand)
        if key not in self._known:
            self._known[key] = np.array(
                [
                    [self._cost(is_operand, own, side, *sizes) for own in placements]
                    for side in sides
                ]
            )
        return self._known[key]

    def _cost(
        self,
        is_operand: bool,
        own: Placements,
        side: Placements,
        shape: Shape,
        size: int,
    ) -> float:
        """Of a tensor's way to an operator, or from it."""
        source, target = (own, side) if is_operand else (side, own)
        halo = any(isinstance(p, Cut) and p.has_halo for p in target)
        steps = moves(source, target, self.ways, shape if halo else ())
        return cost(steps, size, self.axes)


def partition(
    problem: Problem,
    axes: Sequence[WorkerAxis],
    together: int = TOGETHER,
    sweeps: int = SWEEPS,
) -> Partition:
    """Return a cheap way to split a step over the axes of a mesh, the slowest links
    first. See [Note: recursion with true sizes]. `together`: levels that are searched
    again at once."""
    if not axes:
        raise ConfigError("a search expects one axis or more, got none")
    coarse = coarsen(problem)
    found = _searched(Space(coarse, axes[:1]), None, [0])
    for depth in range(2, len(axes) + 1):
        space = Space(coarse, axes[:depth])
        found = _searched(space, found, [depth - 1])
        found = _swept(space, found, min(together, depth), sweeps)
    if len(axes) <= together:
        return found
    space = Space(coarse, axes)
    simple = along_one(space)
    if simple.cost < found.cost:
        found = _swept(space, simple, together, sweeps)
    return found


def along_one(space: Space) -> Partition:
    """Return the cheapest way that cuts each tensor along the same dimension."""
    problem, ways = space.problem, space.ways
    return space.best(
        {
            n: one_dimension_cuts(problem, n, ways)
            for n in set(problem.group_of.values())
        },
        [strategies_along(one, ways) for one in problem.operations],
    )


def _swept(space: Space, found: Partition, together: int, sweeps: int) -> Partition:
    """Search some levels at once again, in turns, until nothing gets better."""
    for _ in range(sweeps):
        before = found.cost
        for levels in combinations(range(len(space.axes)), together):
            again = _searched(space, found, levels)
            found = again if again.cost < found.cost else found
        if found.cost >= before or together == len(space.axes):
            break
    return found


def exhaustive(problem: Problem, axes: Sequence[WorkerAxis]) -> Partition:
    """Return the cheapest way of all, all axes at once, for small graphs and to judge
    `partition`. Raises ConfigError: a table would be too large."""
    levels = range(len(axes))
    found = _searched(Space(problem, axes), None, levels, largest=2**24)
    if not found.is_exact:
        raise ConfigError("an exhaustive search expects a smaller graph")
    return found


def _searched(
    space: Space, given: Partition | None, levels: Sequence[int], largest: int = LARGEST
) -> Partition:
    """Search some levels of the space, given what was found for the others."""
    problem, ways = space.problem, space.ways
    others = [level for level in range(len(ways)) if level not in levels]
    order = [*others, *levels]
    reordered = [ways[level] for level in order]
    back = sorted(range(len(order)), key=order.__getitem__)

    def choices(
        fixed: Sequence[Item], more: Callable[[Sequence[Item]], Sequence[Item]]
    ) -> list[tuple[Item, ...]]:
        found: list[tuple[Item, ...]] = [tuple(fixed)]
        for _ in levels:
            found = [(*before, one) for before in found for one in more(before)]
        return [tuple(one[at] for at in back) for one in found]

    def of_tensor(name: int) -> list[Placements]:
        own = () if given is None else given.placements[name]
        extent = problem.tensors[name]
        fixed = [own[level] for level in others]
        return choices(fixed, lambda before: tensor_choices(extent, before, reordered))

    def of_operation(at: int) -> list[Chosen]:
        own = () if given is None else given.chosen[at]
        one = problem.operations[at]
        fixed = [own[level] for level in others]
        return choices(fixed, lambda before: operation_choices(one, before, reordered))

    names = set(problem.group_of.values())
    return space.best(
        {name: of_tensor(name) for name in names},
        [of_operation(at) for at in range(len(problem.operations))],
        given if given is not None and given.ways == space.ways else None,
        largest,
    )

"""The exact minimum of a sum of small tables (bucket elimination, Dechter 1999): a
variable is removed by taking, for every choice of its neighbours, its best value. The
variable with the smallest table goes first, so that weights never widen a table."""

import heapq
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
LARGEST = 2**18
"""Entries of a table. Where one would have more, the variable that most tables name
keeps the value that it had, and the result is no worse than what was there before."""


class Factor(NamedTuple):
    """A table over some variables, in this order."""

    scope: tuple[int, ...]
    table: Table


class Minimum(NamedTuple):
    """The best values found."""

    values: list[int]
    is_exact: bool


class _Gone(NamedTuple):
    """The best value of a removed variable, by those of its neighbours."""

    scope: tuple[int, ...]
    best: NDArray[np.intp]


class _Tables:
    """The tables that are left, by the variables that they name."""

    def __init__(self, sizes: Sequence[int], factors: Sequence[Factor]) -> None:
        self.sizes = sizes
        self._tables: dict[int, Factor] = {}
        self._named: list[set[int]] = [set() for _ in sizes]
        self._count = 0
        for factor in factors:
            self.add(factor)

    def add(self, factor: Factor) -> None:
        """Add a table; one without variables does not matter."""
        if factor.scope:
            self._tables[self._count] = factor
            for variable in factor.scope:
                self._named[variable].add(self._count)
            self._count += 1

    def take(self, variable: int) -> list[Factor]:
        """Remove the tables that name a variable."""
        numbers = sorted(self._named[variable])
        own = [self._tables.pop(number) for number in numbers]
        for number, factor in zip(numbers, own, strict=True):
            for other in factor.scope:
                self._named[other].discard(number)
        return own

    def around(self, variable: int) -> tuple[int, ...]:
        """Return the other variables of those tables."""
        scopes = (self._tables[number].scope for number in self._named[variable])
        return tuple(sorted({v for scope in scopes for v in scope} - {variable}))

    def entries(self, variable: int) -> int:
        """Return the size of the table that removing a variable takes."""
        return prod(self.sizes[v] for v in (variable, *self.around(variable)))

    def degree(self, variable: int) -> int:
        """Return how many tables name a variable."""
        return len(self._named[variable])


def minimize(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    before: Sequence[int] | None = None,
    largest: int = LARGEST,
) -> Minimum:
    """Return the values of all variables with the smallest sum of the factors. `sizes`:
    how many values each variable has; `before`: known values, for variables that have
    to be fixed; `largest`: entries of a table."""
    alone = {v for v, size in enumerate(sizes) if size == 1}
    tables = _Tables(sizes, [_without(factor, alone) for factor in factors])
    heap = [(tables.entries(v), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    gone: dict[int, _Gone] = {}
    is_exact = True
    while heap:
        size, variable = heapq.heappop(heap)
        if variable in gone:
            continue
        if (now := tables.entries(variable)) != size:
            heapq.heappush(heap, (now, variable))
            continue
        if now > largest:
            heapq.heappush(heap, (now, variable))
            near = (variable, *tables.around(variable))
            variable = max(near, key=lambda v: (tables.degree(v), v))
            is_exact = False
        scope = tables.around(variable)
        own = tables.take(variable)
        if now > largest:
            fixed = _alone(variable, sizes[variable], own)
            fixed = fixed if before is None else before[variable]
            gone[variable] = _Gone((), np.asarray(fixed))
            made = [_at(factor, variable, fixed) for factor in own]
        else:
            total = _sum(variable, scope, sizes, own)
            gone[variable] = _Gone(scope, total.argmin(0))
            made = [Factor(scope, np.asarray(total.min(0)))]
        for factor in made:
            tables.add(factor)
        for other in scope:
            heapq.heappush(heap, (tables.entries(other), other))
    values = [0] * len(sizes)
    for variable, step in reversed(gone.items()):
        values[variable] = int(step.best[tuple(values[v] for v in step.scope)])
    return Minimum(values, is_exact)


def _sum(
    variable: int, scope: tuple[int, ...], sizes: Sequence[int], own: list[Factor]
) -> Table:
    """Add tables over the variable (first) and the others of the scope."""
    order = (variable, *scope)
    total = np.zeros([sizes[v] for v in order])
    for factor in own:
        at = np.argsort([order.index(v) for v in factor.scope])
        shape = [sizes[v] if v in factor.scope else 1 for v in order]
        total += factor.table.transpose(at).reshape(shape)
    return total


def _without(factor: Factor, alone: set[int]) -> Factor:
    """Return a table without the variables that have one value."""
    for variable in alone & set(factor.scope):
        factor = _at(factor, variable, 0)
    return factor


def _alone(variable: int, size: int, own: list[Factor]) -> int:
    total = np.zeros(size)
    for factor in own:
        at = factor.scope.index(variable)
        axes = tuple(i for i in range(len(factor.scope)) if i != at)
        total += np.asarray(factor.table.min(axes))
    return int(total.argmin())


def _at(factor: Factor, variable: int, value: int) -> Factor:
    at = factor.scope.index(variable)
    scope = factor.scope[:at] + factor.scope[at + 1 :]
    return Factor(scope, np.asarray(factor.table.take(value, at)))

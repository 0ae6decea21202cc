"""The tensor description language: what an element of a result is made of.

A tensor is a function of its index variables (Wang 2020, 3.4.1):

    @describes("aten::mm")
    def mm(call):
        a, b = call.tensors
        return lambda i, j: Sum(lambda k: a[i, k] * b[k, j])

The function runs once, on symbolic intervals instead of numbers, and leaves the
accesses to each operand. Several results are several functions; index variables of one
name are one variable. `opaque` takes slices `a[b, :, :]` and gives what the language
cannot say.

[Note: what may be reduced by parts]
A reduction may be split over workers only where the result is the reduction itself, or
a sum of it with other terms: those are then added by one worker alone (`once`). Below a
product with an element, another reducer or a function it may not.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.interval import Interval

Index = Interval | int | slice | tuple["Interval", ...]
"""One dimension of an access; a tuple: merged index variables, outermost first."""
Merged = tuple[str, ...]
"""Index variables of one dimension, outermost first: several, where a view merges."""


class Reducer(str, Enum):
    """Commutative and associative."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PROD = "product"


@dataclass(frozen=True)
class Access:
    """An operand's elements that one element of the result reads."""

    operand: int
    dims: tuple[Interval | Merged | None, ...]
    """None: the whole dimension."""


@dataclass(frozen=True)
class Term:
    """The value of an expression, by what it reads."""

    reads: tuple[Access, ...] = ()
    reduced: Mapping[str, Reducer] = field(default_factory=dict)
    """Index variables of reductions that may be split."""
    fixed: frozenset[str] = frozenset()
    """Index variables that may not be split."""
    once: frozenset[int] = frozenset()
    """Operands that one worker adds to a sum."""

    def __add__(self, other: "Term | float") -> "Term":
        if not isinstance(other, Term):
            return self.closed() if self.reduced else self
        for one, more in ((self, other), (other, self)):
            sums = one.reduced and set(one.reduced.values()) == {Reducer.SUM}
            added = {read.operand for read in more.reads}
            apart = not added & {read.operand for read in one.reads}
            if sums and apart and not more.reduced:
                joined = _joined(one, more)
                return replace(joined, reduced=one.reduced, once=one.once | added)
        return apply(self, other)

    __radd__ = __add__

    def __sub__(self, other: "Term | float") -> "Term":
        return self + other

    def __mul__(self, other: "Term | float") -> "Term":
        if isinstance(other, Term):
            return apply(self, other)
        sums = set(self.reduced.values()) <= {Reducer.SUM}
        return self if sums else self.closed()

    __rmul__ = __mul__

    def closed(self) -> "Term":
        """Return the term below a function: no reduction of it may be split."""
        fixed = self.fixed | set(self.reduced)
        return replace(self, reduced={}, fixed=fixed, once=frozenset())

    def at(self, *indices: Any) -> "Term":
        """Return the element at indices that are given one by one."""
        return self[indices]

    def __getitem__(self, indices: Any) -> "Term":
        """An element of what an opaque function gave: these indices are used up."""
        used = indices if isinstance(indices, tuple) else (indices,)
        names = {n for one in used if isinstance(one, Interval) for n in one.indices}
        return replace(self, fixed=self.fixed | names)


def _joined(*terms: Term) -> Term:
    return Term(
        reads=tuple(read for term in terms for read in term.reads),
        fixed=frozenset().union(*(term.fixed for term in terms)),
    )


def apply(*terms: Term) -> Term:
    """Return any function of elements."""
    return _joined(*(term.closed() for term in terms))


def opaque(*slices: Term) -> Term:
    """Return what the language cannot say, of slices of operands."""
    return apply(*slices)


class Tensor:
    """An operand in a description."""

    def __init__(self, operand: int, shape: Sequence[int]) -> None:
        self.operand = operand
        self.shape = tuple(shape)

    def __repr__(self) -> str:
        return f"Tensor({self.operand}, {self.shape})"

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, indices: Index | tuple[Index, ...]) -> Term:
        given = indices if isinstance(indices, tuple) else (indices,)
        if len(given) != self.rank:
            raise ConfigError(
                f"operand {self.operand} expects {self.rank} indices, got {len(given)}"
            )
        return Term((Access(self.operand, tuple(_dim(one) for one in given)),))

    def at(self, *indices: Index) -> Term:
        """Return the element at indices that are given one by one."""
        return self[indices]

    def spread(self, indices: Sequence[Interval]) -> Term:
        """Return an element after broadcasting to the dimensions of `indices`."""
        own = indices[len(indices) - self.rank :]
        return self[
            tuple(0 if n == 1 else i for i, n in zip(own, self.shape, strict=True))
        ]

    def whole(self) -> Term:
        """Return all elements."""
        return self[(slice(None),) * self.rank]


def _dim(index: Index) -> Interval | Merged | None:
    if isinstance(index, slice):
        return None
    if isinstance(index, tuple):
        return tuple(name for one in index for name in one.indices)
    return index if isinstance(index, Interval) else Interval.constant(index)


def reduce_over(reducer: Reducer, names: Sequence[str], body: Term) -> Term:
    """Return a reduction of `body` over index variables."""
    inner = set(body.reduced.values()) <= {reducer} and not body.once
    body = body if inner else body.closed()
    return replace(body, reduced={**body.reduced, **dict.fromkeys(names, reducer)})


def _reducer(reducer: Reducer) -> Callable[[Callable[..., Term]], Term]:
    def reduction(body: Callable[..., Term]) -> Term:
        names = tuple(inspect.signature(body).parameters)
        return reduce_over(reducer, names, body(*map(Interval.of, names)))

    return reduction


Sum, Max, Min, Prod = map(_reducer, Reducer)


@dataclass(frozen=True)
class OperatorResult:
    """One result of an operator."""

    dims: tuple[Merged, ...]
    term: Term


Form = tuple[Sequence[str], Callable[..., Term]]
"""Names of index variables, and a function of them."""


@dataclass(frozen=True)
class Description:
    """An operator, by what its results are made of."""

    results: tuple[OperatorResult, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of index variables that no dimension alone has."""
    is_elementwise: bool = False


def description(*functions: Callable[..., Term]) -> Description:
    """Run functions of index variables, one for each result, on symbolic intervals."""
    names = [tuple(inspect.signature(one).parameters) for one in functions]
    return Description(tuple(map(result, names, functions)))


def result(names: Sequence[str], function: Callable[..., Term]) -> OperatorResult:
    """Run the function of one result, whose index variables have these names."""
    term = function(*map(Interval.of, names))
    return OperatorResult(tuple((name,) for name in names), term)


def indices_of(rank: int) -> list[str]:
    """Return names of the index variables of a result of any rank."""
    return [f"i{dim}" for dim in range(rank)]

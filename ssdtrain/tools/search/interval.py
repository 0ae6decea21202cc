"""Symbolic intervals: which values an index takes, whatever the sizes.

[Note: sound intervals]
An interval holds two affine forms in the first and last values of index variables, one
for its lower and one for its upper end, each with a constant of its own. Figure 3.4 of
Wang's dissertation (2020) has one constant for both ends, subtracts ends pairwise and
does not swap them under a negative factor: its intervals may then miss values. Here
`a - b` spans from `a.lower - b.upper` to `a.upper - b.lower`.
(tests/ssdtrain/tools/search/test_interval.py)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor
from typing import NamedTuple

from ssdtrain.errors import ConfigError

Box = Mapping[str, tuple[int, int]]
"""First and last value of each index variable."""


class End(NamedTuple):
    """One end of an index variable's values."""

    name: str
    is_last: bool


@dataclass(frozen=True)
class Affine:
    """Factors times ends of index variables, and a constant."""

    terms: Mapping[End, Fraction] = field(default_factory=dict)
    constant: Fraction = Fraction(0)

    def plus(self, other: "Affine", factor: Fraction = Fraction(1)) -> "Affine":
        """Add a multiple of another form."""
        found = dict(self.terms)
        for end, value in other.terms.items():
            found[end] = found.get(end, Fraction(0)) + factor * value
        terms = {end: value for end, value in found.items() if value}
        return Affine(terms, self.constant + factor * other.constant)

    def at(self, box: Box) -> Fraction:
        """Return the value for given ends."""
        total = self.constant
        for (name, is_last), factor in self.terms.items():
            total += factor * box[name][is_last]
        return total


@dataclass(frozen=True)
class Interval:
    """Values between two forms, both included. See [Note: sound intervals]."""

    lower: Affine
    upper: Affine

    @staticmethod
    def of(index: str) -> "Interval":
        """Return all values of an index variable."""
        return Interval(
            Affine({End(index, False): Fraction(1)}),
            Affine({End(index, True): Fraction(1)}),
        )

    @staticmethod
    def constant(value: int | Fraction) -> "Interval":
        """Return a single value."""
        form = Affine(constant=Fraction(value))
        return Interval(form, form)

    @property
    def indices(self) -> set[str]:
        """Index variables that the ends depend on."""
        return {end.name for form in (self.lower, self.upper) for end in form.terms}

    def at(self, box: Box) -> tuple[int, int]:
        """Return the first and last whole number in it."""
        return ceil(self.lower.at(box)), floor(self.upper.at(box))

    def __add__(self, other: "Interval | int") -> "Interval":
        other = _interval(other)
        return Interval(self.lower.plus(other.lower), self.upper.plus(other.upper))

    __radd__ = __add__

    def __neg__(self) -> "Interval":
        return self * -1

    def __sub__(self, other: "Interval | int") -> "Interval":
        return self + -_interval(other)

    def __rsub__(self, other: "Interval | int") -> "Interval":
        return -self + other

    def __mul__(self, factor: int | Fraction) -> "Interval":
        if isinstance(factor, Interval):
            raise ConfigError(
                "an index expects affine arithmetic (sums, differences, products with "
                "numbers), got a product of two indices; describe the operator as "
                "Opaque there"
            )
        value, none = Fraction(factor), Affine()
        lower, upper = none.plus(self.lower, value), none.plus(self.upper, value)
        return Interval(lower, upper) if value >= 0 else Interval(upper, lower)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: int) -> "Interval":
        if divisor < 1:
            raise ConfigError(f"an index expects a divisor above 0, got {divisor}")
        part = self * Fraction(1, divisor)
        slack = Affine(constant=Fraction(1 - divisor, divisor))
        return Interval(part.lower.plus(slack), part.upper)


def _interval(value: "Interval | int") -> Interval:
    return value if isinstance(value, Interval) else Interval.constant(value)

"""Intervals against brute force: no value is missed, and none is invented."""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.interval import Interval
from ssdtrain.tools.search.language import (
    Max,
    Reducer,
    Sum,
    Tensor,
    apply,
    description,
    opaque,
    reduce_over,
    result,
)
from ssdtrain.tools.search.placement import COPIED, Cut, Unreduced, piece
from ssdtrain.tools.search.strategies import region, strategies

b, i, j = map(Interval.of, "bij")
Position = Callable[[Mapping[str, Any]], Any]
"""Of an access, from numbers or from intervals."""


@dataclass
class Found:
    """What a comparison counted."""

    dims: int = 0
    """Dimensions of accesses that were compared."""
    missed: int = 0
    """Values outside their interval: unsound."""
    loose: int = 0
    """Intervals wider than the values, where each index stands once and undivided."""


def random_position(draw: random.Random, names: list[str]) -> tuple[Position, bool]:
    """Return an index expression, and whether its interval has to be exact."""
    used = [draw.choice(names) for _ in range(draw.randint(1, 3))]
    factors = [draw.choice((-3, -2, -1, 1, 1, 1, 2, 3)) for _ in used]
    divisors = [draw.choice((1, 1, 1, 2, 3)) for _ in used]
    shift, outer = draw.randint(-4, 4), draw.choice((1, 1, 1, 2))

    def position(values: Mapping[str, Any]) -> Any:
        total: Any = shift
        for name, factor, divisor in zip(used, factors, divisors, strict=True):
            one = values[name] // divisor if divisor > 1 else values[name]
            total = total + one * factor if factor > 0 else total - one * -factor
        return total // outer if outer > 1 else total

    plain = set(divisors) == {1} and outer == 1
    return position, plain and len(set(used)) == len(used)


def compare(draw: random.Random, found: Found) -> None:
    """Compare one random description, split along one random index variable."""
    outer = [f"o{at}" for at in range(draw.randint(1, 3))]
    inner = [f"r{at}" for at in range(draw.randint(0, 2))]
    names = outer + inner
    sizes = {name: draw.randint(1, 6) for name in names}
    ranks = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
    positions = [[random_position(draw, names) for _ in range(r)] for r in ranks]

    def body(*indices: Interval) -> Any:
        values = dict(zip(outer, indices, strict=True))
        values |= {name: Interval.of(name) for name in inner}
        reads = [
            Tensor(at, (1,) * rank)[tuple(one(values) for one, _ in positions[at])]
            for at, rank in enumerate(ranks)
        ]
        return reduce_over(draw.choice(list(Reducer)), inner, apply(*reads))

    reads = result(outer, body).term.reads
    split, ways = draw.choice(names), draw.randint(1, 3)
    worker = draw.randrange(ways)
    box = {name: (0, size - 1) for name, size in sizes.items()}
    begin, end = piece(sizes[split], ways, worker)
    if begin == end:
        return
    box[split] = begin, end - 1
    spans = [range(box[name][0], box[name][1] + 1) for name in names]
    points = [dict(zip(names, at, strict=True)) for at in itertools.product(*spans)]
    for read in reads:
        for dim, (position, exact) in zip(
            read.dims, positions[read.operand], strict=True
        ):
            first, last = region(dim, box)
            values = [position(point) for point in points]
            found.dims += 1
            found.missed += sum(not first <= value <= last for value in values)
            found.loose += exact and (first, last) != (min(values), max(values))


def check_descriptions(count: int, seed: int = 0) -> Found:
    """Compare `count` random descriptions."""
    found = Found()
    for number in range(count):
        compare(random.Random(f"{seed}/{number}"), found)
    return found


def test_random_descriptions() -> None:
    found = check_descriptions(300, seed=1)
    assert found.missed == 0
    assert found.loose == 0


def test_a_difference_and_a_negative_factor() -> None:
    box = {"i": (0, 4), "j": (1, 3)}
    assert (i - j).at(box) == (-3, 3)  # pairwise ends, as printed: (-1, 1)
    assert (i * -2 + 1).at(box) == (-7, 1)
    assert (9 - i).at(box) == (5, 9)
    assert (i // 2 + j // 2).at(box) == (0, 3)
    with pytest.raises(ConfigError, match="product of two indices"):
        i * j  # type: ignore[operator]
    with pytest.raises(ConfigError, match="divisor"):
        i // 0


def test_the_dissertations_example() -> None:
    """`lambda i: A[i + 2]`, i in [0, 9]."""
    assert (i + 2).at({"i": (0, 4)}) == (2, 6)
    assert (i + 2).at({"i": (5, 9)}) == (7, 11)


def test_convolution() -> None:
    data, filters = Tensor(0, (8, 4, 16)), Tensor(1, (4, 6, 3))
    conv = description(
        lambda b, co, x: Sum(
            lambda ci, dx: data[b, ci, x + dx - 1] * filters[ci, co, dx]
        )
    )
    found = {
        s.index: s for s in strategies(conv, [(8, 4, 16), (4, 6, 3)], [(8, 6, 16)])
    }
    assert found["b"].needs == (Cut(0), COPIED)
    assert found["co"].needs == (COPIED, Cut(1))
    assert found["x"].needs == (Cut(2, 1, 1), COPIED)
    assert found["ci"].needs == (Cut(1), Cut(0))
    assert found["ci"].gives == (Unreduced(Reducer.SUM),)


def test_what_may_not_be_reduced_by_parts() -> None:
    a, c = Tensor(0, (4, 6)), Tensor(1, (4,))
    added = description(lambda i: Sum(lambda k: a[i, k]) + c[i])
    scaled = description(lambda i: Sum(lambda k: a[i, k]) * c[i])
    nested = description(lambda: Max(lambda i: Sum(lambda k: a[i, k])))
    softmax = description(lambda i, k: opaque(a[i, slice(None)])[k])
    shapes = [(4, 6), (4,)]

    def indices(one: object, out: tuple[int, ...]) -> list[str]:
        return [s.index for s in strategies(one, shapes, [out])]  # type: ignore[arg-type]

    assert indices(added, (4,)) == ["i", "k"]
    assert strategies(added, shapes, [(4,)])[1].once == {1}
    assert indices(scaled, (4,)) == ["i"]
    assert indices(nested, ()) == ["i"]
    assert indices(softmax, (4, 6)) == ["i"]
    assert indices(description(lambda i: a[i, i]), (4,)) == []
    with pytest.raises(ConfigError, match="sizes of the index variables"):
        strategies(description(lambda i: Sum(lambda k: a[i, k + 1])), shapes, [(4,)])

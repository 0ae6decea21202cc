"""Intervals against brute force: no value is missed, and none is invented."""

import pytest

from recipes.bench.search.intervals import check_descriptions
from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.interval import Interval
from ssdtrain.tools.search.language import (
    Max,
    Reducer,
    Sum,
    Tensor,
    description,
    opaque,
)
from ssdtrain.tools.search.placement import COPIED, Cut, Unreduced
from ssdtrain.tools.search.strategies import strategies

b, i, j = map(Interval.of, "bij")


def test_random_descriptions() -> None:
    """5,000 of them: `python -m recipes.bench search.intervals`."""
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

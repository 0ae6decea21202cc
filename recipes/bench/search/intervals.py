"""Interval analysis against brute force, on random descriptions.

python -m recipes.bench search.intervals --count 5000
"""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from recipes.bench.harness.cli import Bench
from ssdtrain.tools.search.interval import Interval
from ssdtrain.tools.search.language import Reducer, Tensor, apply, reduce_over, result
from ssdtrain.tools.search.placement import piece
from ssdtrain.tools.search.strategies import region

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


def main(bench: Bench, *, count: int = 5000) -> None:
    """Compare, and record what was found."""
    cells = bench.cells()
    for seed in range(5):
        name = f"{count // 5} descriptions, seed {seed}"
        found = partial(check_descriptions, count // 5, seed)
        cells.run(name, lambda f=found: vars(f()))

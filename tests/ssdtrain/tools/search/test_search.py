"""Plans: the cheapest ones, by costs that are what collectives send."""

import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from recipes.bench.search.baselines import BASELINES
from recipes.bench.search.random_graphs import (
    Maker,
    compare,
    random_problem,
)
from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.collectives import Collective, straight_fabric
from ssdtrain.tools.search.elimination import Factor, minimize
from ssdtrain.tools.search.language import Reducer
from ssdtrain.tools.search.moves import WorkerAxis, cost, moves
from ssdtrain.tools.search.placement import COPIED, Cut, Unreduced
from ssdtrain.tools.search.problem import Problem
from ssdtrain.tools.search.search import (
    Partition,
    Space,
    exhaustive,
    partition,
)
from ssdtrain.tools.search.trace import trace

TWO = (WorkerAxis(2), WorkerAxis(2))
ROWS, COLUMNS = Cut(0), Cut(1)
PART = Unreduced(Reducer.SUM)
aten = torch.ops.aten


def kinds(source: tuple, target: tuple) -> list:  # type: ignore[type-arg]
    return [(m.axis, m.kind, m.share) for m in moves(source, target, (2, 2), ())]


def test_moves() -> None:
    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    assert kinds((ROWS, COLUMNS), (ROWS, COLUMNS)) == []
    assert kinds((ROWS, COLUMNS), (ROWS, COPIED)) == [(1, gather, 0.5)]
    assert kinds((PART, ROWS), (COLUMNS, ROWS)) == [(0, scatter, 0.5)]
    assert kinds((PART, COPIED), (COPIED, ROWS)) == [
        (0, Collective.ALL_REDUCE, 1.0),
        (1, None, 1.0),
    ]
    # An outer cut of rows: the inner one is undone first, and made again.
    assert kinds((COPIED, ROWS), (ROWS, ROWS)) == [
        (1, gather, 1.0),
        (0, None, 1.0),
        (1, None, 0.5),
    ]
    with pytest.raises(ConfigError, match="as its goal"):
        moves((ROWS,), (PART,), (2,), ())


def test_bytes_and_microseconds() -> None:
    """A whole operand of four workers: each gets three quarters of it."""
    steps = moves((ROWS, ROWS), (COPIED, COPIED), (2, 2), ())
    assert cost(steps, 400.0, TWO) == 300.0
    slow = WorkerAxis(2, straight_fabric(10.0, 1.0))
    fast = WorkerAxis(2, straight_fabric(1.0, 100.0))
    steps = moves((COPIED, ROWS), (COPIED, COPIED), (2, 2), ())
    assert cost(steps, 1e6, (slow, fast)) < cost(steps, 1e6, (fast, slow)) / 10


def test_the_minimum() -> None:
    """Against every choice, with and without a limit on tables."""
    draw = np.random.default_rng(0)
    for _ in range(30):
        sizes = draw.integers(1, 4, 6).tolist()
        scopes = [sorted(draw.choice(6, 2, replace=False).tolist()) for _ in range(9)]
        factors = [Factor(tuple(s), draw.random([sizes[v] for v in s])) for s in scopes]

        def total(values: list[int], own: list[Factor] = factors) -> float:
            return sum(float(t[tuple(values[v] for v in s)]) for s, t in own)

        best = min(total(list(v)) for v in itertools.product(*map(range, sizes)))
        found = minimize(sizes, factors)
        assert found.is_exact
        assert total(found.values) == pytest.approx(best)
        before = [0] * 6
        limited = minimize(sizes, factors, before, largest=9)
        assert total(limited.values) <= total(before) + 1e-9


def brute_force(problem: Problem) -> float:
    """Every placement of every tensor; each operator takes its best strategy."""
    space = Space(problem, TWO)
    names = sorted(problem.tensors)

    def sequences(number: int) -> list:  # type: ignore[type-arg]
        cuts = [Cut(dim) for dim in range(len(problem.tensors[number].shape))]
        return list(itertools.product(cuts, repeat=2))

    best = float("inf")
    for placed in itertools.product(*map(sequences, names)):
        placements = dict(zip(names, placed, strict=True))
        total = 0.0
        for one in problem.operations:
            alone = replace(problem, operations=(one,))
            own = Space(alone, TWO)
            total += min(
                own.price(Partition(space.axes, placements, (chosen,), 0.0))
                for chosen in itertools.product(one.strategies, repeat=2)
            )
            if total >= best:
                break
        best = min(best, total)
    return best


def test_exhaustive_is_the_least_of_all() -> None:
    maker = Maker()
    x, w = torch.empty(16, 64, device="meta"), torch.empty(64, 256, device="meta")
    maker.run(aten.mm.default, x, w)
    maker.run(aten.cumsum.default, maker.made[0], -1)
    problem = Problem(maker.tensors, tuple(maker.operations))
    assert exhaustive(problem, TWO).cost == brute_force(problem)


def test_plans_of_random_graphs() -> None:
    """200 of them: `python -m recipes.bench search.random_graphs`."""
    for seed in range(12):
        found = compare(1000 + seed)
        least = found["exhaustive"]["bytes"]
        assert found["found"]["bytes"] <= 1.05 * least
        for name in ("recursion alone", *BASELINES):
            assert found[name]["bytes"] >= least


def test_eight_workers_and_a_graph_of_1_500_operators() -> None:
    """Within a minute, and no worse than the best baseline."""
    with torch.device("meta"):
        parts = [p for _ in range(150) for p in (nn.Linear(512, 512), nn.GELU())]
        net, x = nn.Sequential(*parts), torch.empty(64, 512)
        problem = trace(net, lambda: net(x).square().mean())
    assert len(problem.operations) > 1500
    axes = [WorkerAxis(2)] * 3
    begun = time.perf_counter()
    found = partition(problem, axes)
    assert time.perf_counter() - begun < 60
    assert found.cost <= min(
        search(problem, axes).cost for search in BASELINES.values()
    )


def test_a_plan_names_what_it_costs() -> None:
    problem = random_problem(random.Random(5))
    found = partition(problem, TWO)
    assert Space(problem, TWO).price(found) == found.cost
    assert set(found.placements) == set(problem.tensors)

"""Plans of random small graphs, against exhaustive search and beside the baselines.

python -m recipes.bench search.random_graphs --count 200
"""

import random
import time
from typing import Any

import torch
from torch import Tensor

from recipes.bench.harness.cli import Bench
from recipes.bench.search.baselines import BASELINES
from ssdtrain.tools.search.calls import call_of
from ssdtrain.tools.search.describe import describe_call, is_elementwise
from ssdtrain.tools.search.moves import WorkerAxis
from ssdtrain.tools.search.problem import Extent, Operation, Problem
from ssdtrain.tools.search.search import exhaustive, partition
from ssdtrain.tools.search.strategies import extents, strategies

SIZES = (16, 64, 256, 1024)
aten = torch.ops.aten


class Maker:
    """Puts operators on meta tensors into a problem."""

    def __init__(self) -> None:
        self.tensors: dict[int, Extent] = {}
        self.operations: list[Operation] = []
        self.made: list[Tensor] = []
        """Results of operators."""
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = number = len(self._numbers)
            self._kept.append(tensor)
            self.tensors[number] = Extent(tuple(tensor.shape), tensor.element_size())
        return self._numbers[id(tensor)]

    def run(self, func: Any, *args: Any) -> None:
        """Add an operator with one result."""
        out = func(*args)
        call = call_of(func, args, {}, out)
        described = describe_call(call)
        if described is None:
            raise ValueError(f"{call.name} has no description")
        shapes = call.shapes, call.results
        operands = tuple(self.number(x) for x in args if isinstance(x, Tensor))
        self.operations.append(
            Operation(
                call.name,
                operands,
                (self.number(out),),
                tuple(strategies(described, *shapes)),
                extents(described, *shapes),
                call=call,
                is_elementwise=is_elementwise(func),
            )
        )
        self.made.append(out)


def random_problem(draw: random.Random) -> Problem:
    """Six to ten operators on matrices; results are used up to three times."""
    maker = Maker()

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    maker.made.append(new(draw.choice(SIZES), draw.choice(SIZES)))
    count = draw.randint(6, 10)
    while len(maker.operations) < count:
        x = draw.choice(maker.made[-4:])
        kind = draw.choice(("mm", "mm", "mm", "own", "add", "relu", "t", "softmax"))
        alike = [y for y in maker.made if y.shape == x.shape and y is not x]
        fitting = [y for y in maker.made if y.shape[0] == x.shape[1]]
        if kind == "mm":
            maker.run(aten.mm.default, x, new(x.shape[1], draw.choice(SIZES)))
        elif kind == "own" and fitting:
            maker.run(aten.mm.default, x, draw.choice(fitting))
        elif kind == "add" and alike:
            maker.run(aten.add.Tensor, x, draw.choice(alike))
        elif kind == "relu":
            maker.run(aten.relu.default, x)
        elif kind == "t":
            maker.run(aten.t.default, x)
        elif kind == "softmax":
            maker.run(aten._softmax.default, x, -1, False)
    return Problem(maker.tensors, tuple(maker.operations))


def compare(seed: int, ways: tuple[int, ...] = (2, 2)) -> dict[str, Any]:
    """One graph: bytes and seconds of every search."""
    problem = random_problem(random.Random(seed))
    axes = [WorkerAxis(number) for number in ways]
    ways_to_search: dict[str, Any] = {
        "exhaustive": exhaustive,
        "recursion alone": lambda p, a: partition(p, a, together=1, sweeps=0),
        "recursion, swept": lambda p, a: partition(p, a, together=1),
        "found": partition,
        **BASELINES,
    }
    found: dict[str, Any] = {"operators": len(problem.operations)}
    for name, search in ways_to_search.items():
        start = time.perf_counter()
        one = search(problem, axes)
        found[name] = {
            "bytes": one.cost,
            "search_s": round(time.perf_counter() - start, 4),
        }
    return found


def main(bench: Bench, *, count: int = 200, ways: str = "2,2") -> None:
    """Compare, and record what was found.

    Args:
        ways: workers of each axis
    """
    cells = bench.cells({"ways": ways})
    for seed in range(count):
        cells.run(f"graph {seed}", compare, seed, tuple(map(int, ways.split(","))))

"""Simpler ways to split a step, which a search is compared with (Wang 2020, 3.7.3)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ssdtrain.tools.search.moves import WorkerAxis, cost, moves
from ssdtrain.tools.search.placement import Placements, Unreduced
from ssdtrain.tools.search.problem import (
    Chosen,
    Operation,
    Problem,
    one_dimension_cuts,
    strategies_along,
)
from ssdtrain.tools.search.search import Partition, Space, along_one, partition


def all_rows(problem: Problem, axes: Sequence[WorkerAxis]) -> Partition:
    """Cut every tensor along its first dimension; each operator takes what is best."""
    space = Space(problem, axes)
    tensors = {
        n: one_dimension_cuts(problem, n, space.ways)[:1] for n in _groups(problem)
    }
    operations = [strategies_along(one, space.ways) for one in problem.operations]
    return space.best(tensors, operations)


def greedy(problem: Problem, axes: Sequence[WorkerAxis]) -> Partition:
    """Split operator by operator in the order of the step, each as is best for what is
    placed already; it places its operands and results."""
    space, group = Space(problem, axes), problem.group_of
    placed: dict[int, Placements] = {}
    chosen: list[list[Chosen]] = []
    for one in problem.operations:
        options = strategies_along(one, space.ways)
        own = min(options, key=lambda s: _known(space, one, s, placed))
        chosen.append([own])
        for number, wanted, _ in _asked(one, own):
            ways = one_dimension_cuts(problem, group[number], space.ways)
            placed.setdefault(group[number], wanted if wanted in ways else ways[0])
    for name in _groups(problem):
        placed.setdefault(name, one_dimension_cuts(problem, name, space.ways)[0])
    return space.best({n: [p] for n, p in placed.items()}, chosen)


def one_dimension(problem: Problem, axes: Sequence[WorkerAxis]) -> Partition:
    """Cut the largest tensor first, along its best dimension on every axis, then its
    operators, then the next tensor (Spartan, Huang et al. 2015)."""
    space = Space(problem, axes)
    group, ways = problem.group_of, space.ways
    users: dict[int, list[int]] = {}
    for at, one in enumerate(problem.operations):
        for number in {group[n] for n in (*one.operands, *one.results)}:
            users.setdefault(number, []).append(at)
    placed: dict[int, Placements] = {}
    order = sorted(_groups(problem), key=lambda n: -problem.tensors[n].num_bytes)
    options = [strategies_along(one, ways) for one in problem.operations]
    for name in order:

        def total(own: Placements, name: int = name) -> float:
            now = {**placed, name: own}
            return sum(
                min(_known(space, problem.operations[at], s, now) for s in options[at])
                for at in users.get(name, [])
            )

        placed[name] = min(one_dimension_cuts(problem, name, ways), key=total)
    return space.best({n: [p] for n, p in placed.items()}, options)


def equal_chop(problem: Problem, axes: Sequence[WorkerAxis]) -> Partition:
    """Search as `partition` does, but cut each tensor along one dimension for all."""
    return along_one(Space(problem, axes))


def without_reduction(problem: Problem, axes: Sequence[WorkerAxis]) -> Partition:
    """Search as `partition` does, but never split a reduction (Jia et al. 2018)."""
    operations = tuple(
        replace(
            one,
            strategies=tuple(
                s
                for s in one.strategies
                if not any(isinstance(give, Unreduced) for give in s.gives)
            ),
        )
        for one in problem.operations
    )
    return partition(replace(problem, operations=operations), axes)


def _groups(problem: Problem) -> set[int]:
    return set(problem.group_of.values())


def _known(
    space: Space, one: Operation, chosen: Chosen, placed: Mapping[int, Placements]
) -> float:
    """Return what an operator costs, of those of its tensors that are placed."""
    group, total = space.problem.group_of, 0.0
    for number, wanted, is_needed in _asked(one, chosen):
        if (own := placed.get(group[number])) is not None:
            ends = (own, wanted) if is_needed else (wanted, own)
            extent = space.problem.tensors[number]
            steps = moves(*ends, space.ways, extent.shape)
            total += cost(steps, extent.num_bytes, space.axes)
    return total


def _asked(one: Operation, chosen: Chosen) -> Iterator[tuple[int, Placements, bool]]:
    """An operator's tensors, how it wants each, and whether it is an operand."""
    for at, number in enumerate(one.operands):
        yield number, tuple(s.needs[at] for s in chosen), True
    for at, number in enumerate(one.results):
        yield number, tuple(s.gives[at] for s in chosen), False


Baseline = Callable[[Problem, Sequence[WorkerAxis]], Partition]
BASELINES: Mapping[str, Baseline] = {
    "all rows": all_rows,
    "greedy": greedy,
    "one dimension": one_dimension,
    "equal chop": equal_chop,
    "without reduction": without_reduction,
}
"""By name."""

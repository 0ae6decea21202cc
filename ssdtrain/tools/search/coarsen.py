"""Operators and tensors that a search takes together (Wang 2020, 3.5.1): a weight and
its gradient; consecutive elementwise operators; steps of an unrolled loop: the same
module, weights and neighbours."""

from dataclasses import replace

from ssdtrain.tools.search.problem import Problem

ROUNDS = 2
"""So many neighbours away operators and tensors are compared."""
SYMMETRIC = frozenset({"aten::unbind", "aten::stack"})
"""Operators whose results, or operands, are the same."""


def coarsen(problem: Problem) -> Problem:
    """Return the problem with more ties."""
    alike, steps = _unrolled(problem)
    ties = (*problem.ties, *_elementwise(problem), *steps)
    return replace(problem, ties=ties, alike=alike)


def _elementwise(problem: Problem) -> list[tuple[int, int]]:
    """Pairs of a tensor and the only result that is made of it."""
    made = {number for one in problem.operations for number in one.results}
    used: dict[int, int] = {}
    for one in problem.operations:
        for number in one.operands:
            used[number] = used.get(number, 0) + 1
    pairs = []
    for one in problem.operations:
        shapes = {problem.tensors[n].shape for n in (*one.operands, *one.results)}
        if one.is_elementwise and len(one.operands) == 1 and len(shapes) == 1:
            [source] = one.operands
            if source in made and used[source] == 1:
                pairs += [(source, target) for target in one.results]
    return pairs


def _unrolled(problem: Problem) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Operators of several steps of one module, and their tensors."""
    tensors: dict[int, object] = dict.fromkeys(problem.tensors)
    made = {number for one in problem.operations for number in one.results}
    for number in problem.tensors.keys() - made:
        tensors[number] = number  # a weight or an input is like no other
    for pair in problem.ties:
        tensors[pair[0]] = tensors[pair[1]] = pair
    operations: list[object] = [
        (module, one.name, one.strategies, tuple(sorted(one.sizes.items())))
        for module, one in zip(_modules(problem), problem.operations, strict=True)
    ]
    fixed = {number for number, label in tensors.items() if label is not None}
    for _ in range(ROUNDS):
        sides = (
            [tuple(tensors[n] for n in side) for side in (one.operands, one.results)]
            for one in problem.operations
        )
        operations = [
            hash((label, *own)) for label, own in zip(operations, sides, strict=True)
        ]
        near: dict[int, set[object]] = {number: set() for number in problem.tensors}
        for label, one in zip(operations, problem.operations, strict=True):
            for side, numbers in enumerate((one.operands, one.results)):
                for at, number in enumerate(numbers):
                    place = 0 if one.name in SYMMETRIC else at
                    near[number].add((label, side, place))
        for number in problem.tensors.keys() - fixed:
            shape = problem.tensors[number].shape
            tensors[number] = hash((shape, frozenset(near[number])))
    first: dict[object, int] = {}
    alike = {at: first.setdefault(label, at) for at, label in enumerate(operations)}
    known: dict[object, int] = {}
    pairs = []
    for number in problem.tensors.keys() - fixed:
        pairs.append((known.setdefault(tensors[number], number), number))
    return alike, pairs


def _modules(problem: Problem) -> list[str]:
    """The module of each operator. One of backward, which ran in none, has that of the
    last tensor it reads that forward made or read; else of what it goes on from."""
    of_tensor: dict[int, str] = {}
    found = []
    for one in problem.operations:
        module = one.module
        if not module:
            known = [of_tensor[n] for n in one.operands if n in of_tensor]
            module = known[-1] if known else ""
        found.append(module)
        for number in (*one.operands, *one.results):
            of_tensor.setdefault(number, module)
    return found

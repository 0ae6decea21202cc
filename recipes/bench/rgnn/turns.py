"""Fixed settings of a cell in turns: what they are compared by.

Steps that the host bounds drift by 10 to 30 % within seconds, and settings differ by
less. Measured one after the other, each has a host of its own; in rounds of a few steps
each, forwards and backwards, all have the same. Memory and the first call are measured
alone, before.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from recipes.bench.harness.cells import Cells, limited
from recipes.bench.harness.timing import times_ms
from recipes.bench.rgnn.cells import Work
from recipes.bench.rgnn.contenders import Graphs, build, step_of
from recipes.bench.rgnn.measure import FAST_MS, OutOfTimeError, release

NUM_ROUNDS = 20
STEPS_A_ROUND = 5


def times_in_turns(
    steps: Sequence[Callable[[], object]], device: torch.device
) -> list[list[float]]:
    """Times of each step: NUM_ROUNDS rounds, every other one in reverse order."""
    found: list[list[float]] = [[] for _ in steps]
    for number in range(NUM_ROUNDS):
        order = range(len(steps))
        for i in reversed(order) if number % 2 else order:
            found[i] += times_ms(steps[i], device, STEPS_A_ROUND)
    return found


def take_turns(
    works: Sequence[Work], graphs: Graphs, cells: Cells, limit_s: float
) -> None:
    """Time settings of one cell that were measured alone, and are fast, once more in
    turns; the times taken alone stay if there is no time for it."""
    fast = [work for work in works if cells[work.name].get("ms", FAST_MS) < FAST_MS]
    if len(fast) < 2 or limit_s <= 0:
        return
    release(graphs.device)
    graph = graphs.get(fast[0].cell.graph)
    try:
        with limited(limit_s, OutOfTimeError):
            layers = [build(work.cell, work.contender, graph) for work in fast]
            steps = [step_of(layer, fast[0].cell.task) for layer in layers]
            for step in steps:
                step()
            times = times_in_turns(steps, graphs.device)
    except (OutOfTimeError, torch.OutOfMemoryError) as error:
        print("no turns:", fast[0].name, type(error).__name__, flush=True)
        return
    for work, mine in zip(fast, times, strict=True):
        known = {"ms": median(mine), "num_timed": len(mine)}
        known |= {"ms_least": min(mine), "ms_most": max(mine)}
        cells.record(work.name, {**cells[work.name], **known})

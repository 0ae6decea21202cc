"""Fixed settings of a cell in turns: what they are compared by.

Steps that the host bounds drift by 10 to 30 % within seconds, and settings differ by
less. Measured one after the other, each has a host of its own; in rounds of a few steps
each, forwards and backwards, all have the same. Memory and the first call are measured
alone, before.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from recipes.bench.harness.cells import Cells
from recipes.bench.harness.timing import times_ms
from recipes.bench.rgnn.cells import SETTINGS, Cell, Phase, Work
from recipes.bench.rgnn.contenders import Layer, step_of
from recipes.bench.rgnn.measure import FAST_MS, OutOfTimeError, deadline

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


class Waiting(NamedTuple):
    """A setting that was measured alone, ready to step."""

    work: Work
    layer: Layer


class Turns:
    """The settings of the cell at hand."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cell: Cell | None = None
        self.waiting: list[Waiting] = []

    @property
    def held_bytes(self) -> int:
        """Device memory of the layers that wait for their turn."""
        if self.device.type != "cuda":
            return 0
        layers = [each.layer for each in self.waiting]
        tensors = [t for x in layers for t in (x.x, x.labels, *x.module.parameters())]
        return sum(t.nbytes for t in tensors)

    def take(self, work: Work, values: dict[str, Any], layer: Layer) -> None:
        """A measurement of one contender: the memory of those that wait is not its
        own, and if it is one of several fast settings, it waits, too."""
        for name in ("peak_bytes", "resident_bytes"):
            if values.get(name) is not None:
                values[name] -= self.held_bytes
        if work.phase is not Phase.ABLATION or work.contender not in SETTINGS:
            return
        if values["status"] == "ok" and values["ms"] < FAST_MS:
            layer.clear()
            self.waiting.append(Waiting(work, layer))

    def finish(self, cells: Cells, limit_s: float) -> None:
        """Times in turns, into the records of the cell; those taken alone stay if
        there is no time."""
        waiting, self.waiting = self.waiting, []
        if len(waiting) < 2 or limit_s <= 0:
            return
        steps = [step_of(each.layer, each.work.cell.task) for each in waiting]
        try:
            with deadline(limit_s):
                times = times_in_turns(steps, self.device)
        except (OutOfTimeError, torch.OutOfMemoryError) as error:
            print("no turns:", waiting[0].work.name, type(error).__name__, flush=True)
            return
        for each, mine in zip(waiting, times, strict=True):
            known = {"ms": median(mine), "num_timed": len(mine)}
            known |= {"ms_least": min(mine), "ms_most": max(mine)}
            name = each.work.name
            cells.record(name, {**cells[name], **known})

    def begin(self, cell: Cell) -> bool:
        """Whether `cell` is another one than that of the settings that wait."""
        other, self.cell = self.cell != cell, cell
        return other

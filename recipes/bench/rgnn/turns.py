"""Fixed settings of a cell in turns: what they are compared by.

Steps that the host bounds drift by 10 to 30 % within seconds, and settings differ by
less. Measured one after the other, each has a host of its own; in rounds of a few steps
each, forwards and backwards, all have the same. Memory and the first call are measured
alone, before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from recipes.bench.rgnn.cells import SETTINGS, Cell, Phase, Work
from recipes.bench.rgnn.contenders import Layer, step_of
from recipes.bench.rgnn.measure import FAST_MS, OutOfTimeError, deadline, times_ms
from recipes.bench.rgnn.results import Results

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


@dataclass
class Turns:
    """The settings of the cell at hand that were measured alone, ready to step."""

    device: torch.device
    cell: Cell | None = None
    works: list[Work] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Device memory of the layers that wait for their turn."""
        if self.device.type != "cuda":
            return 0
        tensors = [t for x in self.layers for t in (x.x, x.labels)]
        tensors += [t for x in self.layers for t in x.module.parameters()]
        return sum(t.numel() * t.element_size() for t in tensors)

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
            self.works.append(work)
            self.values.append(values)
            self.layers.append(layer)

    def finish(self, results: Results, run: int, limit_s: float) -> None:
        """Times in turns, into the records of the cell; those taken alone stay if
        there is no time."""
        works, values, layers = self.works, self.values, self.layers
        self.works, self.values, self.layers = [], [], []
        if len(works) < 2 or limit_s <= 0:
            return
        steps = [step_of(x, w.cell.task) for x, w in zip(layers, works, strict=True)]
        try:
            with deadline(limit_s):
                times = times_in_turns(steps, self.device)
        except (OutOfTimeError, torch.OutOfMemoryError) as error:
            print("no turns:", works[0].key(), type(error).__name__, flush=True)
            return
        for work, known, mine in zip(works, values, times, strict=True):
            known["ms"], known["num_timed"] = median(mine), len(mine)
            known["ms_least"], known["ms_most"] = min(mine), max(mine)
            results.add(work, run, known)

    def begin(self, cell: Cell) -> bool:
        """Whether `cell` is another one than that of the settings that wait."""
        other, self.cell = self.cell != cell, cell
        return other

"""Time several ways to gather against one another: in rounds, in bursts.

A machine drifts, and a gather of 0.1 ms is near what launching it takes. So the ways
take turns, round after round; a turn is a burst of calls back to back, as in training,
of 2 ms or more; and what counts is the median of the turns.
"""

import functools
import os
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from recipes.bench.gather.methods import Method
from recipes.bench.gather.timing import DEVICE, check_rows, indices, once_ms
from recipes.bench.harness.timing import wait

# Those that this process may use: more threads than that would be slow.
CORES = len(os.sched_getaffinity(0))
# Turns, by the most seconds that a call is expected to take.
TURNS = ((0.005, 7), (0.025, 3), (0.1, 2))
BURST_S = 0.002
MOST_CALLS = 8
WARM_ROWS = 1000
PAIRS_A_TURN = 2


@dataclass(kw_only=True)
class Contender:
    """One way and what it took so far."""

    method: Method
    turns: int
    calls: int
    ms: list[float] = field(default_factory=list)
    error: str = ""


class Rounds:
    """The ways on one table and batch. Indices are fresh for every call of a way, so
    that no cache remembers the rows."""

    def __init__(self, table: torch.Tensor, batch: int, methods: list[Method]) -> None:
        self.table = table
        self.out = torch.empty(batch, table.shape[1], dtype=torch.uint8, device=DEVICE)
        self.contenders = [contender(m, self.out.numel()) for m in methods]
        most = max(c.turns * c.calls for c in self.contenders)
        self.sets = indices(batch, table.shape[0], max(2, most))
        on_cpu = [c for c in self.contenders if c.method.on_cpu]
        most = max((c.turns * c.calls for c in on_cpu), default=0)
        self.cpu_sets = [index.cpu() for index in self.sets[: max(1, most)]]

    def run(self) -> tuple[dict[str, float], dict[str, str]]:
        """Milliseconds of a call, and why a way has none."""
        for contender in self.contenders:
            self._attempt(contender, self._first)
        for turn in range(TURNS[0][1]):
            for contender in self.contenders:
                if turn < contender.turns and not contender.error:
                    self._attempt(contender, functools.partial(self._turn, turn))
        torch.set_num_threads(CORES)
        ms = {
            c.method.name: round(statistics.median(c.ms), 4)
            for c in self.contenders
            if not c.error
        }
        return ms, {c.method.name: c.error for c in self.contenders if c.error}

    def _attempt(self, contender: Contender, part: "functools.partial[None]") -> None:
        torch.set_num_threads(contender.method.threads or CORES)
        try:
            part(contender)
        except Exception as error:  # the other ways still count
            contender.error = f"{type(error).__name__}: {error}"[:300]

    def _first(self, contender: Contender) -> None:
        """Whether the rows are right; the only turn of a way that takes long."""
        work, index = contender.method.work, self._sets(contender)[0]
        self.out.fill_(255)
        wait()
        if contender.turns > 1:
            work(index, self.out)
        else:
            work(index[:WARM_ROWS], self.out[:WARM_ROWS])
            wait()
            contender.ms.append(once_ms(functools.partial(work, index, self.out)))
            contender.turns = 0
        check_rows(self.table, index.to(DEVICE), self.out)

    def _turn(
        self, turn: int, contender: Contender, warm_rows: int = WARM_ROWS
    ) -> None:
        work, sets = contender.method.work, self._sets(contender)
        # Threads of the CPU and caches of the interpreter wake up outside the time.
        work(sets[0][:warm_rows], self.out[:warm_rows])
        wait()

        def burst() -> None:
            for k in range(contender.calls):
                work(sets[(turn * contender.calls + k) % len(sets)], self.out)

        contender.ms.append(once_ms(burst) / contender.calls)

    def alternate(self) -> dict[str, Any]:
        """Two ways in pairs of turns, A B, B A, A B: medians, and the median of each
        pair's ratio. For ways that must be equal: each turn comes behind its like, not
        behind whichever way stands before it in the list, and an untimed call of its
        own (not of `WARM_ROWS`, which may take another path) warms it."""
        first, second = self.contenders
        for each in self.contenders:
            self._first(each)
        ratios = []
        for turn in range(first.turns * PAIRS_A_TURN):
            pair = (first, second) if turn % 2 == 0 else (second, first)
            for each in pair:
                torch.set_num_threads(each.method.threads or CORES)
                self._turn(turn, each, warm_rows=len(self.out))
            ratios.append(second.ms[-1] / first.ms[-1])
        torch.set_num_threads(CORES)
        ms = {c.method.name: round(statistics.median(c.ms), 4) for c in (first, second)}
        return {"ms": ms, "ratio": round(statistics.median(ratios), 4)}

    def _sets(self, contender: Contender) -> list[torch.Tensor]:
        return self.cpu_sets if contender.method.on_cpu else self.sets


def contender(method: Method, num_bytes: int) -> Contender:
    """How many turns of how many calls a way gets."""
    expected_s = max(1e-5, num_bytes / method.gbps / 1e9)
    turns = next((turns for most, turns in TURNS if expected_s <= most), 1)
    calls = max(1, min(MOST_CALLS, int(BURST_S / expected_s)))
    return Contender(method=method, turns=turns, calls=calls)

"""What being sure costs: steps with and without the self-check and the proofs.

GPT blocks in bf16, whose steps the device bounds. One session, whose steps run in
pairs: with the verifier of `verify="off"`, which compares one rebuilt tensor in 64, and
the proofs that no recipe passes a changed tensor; and without both. A pair is rounds of
four blocks of steps, sure, unsure, unsure, sure, the next pair's the other way round: a
clock that drifts evenly falls on both alike. The host runs ahead within a block:
its jitter is nobody's. `over` is the mean of the pairs' ratios with its 95 % interval
(Student's t).

    python -m recipes.bench safety.self_check --plans recipes --seconds 75
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import ssdtrain
from recipes.bench.harness.blocks import Size, Steps
from recipes.bench.harness.cli import Bench
from ssdtrain.api import Session
from ssdtrain.cache import verify
from ssdtrain.cache.verify import Verifier
from ssdtrain.rebuild import finder
from ssdtrain.rebuild.frame import CallerFrame

PLANS: dict[str, dict[str, Any]] = {
    "recipes": {"plan": "keep-all", "recompute": "auto"},
    "auto": {"plan": "auto", "max_overhead": 0.1},
    "offload-all": {"plan": "offload-all"},
}
SETTLING_STEPS = 16
"""At most so many until a plan is followed."""
BLOCK_STEPS = 5
TRIMMED = 0.1
"""Of the steps at either end: where others use the machine, one step in some hundred
takes far longer. One in three has a comparison: these stay."""
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 7: 2.365, 11: 2.201, 23: 2.069}
"""97.5 % of Student's t by degrees of freedom."""

Block = Callable[[bool], Sequence[float]]
"""Times of some steps, sure or not, in ms."""


class Unproved(CallerFrame):
    """Everything is taken for pure, and nothing is looked at."""

    def __init__(self, *args: Any) -> None:
        self.module, self.arguments, self.is_pure = None, [], True


class Pair(NamedTuple):
    """Times of a step, in ms."""

    sure: float
    unsure: float

    @property
    def ratio(self) -> float:
        """Of what being sure takes."""
        return self.sure / self.unsure


def trimmed_mean(times: Sequence[float]) -> float:
    """The mean without the shortest and the longest."""
    cut = int(TRIMMED * len(times))
    return statistics.fmean(sorted(times)[cut : len(times) - cut])


def measure(block: Block, num_pairs: int, num_rounds: int) -> list[Pair]:
    """Pairs of rounds of four blocks."""
    pairs = []
    for number in range(num_pairs):
        first = number % 2 == 0
        times: dict[bool, list[float]] = {True: [], False: []}
        for sure in (first, not first, not first, first) * num_rounds:
            times[sure] += block(sure)
        pairs.append(Pair(trimmed_mean(times[True]), trimmed_mean(times[False])))
    return pairs


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The mean ratio and its interval."""
    ratios = [pair.ratio for pair in pairs]
    mean, error = statistics.fmean(ratios), math.nan
    if len(ratios) - 1 in STUDENT:
        error = statistics.stdev(ratios) / math.sqrt(len(ratios))
        error *= STUDENT[len(ratios) - 1]
    return {
        "step_ms": round(statistics.median(pair.unsure for pair in pairs), 3),
        "over": round(mean, 5),
        "interval": [round(mean - error, 5), round(mean + error, 5)],
        "pair_ratios": [round(ratio, 5) for ratio in ratios],
    }


class Checked:
    """Steps of one session."""

    def __init__(self, steps: Steps, session: Session) -> None:
        self._steps, self._session = steps, session
        self._checks = session.cache.verifier

    @contextmanager
    def _unsure(self) -> Iterator[None]:
        self._session.cache.verifier = Verifier()
        try:
            with mock.patch.object(finder, "CallerFrame", Unproved):
                yield
        finally:
            self._session.cache.verifier = self._checks

    def block(self, sure: bool) -> list[float]:
        """Times of some steps; the first follows another kind of step, and a wait for
        the device, and is none of them."""
        marks = []
        with nullcontext() if sure else self._unsure():
            for _ in range(BLOCK_STEPS + 1):
                marks.append(self._steps.step().marks[-1])
        return self._steps.clock.between(marks)

    def settle(self) -> float:
        """Until the plan is followed, and the digest's kernels are compiled; what a
        block takes then, in ms."""
        for number in range(SETTLING_STEPS):
            self._steps.step()
            if number > 2 and self._session.is_settled:
                break
        with mock.patch.object(verify, "SELF_CHECK_PERIOD", 1):
            self.block(True)
        self.block(False)
        return (BLOCK_STEPS + 1) * statistics.fmean(self.block(True))


def cost(steps: Steps, plan: str, num_pairs: int, seconds: float) -> dict[str, Any]:
    """One plan, with and without."""
    with ssdtrain.offload(steps.model, target="host", **PLANS[plan]) as session:
        checked = Checked(steps, session)
        block_ms = checked.settle()
        num_rounds = max(1, int(1e3 * seconds / (num_pairs * 4 * block_ms)))
        pairs = measure(checked.block, num_pairs, num_rounds)
        reports = session.steps[-4 * num_rounds * num_pairs * BLOCK_STEPS :]
        settled = session.is_settled
    return {
        **summary(pairs),
        "steps_a_pair": 4 * num_rounds * BLOCK_STEPS,
        "num_verified": sum(report.num_verified for report in reports),
        "num_reports": len(reports),
        "num_records": reports[-1].num_records,
        "recomputed_gb": round(reports[-1].bytes_recomputed / 1e9, 3),
        "offloaded_gb": round(reports[-1].bytes_offloaded / 1e9, 3),
        "settled": settled,
    }


def main(
    bench: Bench,
    *,
    size: str = "4096x4",
    batch: int = 8,
    sequence: int = 1024,
    pairs: int = 12,
    seconds: float = 75,
    plans: tuple[str, ...] = ("recipes",),
) -> None:
    """Run the cells that are missing.

    Args:
        size: hidden x layers
        seconds: of a plan's pairs
    """
    about = {"size": size, "batch": batch, "sequence": sequence, "pairs": pairs}
    cells = bench.cells({**about, "seconds": seconds})
    steps = Steps(Size(*map(int, size.split("x")), batch, sequence), bench.device)
    for plan in plans:
        cells.run(f"{size}/{plan}", cost, steps, plan, pairs, seconds)

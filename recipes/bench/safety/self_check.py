"""What being sure costs: steps with and without the self-check and the proofs.

GPT blocks in bf16. One session, whose steps run in pairs: with the verifier of
`verify="off"`, which compares one rebuilt tensor in 64, and the proofs that no recipe
passes a changed tensor; and without both. The order changes from pair to pair. A half's
time is the median of its steps; `over` is the mean of the pairs' ratios with its 95 %
interval (Student's t).

    python -m recipes.bench.safety.self_check --size 4096x8
"""

import argparse
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import ssdtrain
from recipes.bench.common.blocks import Blocks, build
from recipes.bench.common.cells import RESULTS, Cells
from recipes.bench.offload.placement import Clock
from recipes.bench.safety.verify import SETTLING_STEPS, one_step
from ssdtrain.api import Session
from ssdtrain.cache import verify
from ssdtrain.cache.verify import NoVerifier
from ssdtrain.remat import finder
from ssdtrain.remat.scene import Scene

PLANS: dict[str, dict[str, Any]] = {
    "auto": {"plan": "auto", "max_overhead": 0.1},
    "offload-all": {"plan": "offload-all"},
}
STUDENT = {5: 2.571, 7: 2.365, 11: 2.201, 15: 2.131, 23: 2.069}
"""97.5 % of Student's t by degrees of freedom."""


class Unproved(Scene):
    """Everything is taken for pure, and nothing is looked at."""

    def __init__(self, *args: Any) -> None:
        self.module, self.arguments, self.is_pure = None, [], True


class Pairs:
    """Steps of one session in turns."""

    def __init__(self, model: Blocks, x: torch.Tensor, session: Session) -> None:
        self._model, self._x, self._session = model, x, session
        self._clock = Clock(x.device)
        self._checks = session.cache.verifier

    @contextmanager
    def _unsure(self) -> Iterator[None]:
        self._session.cache.verifier = NoVerifier()
        try:
            with mock.patch.object(finder, "Scene", Unproved):
                yield
        finally:
            self._session.cache.verifier = self._checks

    def ms(self, num_steps: int) -> float:
        """Median time of some steps: where others use the machine, one step in some
        hundred takes far longer."""
        times = [one_step(self._model, self._x, self._clock)[0]]
        times += [
            one_step(self._model, self._x, self._clock)[0] for _ in range(num_steps)
        ]
        return statistics.median(times[1:])  # the first follows another kind of step

    def settle(self) -> None:
        """Until the plan is followed, and the digest's kernels are compiled."""
        for number in range(SETTLING_STEPS):
            self.ms(1)
            if number and self._session.is_settled:
                break
        with mock.patch.object(verify, "SELF_CHECK_PERIOD", 1):
            self.ms(2)
        self.ms(2)

    def run(self, num_pairs: int, num_steps: int) -> list[tuple[float, float]]:
        """(with, without) of each pair, in ms."""
        pairs = []
        for number in range(num_pairs):
            if number % 2:
                sure = self.ms(num_steps)
            with self._unsure():
                unsure = self.ms(num_steps)
            if not number % 2:
                sure = self.ms(num_steps)
            pairs.append((sure, unsure))
        return pairs


def cost(
    model: Blocks, x: torch.Tensor, plan: str, num_pairs: int, num_steps: int
) -> dict[str, Any]:
    """One plan, with and without."""
    with ssdtrain.offload(model, target="host", **PLANS[plan]) as session:
        pairs = Pairs(model, x, session)
        pairs.settle()
        found = pairs.run(num_pairs, num_steps)
        reports = session.steps[-2 * num_pairs * num_steps :]
    ratios = [sure / unsure for sure, unsure in found]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    error *= STUDENT.get(num_pairs - 1, 2.571)
    mean = statistics.fmean(ratios)
    return {
        "step_ms": round(statistics.median(unsure for _, unsure in found), 3),
        "over": round(mean, 5),
        "interval": [round(mean - error, 5), round(mean + error, 5)],
        "pair_ratios": [round(ratio, 5) for ratio in ratios],
        "num_verified": sum(report.num_verified for report in reports),
        "num_records": sum(report.num_records for report in reports),
        "recomputed_gb": round(reports[-1].bytes_recomputed / 1e9, 3),
        "settled": session.is_settled,
    }


def main() -> None:
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="4096x8", help="hidden x layers")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=7, help="of one half of a pair")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--budget-s", type=float, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ("size", "batch", "sequence", "pairs", "steps")
    settings = {name: getattr(options, name) for name in names}
    out = options.out or RESULTS / "safety" / "self_check.json"
    cells = Cells(out, options.budget_s, settings)
    hidden, num_layers = map(int, options.size.split("x"))
    model = build(hidden, num_layers, device)
    torch.manual_seed(1)
    shape = (options.batch, options.sequence, hidden)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    for plan in options.plans:
        cells.run(
            f"{options.size}/{plan}",
            lambda p=plan: cost(model, x, p, options.pairs, options.steps),
        )


if __name__ == "__main__":
    main()

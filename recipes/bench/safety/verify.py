"""What verify mode costs: a step under `checksum` and `shadow`, over the same step off.

GPT blocks in bf16; a plan has one session, whose verifier is exchanged from step to
step: the same plan and the same pinned memory under every mode, and `off` and
`checksum` take turns, so that clocks and temperature are the same for both. `over_off`
is the median of the pairs' ratios. `shadow`, which keeps a copy of all, comes last.
`digest` is the digest alone, in GB/s of the tensor, beside the fastest possible pass
over it (a plain sum of its words).

    python -m recipes.bench safety.verify --size 12288x2 --budget-s 45
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import ssdtrain
from recipes.bench.harness.blocks import Size, Steps
from recipes.bench.harness.cli import Bench
from recipes.bench.harness.timing import Clock
from ssdtrain.api import Session
from ssdtrain.cache.digest import Digests, word_bytes
from ssdtrain.cache.verify import open_verifier
from ssdtrain.config import Verify

SETTLING_STEPS = 12
"""At most so many until a plan is followed."""
SHADOW_STEPS = 2
PLANS: dict[str, dict[str, Any]] = {
    "offload-all": {"plan": "offload-all", "recompute": "off"},
    "recipes + auto": {"plan": "auto", "recompute": "auto"},
    "keep-all": {"plan": "keep-all", "recompute": "off"},
}


def digest_speed(device: torch.device, num_mib: int) -> dict[str, Any]:
    """GB/s of the digest: a dense tensor, a slice of a fused projection, the bound."""
    digests, clock = Digests(device), Clock(device)
    rows = num_mib * 1024 * 1024 // 2 // (3 * 4096)
    fused = torch.randn(rows, 3, 4096, device=device).to(torch.bfloat16)
    words = fused.view(-1).view(torch.int64)

    def gb_per_s(call: Callable[[], Any], num_bytes: int) -> float:
        times = [clock.once(call) for _ in range(8)]
        return round(num_bytes / 1e6 / statistics.median(times[2:]), 1)

    query = fused[:, 0]
    return {
        "sum_gb_per_s": gb_per_s(lambda: words.sum(), words.nbytes),
        "dense_gb_per_s": gb_per_s(
            lambda: digests.of(fused, word_bytes(fused)), fused.nbytes
        ),
        "rows_gb_per_s": gb_per_s(
            lambda: digests.of(query, word_bytes(query)), query.nbytes
        ),
    }


class Modes:
    """One session whose steps run under the mode that is asked for."""

    def __init__(self, steps: Steps, session: Session) -> None:
        self._steps, self._session = steps, session
        counters = session.cache.ledger.counters
        self._verifiers = {
            mode: open_verifier(mode, steps.device, [steps.model], counters)
            for mode in Verify
        }
        self.times: dict[Verify, list[float]] = {mode: [] for mode in Verify}
        self._ran: list[Verify] = []

    def run(self, mode: Verify) -> float:
        """Time of one step in ms."""
        self._session.cache.verifier = self._verifiers[mode]
        ms = self._steps.ms(self._steps.step())
        self._ran.append(mode)
        return ms

    def settle(self) -> None:
        """Until the plan is followed; kernels of the digest are compiled too."""
        for number in range(SETTLING_STEPS):
            self.run(Verify.OFF)
            if number and self._session.is_settled:
                break
        self.run(Verify.CHECKSUM)
        self.run(Verify.OFF)

    def pairs(self, num: int, left_s: Callable[[], float]) -> None:
        """`off` and `checksum` in turns: one pair at least."""
        order = (Verify.OFF, Verify.CHECKSUM)
        for turn in range(num):
            if turn and left_s() < 0:
                break
            for mode in order if turn % 2 == 0 else order[::-1]:
                self.times[mode].append(self.run(mode))
        if left_s() > 0:
            self.times[Verify.SHADOW] += [
                self.run(Verify.SHADOW) for _ in range(SHADOW_STEPS)
            ]

    def result(self) -> dict[str, Any]:
        """Step times, their ratios, peaks and what was verified."""
        off = self.times[Verify.OFF]
        checked = self.times[Verify.CHECKSUM]
        ratios = [a / b for a, b in zip(checked, off, strict=True)]
        over = {"off": 1.0, "checksum": round(statistics.median(ratios), 4)}
        shadow = self.times[Verify.SHADOW]
        if shadow:
            # The first one allocates its copies.
            over["shadow"] = round(min(shadow) / statistics.median(off), 4)
        # The last step's report is there once another one has begun.
        reports = dict(zip(self._ran, self._session.steps, strict=False))
        ran = {mode: r for mode, r in reports.items() if self.times[mode]}
        last = reports[Verify.CHECKSUM]
        return {
            "step_ms": {m.value: statistics.median(self.times[m]) for m in ran},
            "over_off": over,
            "pair_ratios": [round(ratio, 4) for ratio in ratios],
            "peak_gb": {
                m.value: round(r.allocated.forward_backward_bytes / 1e9, 2)
                for m, r in ran.items()
                if r.allocated is not None
            },
            "num_verified": {m.value: r.num_verified for m, r in ran.items()},
            "verified_gb": round(last.bytes_verified / 1e9, 2),
            "recomputed_gb": round(last.bytes_recomputed / 1e9, 2),
            "offloaded_gb": round(last.bytes_offloaded / 1e9, 2),
            "settled": self._session.is_settled,
        }


def cost(
    steps: Steps, plan: str, num_pairs: int, left_s: Callable[[], float]
) -> dict[str, Any]:
    """One plan under all modes."""
    with ssdtrain.offload(steps.model, target="host", **PLANS[plan]) as session:
        modes = Modes(steps, session)
        modes.settle()
        modes.pairs(num_pairs, left_s)
        return modes.result()


def main(
    bench: Bench,
    *,
    size: str = "12288x2",
    batch: int = 16,
    sequence: int = 1024,
    pairs: int = 5,
    plans: tuple[str, ...] = tuple(PLANS),
) -> None:
    """Run the cells that are missing.

    Args:
        size: hidden x layers
    """
    about = {"size": size, "batch": batch, "sequence": sequence, "pairs": pairs}
    cells, device = bench.cells(about), bench.device
    cells.run("digest", digest_speed, device, 768 if device.type == "cuda" else 24)
    steps = Steps(Size(*map(int, size.split("x")), batch, sequence), device)
    for at, plan in enumerate(plans):
        # Each of the plans that are left gets its share of what is left.
        until = time.monotonic() + max(0.0, cells.left_s()) / (len(plans) - at)

        def left_s(until: float = until) -> float:
            return until - time.monotonic()

        cells.run(f"{size}/{plan}", cost, steps, plan, pairs, left_s)

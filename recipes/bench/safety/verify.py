"""What verify mode costs: a step under `checksum` and `shadow`, over the same step off.

GPT blocks in bf16; a plan has one session, whose verifier is exchanged from step to
step: the same plan and the same pinned memory under every mode, and `off` and
`checksum` take turns, so that clocks and temperature are the same for both. `over_off`
is the median of the pairs' ratios. `shadow`, which keeps a copy of all, comes last.

    python -m recipes.bench safety.verify --size 12288x2 --budget-s 45
"""

import statistics
from typing import Any

import ssdtrain
from recipes.bench.harness.blocks import Size, Steps
from recipes.bench.harness.cli import Bench
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


def cost(steps: Steps, plan: str, num_pairs: int) -> dict[str, Any]:
    """One plan under all modes: step times, their ratios, peaks, what was verified."""
    with ssdtrain.offload(steps.model, target="host", **PLANS[plan]) as session:
        given = steps.device, [steps.model], session.cache.ledger.counters
        verifiers = {mode: open_verifier(mode, *given) for mode in Verify}
        ran: list[Verify] = []
        times: dict[Verify, list[float]] = {mode: [] for mode in Verify}

        def run(mode: Verify) -> float:
            session.cache.verifier = verifiers[mode]
            ran.append(mode)
            return steps.ms(steps.step())

        for number in range(SETTLING_STEPS):
            run(Verify.OFF)
            if number and session.is_settled:
                break
        for mode in (Verify.CHECKSUM, Verify.OFF):  # kernels are compiled
            run(mode)
        order = (Verify.OFF, Verify.CHECKSUM)
        for turn in range(num_pairs):
            for mode in order if turn % 2 == 0 else order[::-1]:
                times[mode].append(run(mode))
        times[Verify.SHADOW] = [run(Verify.SHADOW) for _ in range(SHADOW_STEPS)]
        # The last step's report is there once another one has begun.
        run(Verify.OFF)
        reports = dict(zip(ran, session.steps, strict=False))
        settled = session.is_settled
    pairs = zip(times[Verify.CHECKSUM], times[Verify.OFF], strict=True)
    ratios = [round(a / b, 4) for a, b in pairs]
    # The first step under `shadow` allocates its copies.
    shadow = min(times[Verify.SHADOW]) / statistics.median(times[Verify.OFF])
    last = reports[Verify.CHECKSUM]
    return {
        "step_ms": {mode.value: statistics.median(times[mode]) for mode in Verify},
        "over_off": {
            "checksum": statistics.median(ratios),
            "shadow": round(shadow, 4),
        },
        "pair_ratios": ratios,
        "peak_gb": {
            mode.value: round(report.allocated.forward_backward_bytes / 1e9, 2)
            for mode, report in reports.items()
            if report.allocated is not None
        },
        "num_verified": {m.value: report.num_verified for m, report in reports.items()},
        "verified_gb": round(last.bytes_verified / 1e9, 2),
        "settled": settled,
    }


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
    cells = bench.cells(about)
    steps = Steps(Size(*map(int, size.split("x")), batch, sequence), bench.device)
    for plan in plans:
        cells.run(f"{size}/{plan}", cost, steps, plan, pairs)

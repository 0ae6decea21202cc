"""Plans' predicted steps with the clock modelled, against recorded steps.

    python -m recipes.bench foresight.plans [--source REGRET.json --out PLANS.json]

Reads what `planner.regret --only prediction` wrote (`results/planner/planner.json`):
plans of three models, drawn at random and chosen, each with its predicted and its
measured step on an H200. The power is found on a model's plain step alone, which a run
measures in any case; all else of the clock's model is as shipped, or found on two of
the three and judged on the third, in turn.
"""

import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.bench.harness import records
from recipes.bench.harness.records import RESULTS
from ssdtrain.tools.foresight.power import Settled

Row = dict[str, Any]
MOST_WATTS, BISECTIONS = 5000.0, 40
NUM_DRAWS = 1000
TOLD_APART = 1.96
"""Standard deviations: 95 % of a normal distribution."""
GRID = [
    Settled(exponent=exponent, bound_share=share, relief=relief, beside_copies=beside)
    for exponent in (1.0, 2.0, 3.0, 4.0)
    for share in (0.5, 0.8, 1.0)
    for relief in (0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
    for beside in (1.0, 2.0, 3.0, 4.0)
]
"""Everything but the power, which is each run's own."""


def predicted_ms(plans: Sequence[Row], model: Settled | None) -> list[float]:
    """The plans' steps, with the clock modelled where there is a model."""
    if model is None:
        return [p["predicted_ms"] for p in plans]
    keep_ms = _plain(plans)["predicted_ms"]
    return [
        model.step_ms(
            p["predicted_ms"], keep_ms + p["recompute_ms"], p["predicted_stall_ms"]
        )
        for p in plans
    ]


def errors(plans: Sequence[Row], model: Settled | None) -> list[float]:
    """|predicted - measured| / measured."""
    return [
        abs(predicted / p["step_ms"] - 1)
        for predicted, p in zip(predicted_ms(plans, model), plans, strict=True)
    ]


def _plain(plans: Sequence[Row]) -> Row:
    return next(p for p in plans if p["policy"] == "keep-all")


def of_the_plain_step(model: Settled, plans: Sequence[Row]) -> Settled:
    """The same with the power that the plans' own plain step tells."""
    plain = _plain(plans)
    return as_plain(model, plain["predicted_ms"], plain["step_ms"])


def as_plain(model: Settled, observed_ms: float, steady_ms: float) -> Settled:
    """The same, with the power at which the plain step, which moves and runs again
    nothing, takes among many what it was measured to take.

    Args:
        model: everything but its power stays.
        observed_ms: the plain step by the observed step's times.
        steady_ms: measured among many like it.
    """
    low, high = 0.0, MOST_WATTS
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        own = replace(model, full_watts=middle)
        is_low = own.step_ms(observed_ms, observed_ms, 0.0) < steady_ms
        low, high = (middle, high) if is_low else (low, middle)
    return replace(model, full_watts=low)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Of two orders of the same plans."""
    pairs = list(zip(first, second, strict=True))
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2)]
    agree, differ = sum(s > 0 for s in signs), sum(s < 0 for s in signs)
    return (agree - differ) / max(1, agree + differ)


def of_plans_told_apart(plans: Sequence[Row], predicted: Sequence[float]) -> Row:
    """Kendall's tau over the pairs of plans whose measured steps differ by more than
    the noise of two measurements explains at 95 %, and the share of all pairs that
    these are. Stands beside the plain figure, which counts every pair.

    A measurement's noise is what the plain step differs by, see
    `of_a_perfect_prediction`.
    """
    middle = statistics.median(p["keep_ms"] for p in plans)
    noise = statistics.pstdev([p["keep_ms"] / middle for p in plans])
    least = TOLD_APART * math.sqrt(2.0) * noise
    pairs = list(
        itertools.combinations(
            zip(predicted, [p["step_ms"] for p in plans], strict=True), 2
        )
    )
    apart = [
        (a, b) for a, b in pairs if a[1] != b[1] and abs(math.log(a[1] / b[1])) > least
    ]
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in apart]
    agree, differ = sum(sign > 0 for sign in signs), sum(sign < 0 for sign in signs)
    return {
        "differ_by": round(least, 4),
        "share_of_pairs": round(len(apart) / max(1, len(pairs)), 3),
        "tau": round((agree - differ) / max(1, len(apart)), 3),
    }


def over_the_plain_step(plans: Sequence[Row]) -> list[float]:
    """Measured steps over the plain step that was measured beside each: what the
    machine's drift leaves of them."""
    return [p["step_ms"] / p["keep_ms"] for p in plans]


def of_a_perfect_prediction(plans: Sequence[Row]) -> Row:
    """Kendall's tau that the measurement allows a prediction without any error.

    The plain step was measured again beside every plan: how much it differs is the
    noise of one measurement, drift of the machine included. The measured steps stand
    for the true ones and get that noise once more, many times. They lie further apart
    than the true ones, so that this is rather too much than too little.
    """
    middle = statistics.median(p["keep_ms"] for p in plans)
    noise = [p["keep_ms"] / middle for p in plans]
    drawn = random.Random(0)
    steps = [p["step_ms"] for p in plans]
    found = sorted(
        kendall_tau(steps, [step * drawn.choice(noise) for step in steps])
        for _ in range(NUM_DRAWS)
    )
    return {
        "mean": round(statistics.fmean(found), 3),
        "of_twenty_the_least": round(found[NUM_DRAWS // 20], 3),
        "of_twenty_the_most": round(found[-1 - NUM_DRAWS // 20], 3),
    }


def main(
    *,
    source: Path = RESULTS / "planner" / "planner.json",
    out: Path = RESULTS / "foresight" / "plans.json",
) -> None:
    """Predict them.

    Args:
        source: what `planner.regret` wrote
    """
    cells = json.loads(source.read_text())["cells"]
    models = {
        name.removeprefix("prediction/"): cell["plans"]
        for name, cell in cells.items()
        if name.startswith("prediction/") and cell.get("plans")
    }
    found: dict[str, Any] = {}
    for name, plans in models.items():
        others = [p for other, p in models.items() if other != name]
        best = min(
            GRID,
            key=lambda m: sum(
                statistics.fmean(errors(p, of_the_plain_step(m, p))) for p in others
            ),
        )
        own = predicted_ms(plans, of_the_plain_step(Settled(), plans))
        steps, least = ([p[key] for p in plans] for key in ("step_ms", "least_ms"))
        found[name] = {
            "plans": len(plans),
            "without_clock": _summary(plans, None),
            "shipped": _summary(plans, Settled()),
            "found_on_the_plain_step": _summary(
                plans, of_the_plain_step(Settled(), plans)
            ),
            "found_on_the_others": _summary(plans, of_the_plain_step(best, plans)),
            # No prediction can pass these by much: plans whose times differ by less
            # are ordered by chance.
            "tau_of_two_measurements": round(kendall_tau(least, steps), 3),
            "tau_of_a_perfect_prediction": of_a_perfect_prediction(plans),
            "plans_told_apart": of_plans_told_apart(plans, own),
            "tau_over_the_plain_step": round(
                kendall_tau(own, over_the_plain_step(plans)), 3
            ),
        }
    print(json.dumps(found, indent=1))
    records.write(out, found)


def _summary(plans: Sequence[Row], model: Settled | None) -> Row:
    seen = errors(plans, model)
    steps = [p["step_ms"] for p in plans]
    return {
        "mean_error": round(statistics.fmean(seen), 4),
        "worst_error": round(max(seen), 4),
        "tau": round(kendall_tau(predicted_ms(plans, model), steps), 3),
    }

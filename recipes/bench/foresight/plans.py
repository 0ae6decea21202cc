"""Plans' predicted steps with the clock modelled, against recorded steps.

    python -m recipes.bench.foresight.plans

Reads `results/planner/planner.json`: plans of three models, drawn at random and chosen,
each with its predicted and its measured step on an H200. One power model serves all
three; it was found on two of them and is judged on the third, in turn, or on the plain
step alone, which a run measures in any case.
"""

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recipes.bench.common import results
from recipes.bench.common.cells import RESULTS
from ssdtrain.foresight.power import Settled

MOST_WATTS, BISECTIONS = 5000.0, 40
GRID = [
    Settled(full_watts=float(watts), exponent=float(exponent))
    for watts in range(640, 1040, 20)
    for exponent in (1, 2, 3, 4)
]


def settled_ms(plan: dict[str, Any], keep_ms: float, model: Settled) -> float:
    """The plan's step with the clock modelled."""
    compute = keep_ms + plan["recompute_ms"]
    return model.step_ms(plan["predicted_ms"], compute, plan["predicted_stall_ms"])


def errors(plans: Sequence[dict[str, Any]], model: Settled | None) -> list[float]:
    """|predicted - measured| / measured."""
    keep_ms = next(p["predicted_ms"] for p in plans if p["policy"] == "keep-all")
    return [
        abs(
            (p["predicted_ms"] if model is None else settled_ms(p, keep_ms, model))
            / p["step_ms"]
            - 1
        )
        for p in plans
    ]


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


def kendall_tau(plans: Sequence[dict[str, Any]], model: Settled | None) -> float:
    """Of predicted and measured order."""
    keep_ms = next(p["predicted_ms"] for p in plans if p["policy"] == "keep-all")
    pairs = [
        (
            p["predicted_ms"] if model is None else settled_ms(p, keep_ms, model),
            p["step_ms"],
        )
        for p in plans
    ]
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2)]
    agree, differ = sum(s > 0 for s in signs), sum(s < 0 for s in signs)
    return (agree - differ) / max(1, agree + differ)


def _repeated(plans: Sequence[dict[str, Any]]) -> float:
    """Of the plans' medians and their least steps: what no prediction can pass by
    much, as plans whose times differ by less are ordered by chance."""
    pairs = [(p["least_ms"], p["step_ms"]) for p in plans]
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2)]
    agree, differ = sum(s > 0 for s in signs), sum(s < 0 for s in signs)
    return (agree - differ) / max(1, agree + differ)


def main() -> None:
    cells = json.loads((RESULTS / "planner" / "planner.json").read_text())["cells"]
    models = {
        name.removeprefix("prediction/"): cell["plans"]
        for name, cell in cells.items()
        if name.startswith("prediction/")
    }
    found: dict[str, Any] = {}
    for name, plans in models.items():
        others = [p for other, p in models.items() if other != name]
        best = min(
            GRID, key=lambda m: sum(statistics.fmean(errors(p, m)) for p in others)
        )
        shipped = Settled()
        plain = next(p for p in plans if p["policy"] == "keep-all")
        by_plain = as_plain(shipped, plain["predicted_ms"], plain["step_ms"])
        found[name] = {
            "plans": len(plans),
            "without_clock": _summary(plans, None),
            "found_on_the_others": _summary(plans, best),
            "shipped": _summary(plans, shipped),
            "found_on_the_plain_step": _summary(plans, by_plain),
            "tau_of_two_measurements": round(_repeated(plans), 3),
        }
    print(json.dumps(found, indent=1))
    results.write(RESULTS / "foresight" / "plans.json", found)


def _summary(plans: Sequence[dict[str, Any]], model: Settled | None) -> dict[str, Any]:
    seen = errors(plans, model)
    return {
        "mean_error": round(statistics.fmean(seen), 4),
        "worst_error": round(max(seen), 4),
        "tau": round(kendall_tau(plans, model), 3),
    }


if __name__ == "__main__":
    main()

"""The planner's and the ROK curve's tables."""

import itertools
import statistics
from typing import Any

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table
from ssdtrain.tools.foresight.fit import geometric_mean_error

TARGETS_GB = {"8192x4": 7.1, "12288x3": 8.0, "16384x2": 11.0, "6144x24": 9.0}


def targets(data: Data) -> str:
    """Keep, full recompute, plan and prediction of each size."""
    cells, rows = data["cells"], {}
    for name in dict.fromkeys(cell.split("/")[0] for cell in cells):
        keep, auto = cells.get(f"{name}/keep", {}), cells.get(f"{name}/auto", {})
        if "step_ms" not in keep or "step_ms" not in auto:
            continue
        again = cells.get(f"{name}/keep again", keep)
        keep = {**keep, "step_ms": (keep["step_ms"] + again["step_ms"]) / 2}
        rows[name] = {
            "keep": keep,
            "full": cells.get(f"{name}/full recompute", {}),
            "auto": auto,
            "target_gb": TARGETS_GB.get(name, 0),
            "equal": _equality(auto, keep, cells.get(f"{name}/keep again")),
        }
    columns: dict[str, Column] = {
        "": "{name}",
        "keep": "{keep[step_ms]:.0f} ms, {keep[peak_gb]:.1f} GB",
        "full recompute": lambda r: _over(r["full"], r["keep"], 1),
        "plan=auto": lambda r: _over(r["auto"], r["keep"], 2),
        "predicted": lambda r: _over(r["auto"]["plan"], r["keep"], 2),
        "target": lambda r: (
            f"{1 + r['auto']['max_overhead']:.2f}x, {r['target_gb']:.1f} GB"
        ),
        "equal": "{equal}",
    }
    return table(rows, columns)


def _over(cell: Data, keep: Data, places: int) -> str:
    return f"{cell['step_ms'] / keep['step_ms']:.3f}x, {cell['peak_gb']:.{places}f} GB"


def _equality(ours: Data, keep: Data, again: Data | None) -> str:
    """Whether our losses are keep's, if keep's are its own in a second run."""
    if again is not None and not _equal(keep["losses"], again["losses"]):
        return "keep differs from itself"
    return str(_equal(ours["losses"], keep["losses"]))


def _equal(one: list[float], other: list[float]) -> bool:
    """Whether the steps that both took gave the same losses."""
    shared = min(len(one), len(other))
    return shared > 0 and one[:shared] == other[:shared]


def prediction(data: Data) -> str:
    """How good the predictions of fixed, random and chosen plans were."""
    found = {
        name: scores(cell["plans"])
        for name, cell in data["cells"].items()
        if name.startswith("prediction/") and "plans" in cell
    }
    columns: dict[str, Column] = {
        "": "{name}",
        "plans": "{number}",
        "widest": "{widest:.2f}x",
        "step error": lambda c: f"{100 * c['step_error']:.1f} %",
        "constant": lambda c: f"{100 * c['constant_error']:.1f} %",
        "overheads": lambda c: f"{100 * c['overheads']:.0f} %",
        "worst peak error": lambda c: f"{100 * c['peak_error']:.1f} %",
        "tau": "{tau:.2f}",
    }
    return table(found, columns)


def scores(plans: list[Data]) -> dict[str, float]:
    """How good the predictions of some measured plans were."""
    errors = [abs(p["predicted_ms"] / p["step_ms"] - 1) for p in plans]
    constant = [abs(p["predicted_keep_ms"] / p["step_ms"] - 1) for p in plans]
    peaks = [
        abs(p["predicted_peak_bytes"] / p["peak_bytes"] - 1)
        for p in plans
        if p["peak_bytes"]
    ]
    keep_ms = _keep_ms(plans)
    return {
        "number": len(plans),
        "step_error": geometric_mean_error(errors),
        "constant_error": geometric_mean_error(constant),
        "peak_error": max(peaks, default=0.0),
        "overheads": statistics.fmean(_overhead_holds(p, keep_ms) for p in plans),
        "tau": kendall([(p["predicted_ms"], p["step_ms"]) for p in plans]),
        "widest": max(p["step_ms"] for p in plans) / keep_ms,
    }


def _overhead_holds(plan: Data, keep_ms: float) -> bool:
    """Whether the overhead is predicted within a quarter, or 1 % of a step."""
    predicted = plan["predicted_ms"] / plan["predicted_keep_ms"]
    measured = plan["step_ms"] / plan.get("keep_ms", keep_ms)
    return abs(predicted - measured) <= max(0.25 * abs(measured - 1), 0.01)


def _keep_ms(plans: list[Data]) -> float:
    """The measured step with everything kept."""
    kept = (p["step_ms"] for p in plans if p.get("policy") == "keep-all")
    return float(next(kept, plans[0]["predicted_keep_ms"]))


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau."""
    score, count = 0, 0
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        product = (a - c) * (b - d)
        score += (product > 0) - (product < 0)
        count += 1
    return score / max(1, count)


def regret(data: Data) -> str:
    """Budgets that were exceeded, the worst regret, and what declining costs."""
    cell, declined = (data["cells"].get(name, {}) for name in ("regret", "decline"))
    return paragraphs(
        _regret(cell) if "budgets" in cell else "",
        "ratio" in declined
        and "**Declining.** With a memory budget that asks for nothing, a session "
        f"takes {declined['ratio']:.3f}x a plain step.",
    )


def _regret(cell: Data) -> str:
    grid = cell["grid"]
    measured = [b for b in cell["budgets"] if "step_ms" in b]
    exceeded = sum(b["peak_bytes"] > b["budget_bytes"] for b in measured)
    regrets = []
    for each in measured:
        within = [g["step_ms"] for g in grid if g["peak_bytes"] <= each["budget_bytes"]]
        if within:
            regrets.append(each["step_ms"] / min(within) - 1)
    worst = f"{100 * max(regrets):.1f} %" if regrets else "-"
    return (
        f"**Regret.** {len(measured)} random memory budgets between the least "
        f"reachable peak and keep: {exceeded} exceeded when measured. Against the best "
        f"of a measured grid of {len(grid)} (window x prefetch x fraction x recipes): "
        f"worst {worst} slower, in {len(measured) - len(regrets)} budgets no grid "
        "point fitted at all."
    )


def rok(data: Data) -> str:
    """The ROK points by batch, and the split of the gain (Table 5.6)."""
    models: dict[str, dict[str, dict[int, Data]]] = {}
    for name, cell in data["cells"].items():
        if "error" not in cell:
            ways = models.setdefault(name.split("/")[0], {})
            ways.setdefault(cell["strategy"], {})[cell["batch"]] = cell
    parts: list[str] = []
    for model, found in models.items():
        ways = {w: found.get(w, {}) for w in ("keep", "offload", "recompute")}
        batches = sorted({batch for points in ways.values() for batch in points})
        columns: dict[str, Any] = {model: "{name}"}
        for b in batches:
            columns[f"batch {b}"] = lambda way, b=b: (
                "{tflops:.0f} TF, {peak_gb:.1f} GB".format(**way[b])
            )
        parts += [table(ways, columns), _gain(**ways), _split(ways["keep"])]
    capped = f"Activations are capped at {data['settings']['memory_gb']:.0f} GB."
    return paragraphs(capped, *parts)


def _gain(
    keep: dict[int, Data], offload: dict[int, Data], recompute: dict[int, Data]
) -> str:
    """What offloading buys: batch, at what speed, against recomputing."""
    shared = sorted(set(keep) & set(offload))
    if not shared or not recompute:
        return ""
    times = 0.0
    for batch in shared:
        peak = keep[batch]["peak_gb"]
        within = [n for n, cell in offload.items() if cell["peak_gb"] <= peak]
        times = max([times, *(n / batch for n in within)])
    speed = min(offload[b]["tokens_per_s"] / keep[b]["tokens_per_s"] for b in shared)
    most, other = max(offload), max(recompute)
    ratio = offload[most]["tokens_per_s"] / recompute[other]["tokens_per_s"]
    return (
        f"Offloading fits up to {times:.1f} times keep's batch into keep's peak, runs "
        f"at {speed:.3f}x keep's throughput or more at equal batches, and at its "
        f"largest ({most}) at {ratio:.2f}x recomputing's at its largest ({other})."
    )


def _split(keep: dict[int, Data]) -> str:
    """Why a larger batch is faster: kernels, and the update's share."""
    batch = max((b for b in keep if 1 < b <= 16), default=0)
    if 1 not in keep or not batch:
        return ""
    one, other = keep[1], keep[batch]
    total = other["tokens_per_s"] / one["tokens_per_s"]
    work, most = (cell["forward_ms"] + cell["backward_ms"] for cell in (one, other))
    kernels = work * batch / most
    return (
        f"From batch 1 to {batch} (keep): {100 * (total - 1):.0f} % more tokens a "
        f"second: {100 * (kernels - 1):.0f} % by faster kernels, "
        f"{100 * (total / kernels - 1):.0f} % by fewer weight updates (Table 5.6)."
    )

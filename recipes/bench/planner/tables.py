"""The planner's and the ROK curve's tables, from recorded results; never typed."""

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

from recipes.bench.common.results import find
from recipes.bench.common.text import markdown, section, where

TARGETS_GB = {"8192x4": 7.1, "12288x3": 8.0, "16384x2": 11.0, "6144x24": 9.0}
OFFSET = 4e-4
"""Keeps an exact prediction from making the geometric mean zero (Lin 2023)."""
GB = 1e9


def planner(results_dir: Path) -> str:
    """Targets, prediction, regret and budgets; empty without results."""
    data = find(Path(results_dir) / "planner.json")
    if data is None:
        return ""
    cells = data["cells"]
    parts = [
        _targets(cells),
        _prediction(cells),
        _regret(cells),
        _decline(cells),
        _bandwidth(cells),
        where(data),
    ]
    return "\n\n".join(part for part in parts if part)


def _targets(cells: dict[str, Any]) -> str:
    rows = []
    for name in dict.fromkeys(cell.split("/")[0] for cell in cells):
        keep, auto = cells.get(f"{name}/keep", {}), cells.get(f"{name}/auto", {})
        if "step_ms" not in keep or "step_ms" not in auto:
            continue
        full = cells.get(f"{name}/full recompute", {})
        again = cells.get(f"{name}/keep again", keep)
        keep = {**keep, "step_ms": (keep["step_ms"] + again["step_ms"]) / 2}
        ratio = auto["step_ms"] / keep["step_ms"]
        rows.append(
            [
                name,
                f"{keep['step_ms']:.0f} ms, {keep['peak_gb']:.1f} GB",
                _ratio(full, keep),
                f"{ratio:.3f}x, {auto['peak_gb']:.2f} GB",
                f"{auto['plan']['step_ms'] / keep['step_ms']:.3f}x, "
                f"{auto['plan']['peak_gb']:.2f} GB",
                f"{1 + auto['max_overhead']:.2f}x, {TARGETS_GB.get(name, 0):.1f} GB",
                _equality(auto, keep, cells.get(f"{name}/keep again")),
            ]
        )
    head = ["", "keep", "full recompute", "plan=auto", "predicted", "target", "equal"]
    text = (
        "**Planner.** GPT blocks (hidden x layers), bf16, host target, recipes on: "
        "step over `keep` (the mean of before and after) and activation peak, as "
        "measured and as the plan predicted; "
        "losses compared to the last bit."
    )
    return section(text, head, rows)


def _equality(
    ours: dict[str, Any], keep: dict[str, Any], again: dict[str, Any] | None
) -> str:
    """Whether our losses are keep's, if keep's are its own in a second run."""
    if again is not None and not _equal(keep["losses"], again["losses"]):
        return "keep differs from itself"
    return str(_equal(ours["losses"], keep["losses"]))


def _equal(one: list[float], other: list[float]) -> bool:
    """Whether the steps that both took gave the same losses."""
    shared = min(len(one), len(other))
    return shared > 0 and one[:shared] == other[:shared]


def _ratio(cell: dict[str, Any], keep: dict[str, Any]) -> str:
    if "step_ms" not in cell:
        return "-"
    return f"{cell['step_ms'] / keep['step_ms']:.3f}x, {cell['peak_gb']:.1f} GB"


def scores(plans: list[dict[str, Any]]) -> dict[str, float]:
    """How good the predictions of some measured plans were."""
    errors = [abs(p["predicted_ms"] / p["step_ms"] - 1) for p in plans]
    constant = [abs(p["predicted_keep_ms"] / p["step_ms"] - 1) for p in plans]
    peaks = [
        abs(p["predicted_peak_bytes"] / p["peak_bytes"] - 1)
        for p in plans
        if p["peak_bytes"]
    ]
    return {
        "number": len(plans),
        "step_error": geometric(errors),
        "constant_error": geometric(constant),
        "peak_error": max(peaks, default=0.0),
        "overheads": statistics.fmean(
            _overhead_holds(p, _keep_ms(plans)) for p in plans
        ),
        "tau": kendall([(p["predicted_ms"], p["step_ms"]) for p in plans]),
        "widest": max(p["step_ms"] for p in plans) / _keep_ms(plans),
    }


def _overhead_holds(plan: dict[str, Any], keep_ms: float) -> bool:
    """Whether the overhead is predicted within a quarter, or 1 % of a step."""
    predicted = plan["predicted_ms"] / plan["predicted_keep_ms"]
    measured = plan["step_ms"] / plan.get("keep_ms", keep_ms)
    return abs(predicted - measured) <= max(0.25 * abs(measured - 1), 0.01)


def _keep_ms(plans: list[dict[str, Any]]) -> float:
    """The measured step with everything kept."""
    return float(
        next(
            (p["step_ms"] for p in plans if p.get("policy") == "keep-all"),
            plans[0]["predicted_keep_ms"],
        )
    )


def geometric(errors: list[float]) -> float:
    """Geometric mean."""
    return math.exp(statistics.fmean(math.log(e + OFFSET) for e in errors))


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau."""
    score, count = 0, 0
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        product = (a - c) * (b - d)
        score += (product > 0) - (product < 0)
        count += 1
    return score / max(1, count)


def _prediction(cells: dict[str, Any]) -> str:
    rows = []
    for name, cell in cells.items():
        if not name.startswith("prediction/") or "plans" not in cell:
            continue
        found = scores(cell["plans"])
        rows.append(
            [
                name,
                str(found["number"]),
                f"{found['widest']:.2f}x",
                f"{100 * found['step_error']:.1f} %",
                f"{100 * found['constant_error']:.1f} %",
                f"{100 * found['overheads']:.0f} %",
                f"{100 * found['peak_error']:.1f} %",
                f"{found['tau']:.2f}",
            ]
        )
    head = ["", "plans", "widest", "step error", "constant", "overheads"]
    head += ["worst peak error", "tau"]
    text = (
        "**Prediction.** Fixed, random and chosen plans of one model, predicted from "
        "one observed step, then measured, with `keep` between any two of them. "
        "Errors of the step are geometric means; "
        "`constant` is what *same as keep* would get; `overheads` are the plans whose "
        "overhead over keep is right to a quarter of it or 1 % of a step."
    )
    return section(text, head, rows)


def _regret(cells: dict[str, Any]) -> str:
    cell = cells.get("regret", {})
    if "budgets" not in cell:
        return ""
    grid = cell["grid"]
    measured = [b for b in cell["budgets"] if "step_ms" in b]
    exceeded = sum(b["peak_bytes"] > b["budget_bytes"] for b in measured)
    regrets = []
    for budget in measured:
        fitting = [
            g["step_ms"] for g in grid if g["peak_bytes"] <= budget["budget_bytes"]
        ]
        if fitting:
            regrets.append(budget["step_ms"] / min(fitting) - 1)
    worst = f"{100 * max(regrets):.1f} %" if regrets else "-"
    unreachable = sum(
        all(g["peak_bytes"] > b["budget_bytes"] for g in grid) for b in measured
    )
    return (
        f"**Regret.** {len(measured)} random memory budgets between the least "
        f"reachable peak and keep: {exceeded} exceeded when measured. Against the best "
        f"of a measured grid of {len(grid)} (window x prefetch x fraction x recipes): "
        f"worst {worst} slower, in {unreachable} budgets no grid point fitted at all."
    )


def _decline(cells: dict[str, Any]) -> str:
    cell = cells.get("decline", {})
    if "ratio" not in cell:
        return ""
    return (
        "**Declining.** With a memory budget that asks for nothing, a session takes "
        f"{cell['ratio']:.3f}x a plain step."
    )


def _bandwidth(cells: dict[str, Any]) -> str:
    rows = []
    start = "bandwidth/"
    found = {n: c for n, c in cells.items() if n.startswith(start) and "plan" in c}
    for name, cell in sorted(found.items(), key=lambda c: c[1]["gb_per_s"] or 0.0):
        plan, rate = cell["plan"], cell["gb_per_s"]
        keep_ms = cell.get("keep_ms", plan["keep_ms"])
        # Writes end in any step: what the plan sends is what each of them owes.
        away_gb = plan["bytes"].get("offload_ssd", 0) / GB
        rows.append(
            [
                f"the {name.removeprefix(start)}"
                if rate is None
                else f"{rate:.0f} GB/s",
                f"{cell['measured_write_gb_per_s']:.1f} GB/s",
                f"{plan['keep_peak_gb']:.2f} GB",
                f"{cell['peak_gb']:.2f} GB",
                f"{plan['peak_gb']:.2f} GB",
                f"{cell['step_ms'] / keep_ms:.3f}x",
                f"{100 * away_gb / max(cell['half_step_gb'], 1e-9):.0f} %",
            ]
        )
    head = ["storage", "writes", "keep", "peak", "predicted", "step", "used"]
    text = (
        "**Bandwidth.** The least peak within 1 % with a storage of limited speed; "
        "`used` is what leaves in a step, of write bandwidth x half of forward and "
        "backward."
    )
    return section(text, head, rows)


def rok(results_dir: Path) -> str:
    """The ROK points by batch, and the split of the gain (Table 5.6)."""
    data = find(Path(results_dir) / "rok.json")
    if data is None:
        return ""
    points = [cell for cell in data["cells"].values() if "error" not in cell]
    names = [name for name, cell in data["cells"].items() if "error" not in cell]
    by = {
        (name.split("/")[0], p["strategy"], p["batch"]): p
        for name, p in zip(names, points, strict=True)
    }
    parts = []
    for model in dict.fromkeys(model for model, _, _ in by):
        batches = sorted({b for m, _, b in by if m == model})
        rows = []
        for strategy in ("keep", "offload", "recompute"):
            row = [strategy]
            for batch in batches:
                cell = by.get((model, strategy, batch))
                row.append(
                    "-"
                    if cell is None
                    else f"{cell['tflops']:.0f} TF, {cell['peak_gb']:.1f} GB"
                )
            rows.append(row)
        head = [model, *(f"batch {batch}" for batch in batches)]
        parts.append(markdown(head, rows))
        parts.append(_gain(by, model, batches))
        parts.append(_split(by, model, batches))
    text = (
        "**Recompute, offload, keep** (Figure 5.12): model throughput in algorithmic "
        "FLOPs, and activation peak, capped at "
        f"{data['settings']['memory_gb']:.0f} GB."
    )
    return "\n\n".join([text, *(part for part in parts if part), where(data)])


def _gain(by: dict[Any, Any], model: str, batches: list[int]) -> str:
    """What offloading buys: batch, at what speed, against recomputing."""

    def of(strategy: str) -> dict[int, dict[str, Any]]:
        keys = [(model, strategy, b) for b in batches]
        return {key[2]: by[key] for key in keys if key in by}

    keep, offload, recompute = of("keep"), of("offload"), of("recompute")
    shared = sorted(set(keep) & set(offload))
    if not shared or not recompute:
        return ""
    fits = {
        b: max((n for n, c in offload.items() if c["peak_gb"] <= keep[b]["peak_gb"]))
        for b in shared
        if any(c["peak_gb"] <= keep[b]["peak_gb"] for c in offload.values())
    }
    times = max((n / b for b, n in fits.items()), default=0.0)
    speed = min(offload[b]["tokens_per_s"] / keep[b]["tokens_per_s"] for b in shared)
    most, other = max(offload), max(recompute)
    ratio = offload[most]["tokens_per_s"] / recompute[other]["tokens_per_s"]
    return (
        f"Offloading fits up to {times:.1f} times keep's batch into keep's peak, runs "
        f"at {speed:.3f}x keep's throughput or more at equal batches, and at its "
        f"largest ({most}) at {ratio:.2f}x recomputing's at its largest ({other})."
    )


def _split(by: dict[Any, Any], model: str, batches: list[int]) -> str:
    """Why a larger batch is faster: kernels, and the update's share."""
    one = by.get((model, "keep", 1))
    large = [b for b in batches if (model, "keep", b) in by and b > 1]
    if one is None or not large:
        return ""
    batch = max(b for b in large if b <= 16)
    other = by[model, "keep", batch]
    total = other["tokens_per_s"] / one["tokens_per_s"]
    work = {
        b: c["forward_ms"] + c["backward_ms"] for b, c in ((1, one), (batch, other))
    }
    kernels = work[1] * batch / work[batch]
    update = total / kernels
    return (
        f"From batch 1 to {batch} (keep): {100 * (total - 1):.0f} % more tokens a "
        f"second: {100 * (kernels - 1):.0f} % by faster kernels, "
        f"{100 * (update - 1):.0f} % by fewer weight updates (Table 5.6)."
    )

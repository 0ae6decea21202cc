"""The table of `megatron.core`'s results."""

import itertools
import statistics
from pathlib import Path
from typing import Any

from recipes.bench.common.results import find
from recipes.bench.common.text import markdown, where

BUDGET = "ours within a budget"
BUDGETS = ("ours level", "ours at 40 %")
WAYS = ("keep", "ours auto", BUDGET, "full recompute")
FINE = "fine-grained offloading"


def megatron(results_dir: Path) -> str:
    """Step ratios and peaks under Megatron-Core; empty while nothing is recorded."""
    of_two = find(results_dir / "megatron.json")
    of_four = find(results_dir / "megatron_4.json")
    return table(of_two, of_four["cells"] if of_four else {}) if of_two else ""


def table(data: dict[str, Any], of_four: dict[str, Any]) -> str:
    """The same from the files' content.

    of_four: cells of four ranks.
    """
    cells: dict[str, Any] = data["cells"]
    parts = [
        "**Megatron-Core on two GPUs.** bf16, dropout 0.1, sequence 1024, hidden x "
        "layers. `tp2`: one micro-batch of 16; `1f1b`: 8 micro-batches of 2, first and "
        "second stage. Step time over `keep`, and activation peak of a rank (of every "
        "stage); the rank-wise larger one under tensor parallelism. `keep` and ours "
        "twice, in turns: the median of both. The budget is 40 % of what a rank keeps, "
        "in a pipeline what the last stage keeps.",
        placements(cells),
        estimates(cells),
        law(cells, 2),
        law(of_four, 4),
        where(data),
    ]
    return "\n\n".join(part for part in parts if part)


def placements(cells: dict[str, Any]) -> str:
    """Every way to place activations, one row a model."""
    models = dict.fromkeys(
        name.rsplit("/", 1)[0]
        for name, cell in cells.items()
        if "step_ms" in cell and not name.startswith("law/")
    )
    rows = []
    for model in models:
        found = [_cell(cells, model, way) for way in (*WAYS, FINE)]
        rows.append([model, *(entry(cell, found[0]) for cell in found)])
    return markdown(["", *WAYS, FINE], rows) if rows else ""


def _cell(cells: dict[str, Any], model: str, way: str) -> dict[str, Any]:
    ways = BUDGETS if way == BUDGET else (way,)
    return next(filter(None, (both(cells, f"{model}/{each}") for each in ways)), {})


def both(cells: dict[str, Any], name: str) -> dict[str, Any]:
    """A cell, with its second round if there was one: of the slowest rank."""
    first: dict[str, Any] = cells.get(name, {})
    second = cells.get(f"{name} 2", {})
    rounds = [cell for cell in (first, second) if "step_ms" in cell]
    found = dict(first)
    if len(rounds) > 1:
        found["step_ms"] = _slowest([cell["step_times"] for cell in rounds])
        peaks = zip(*(cell["peak_gb"] for cell in rounds), strict=True)
        found["peak_gb"] = [max(each) for each in peaks]
    besides = [cell["beside"] for cell in rounds if "beside" in cell]
    if besides:
        times = [[rank["step_times"] for rank in beside] for beside in besides]
        found["beside"] = {"step_ms": _slowest(times)}
    return found


def _slowest(rounds: list[list[list[float]]]) -> float:
    """Median step of the slowest rank, from the times of all ranks in every round."""
    ranks = zip(*rounds, strict=True)
    return max(statistics.median(itertools.chain(*own)) for own in ranks)


def entry(cell: dict[str, Any], keep: dict[str, Any]) -> str:
    """Such as 1.004x, 5.1 GB."""
    if "step_ms" not in cell or "step_ms" not in keep:
        words = cell.get("error", "-").split("| rank")[0].strip().splitlines()
        return words[-1].strip()[-60:]  # a traceback's last line says what is wrong
    peaks = cell["peak_gb"]
    keep = cell.get("beside", keep)  # the file's may be of another run
    close = max(peaks) - min(peaks) < 0.02 * max(peaks)
    shown = [max(peaks)] if close else peaks
    text = " / ".join(f"{peak:.2f}" for peak in shown)
    return f"{cell['step_ms'] / keep['step_ms']:.3f}x, {text} GB"


def estimates(cells: dict[str, Any]) -> str:
    """Offloaded bytes of BERT's layers against the analytic model."""
    rows = []
    for name, cell in cells.items():
        if name.endswith("/estimate") and "offloaded_gib" in cell:
            moved, expected = max(cell["offloaded_gib"]), cell["estimate_gib"][0]
            source = cell["source_gib"][0]
            ratio = f"{moved / expected:.3f}"
            row = [f"{moved:.2f}", f"{expected:.2f}", f"{source:.2f}", ratio]
            rows.append([name.removesuffix("/estimate"), *row])
    if not rows:
        return ""
    head = ["offloaded by the layers", "GiB", "estimate", "source's estimate", "ratio"]
    return markdown(head, rows)


def law(cells: dict[str, Any], num_ranks: int) -> str:
    """How many cells of the law held on so many ranks."""
    found = {n: c for n, c in cells.items() if n.startswith("law/")}
    if not found:
        return ""
    unequal = [
        name
        for name, cell in found.items()
        if not (cell.get("host_equal") and cell.get("ssd_equal"))
    ]
    verdict = f"all {len(found)} cells" if not unequal else f"NOT in {unequal}"
    return (
        f"{num_ranks} GPUs: losses, gradients and weights equal to the run without "
        "ssdtrain to the last bit, targets host and ssd, torch's deterministic "
        f"algorithms: {verdict}."
    )

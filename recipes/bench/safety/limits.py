"""Whether any step exceeds its memory limit, the first ones and tries included.

The models of `models.unseen`, each under budgets from checkpointing's measured peak
towards that of plain training, with batches of one size and of several; `full` fills
the device to 95 % with the model, its states and a block of memory that nobody uses,
and sets nothing; `longer` doubles the batch behind the plan. A refusal (`ConfigError`)
is counted apart. The peak is what a step needs above the level before it.

    python -m recipes.bench safety.limits --only 't5/budgets' '*/device'
"""

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recipes.bench.harness.cli import Bench
from recipes.bench.models.unseen import CASES, Batch, Case, Side, set_base

SHARES = (0.0, 0.3, 0.6)
"""Of the way from checkpointing's peak to plain training's."""
RUNS = {
    "budgets": (*(f"{share}" for share in SHARES), "changing"),
    "device": ("full", "longer"),
}
BEHIND = 4
"""Steps behind the settled plan."""
FULL = 0.95
STEPS_FULL = 12


def of_rows(batch: Batch, parts: int, times: int = 1) -> Batch:
    """The first one of so many parts of a batch, so many times."""

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.cat([value[: max(1, len(value) // parts)]] * times)

    return {name: own(value) for name, value in batch.items()}


def batches(whole: Batch, run: str) -> Iterator[Batch]:
    """Those of a run's steps; for `longer` the plan has settled before the second."""
    if run == "changing":
        while True:
            yield from (of_rows(whole, 2), whole, of_rows(whole, 4))
    yield of_rows(whole, 2) if run == "longer" else whole
    while True:
        yield whole


def measured(side: Side, settings: dict[str, Any], run: str, most_s: float) -> Any:
    """Peaks of all steps of one run."""
    import ssdtrain

    peaks, behind, until = [], 0, time.monotonic() + most_s
    whole = side.batch
    given = batches(whole, run)
    side.batch = next(given)
    try:
        with ssdtrain.offload(side.model, **settings) as session:
            while behind < BEHIND and time.monotonic() < until:
                is_full = run == "full" and len(peaks) >= STEPS_FULL
                if session.is_settled or is_full or run == "changing":
                    side.batch = next(given)
                behind += session.is_settled or is_full
                peaks.append(side.step()[1])
            return {"steps": len(peaks), "settled": session.is_settled, "peaks": peaks}
    except ssdtrain.errors.ConfigError as error:
        return {"refused": str(error)[:200], "peaks": peaks, "steps": len(peaks)}
    finally:
        side.batch = whole


def fill(device: torch.device) -> Tensor | None:
    """A block that leaves `1 - FULL` of the device free."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.empty(int(free - (1 - FULL) * total), dtype=torch.uint8, device=device)


def measure(
    case: Case, wanted: tuple[str, ...], *, is_tiny: bool, most_s: float
) -> dict[str, Any]:
    """All runs of one model, by name."""
    device = torch.device("cpu" if is_tiny else "cuda")
    side, found = Side(case, device, is_tiny=is_tiny), dict[str, Any]()
    peaks = []
    for base in ("plain", "gc"):
        set_base(side.model, base)
        side.step()  # kernels are chosen, and need more memory
        peaks.append(max(side.step()[1] for _ in range(2)) or 1 << 24)
    set_base(side.model, "plain")
    most, least = peaks
    for run in wanted:
        share = float(run) if run[0].isdigit() else SHARES[1]
        limit: int | None = int(least + share * (most - least))
        settings: dict[str, Any] = {"memory_budget": limit}
        block = None
        if run == "full":
            limit, block, settings = None, fill(device), {}
        elif run == "longer":
            limit, settings = None, {"device_memory": "fit"}
        settings |= {"min_bytes": 0} if is_tiny else {}
        try:
            told = measured(side, settings, run, most_s)
        except torch.OutOfMemoryError as error:
            told = {"error": str(error)[:200], "peaks": []}
        del block
        side.optimizer.zero_grad(set_to_none=False)  # new gradients would count
        own = told.pop("peaks")
        worst = max(own, default=0)
        told |= {"most_gb": round(worst / 1e9, 3), "limit": limit}
        if limit is not None:
            told["over"] = round(worst / limit - 1, 4)
            told["steps_over"] = sum(peak > 1.01 * limit for peak in own)
        found[run] = told
    return {"runs": found, "plain_gb": most / 1e9, "checkpointed_gb": least / 1e9}


def main(bench: Bench, *, most_s: float = 8, cpu: bool = False) -> None:
    """Measure what is asked for.

    Args:
        most_s: of a run
        cpu: tiny models, to try it
    """
    cells = bench.cells({"cpu": cpu})
    cell = partial(measure, is_tiny=cpu, most_s=most_s)
    for (what, runs), (name, case) in itertools.product(RUNS.items(), CASES.items()):
        cells.run(f"{name}/{what}", cell, case, runs, limit_s=150)
    told = [each.get("runs", {}).values() for each in cells.data["cells"].values()]
    found = list(itertools.chain(*told))
    counts = {
        "above their limit by more than 1 %": sum(
            r.get("steps_over", 0) > 0 for r in found
        ),
        "out of memory": sum("error" in run for run in found),
        "refused": sum("refused" in run for run in found),
    }
    print(f"{len(found)} runs:", counts)

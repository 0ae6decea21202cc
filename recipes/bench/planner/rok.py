"""The recompute-offload-keep curve (Figure 5.12) and the split of the gain (Table 5.6).

    python -m recipes.bench planner.rok --budget-s 150

One point for each model, batch size and strategy: activation peak, step time, tokens a
second and model throughput (algorithmic FLOPs, recomputation not counted). A batch
whose peak would exceed `--memory-gb` is not tried further for that strategy.
"""

import itertools
from typing import Any

import torch

from recipes.bench.harness.blocks import Size
from recipes.bench.harness.cli import Bench
from recipes.bench.offload.placement import ours, plain, recompute, run_column

MODELS = {"12288x3": (12288, 3), "14336x3": (14336, 3)}
SMALL = {"128x2": (128, 2)}
SEQUENCE = 1024
BATCHES = (16, 32, 24, 48, 8, 1, 4, 2, 12)
CELL_LIMIT_S = 75.0
STRATEGIES = ("keep", "offload", "recompute")


def flops(size: Size) -> float:
    """Algorithmic FLOPs of a step: 72 B S L H^2 (1 + S / 12 H), causal attention full.

    Three times the forward's 24 B S H^2 + 4 B S^2 H a layer (Narayanan et al., 2021).
    """
    tokens = size.batch * size.sequence
    layer = 24 * tokens * size.hidden**2 + 4 * tokens * size.sequence * size.hidden
    return 3.0 * size.num_layers * layer


def point(
    size: Size, strategy: str, device: torch.device, num_steps: int
) -> dict[str, Any]:
    """One run."""
    least = 1024 if size.hidden < 1024 else 2**20
    auto = ours(target="host", plan="auto", max_overhead=0.01, min_bytes=least)
    column = {"keep": plain, "offload": auto, "recompute": recompute}[strategy]
    cell = run_column(size, column, device, num_steps)
    cell.pop("losses")
    step_s = cell["step_ms"] / 1e3
    return {
        "strategy": strategy,
        "batch": size.batch,
        "tokens_per_s": size.batch * size.sequence / step_s,
        "tflops": flops(size) / step_s / 1e12,
        "update_ms": cell["step_ms"] - cell["forward_ms"] - cell["backward_ms"],
        **cell,
    }


def main(bench: Bench, *, memory_gb: float = 40.0, small: bool = False) -> None:
    """Run the points that are missing, the most telling batch sizes first.

    Args:
        memory_gb: peaks above it are not tried
    """
    device = bench.device
    models = SMALL if small else MODELS
    sequence, batches = (32, BATCHES[:2]) if small else (SEQUENCE, BATCHES)
    settings = {"sequence": sequence, "memory_gb": memory_gb, "dtype": "bf16"}
    cells = bench.cells(settings)
    peaks: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for batch, (model, shape), strategy in itertools.product(
        batches, models.items(), STRATEGIES
    ):
        seen = peaks.setdefault((model, strategy), [])
        if any(peak / b * batch > memory_gb for b, peak in seen):
            continue
        name = f"{model}/{strategy}/{batch}"
        size = Size(*shape, batch, sequence)
        steps = 8 if strategy == "offload" else 5
        cells.run(name, point, size, strategy, device, steps, limit_s=CELL_LIMIT_S)
        if name in cells and "peak_gb" in cells[name]:
            seen.append((batch, cells[name]["peak_gb"]))

"""How long a search of layouts takes: 8B and 70B on 8 to 1,024 GPUs.

python -m recipes.bench search.layouts
"""

import time
from typing import Any

from recipes.bench.harness.cli import Bench
from ssdtrain.tools.search.layout_search import Asked, search

MODELS = ("llama-3.1-8b", "llama-3.1-70b")
GPUS = (8, 16, 64, 256, 1024)


def measured(model: str, gpus: int, tokens: int) -> dict[str, Any]:
    """The best layout, and seconds of the search."""
    start = time.perf_counter()
    asked = Asked(model=model, gpus=gpus, tokens=tokens, batch=1024)
    found = search(asked, lambda text: None)
    best = found.best
    row: dict[str, Any] = {
        "layouts": len(found.priced),
        "search_s": round(time.perf_counter() - start, 1),
    }
    if best is None:
        return {**row, "best": None}
    own = best.layout
    return {
        **row,
        "best": f"data {own.data}, tensor {own.tensor}, context {own.context}, stages "
        f"{own.pipeline} x {own.chunks}, ZeRO {own.zero}, micro-batch "
        f"{own.sequences}, {own.way}",
        "tokens_per_s": round(found.tokens_per_s(best)),
        "memory_gb": round(best.memory_bytes / 1e9, 1),
        "bound": best.bound,
    }


def main(bench: Bench, *, tokens: int = 8192, sizes: tuple[int, ...] = GPUS) -> None:
    """Search, and record what was found.

    Args:
        sizes: numbers of GPUs
    """
    cells = bench.cells({"tokens": tokens})
    for model in MODELS:
        for gpus in sizes:
            cells.run(f"{model}, {gpus} GPUs", measured, model, gpus, tokens)

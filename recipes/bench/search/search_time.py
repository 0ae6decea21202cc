"""Search time and bytes of large graphs, beside the baselines.

    python -m recipes.bench search.search_time --budget-s 500

Table 3.1 of the dissertation has 8.3 s for WResNet-152 and 66.6 s for RNN-10.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recipes.bench.harness.cli import Bench
from recipes.bench.search.baselines import BASELINES
from recipes.bench.search.models import AttentionBlock, UnrolledLSTM, WideResNet
from ssdtrain.tools.search.moves import WorkerAxis
from ssdtrain.tools.search.problem import Problem
from ssdtrain.tools.search.search import factors_of, partition
from ssdtrain.tools.search.trace import trace

Made = tuple[nn.Module, Callable[[], Any]]


def wide_resnet(small: bool) -> Made:
    """WResNet-152-10, batch 8."""
    layers, wide, batch = ((1, 1, 1, 1), 1, 8) if small else ((3, 8, 36, 3), 10, 8)
    model = WideResNet(layers, wide)
    x = torch.empty(batch, 3, 224, 224)
    return model, lambda: model(x).square().mean()


def recurrent(small: bool) -> Made:
    """RNN-10-8K, 20 steps, batch 128."""
    layers, hidden, steps = (2, 64, 3) if small else (10, 8192, 20)
    model = UnrolledLSTM(layers, hidden)
    x = torch.empty(steps, 128, 1024)
    return model, lambda: model(x).square().mean()


def transformer(small: bool) -> Made:
    """24 blocks of 8192, 4 x 2048 tokens."""
    layers, hidden, heads = (2, 64, 4) if small else (24, 8192, 64)
    model = nn.Sequential(*(AttentionBlock(hidden, heads) for _ in range(layers)))
    x = torch.empty(4, 2048, hidden)
    return model, lambda: model(x).square().mean()


MODELS = {
    "WResNet-152-10": wide_resnet,
    "RNN-10-8K": recurrent,
    "transformer 24 x 8192": transformer,
}


def measured(problem: Problem, name: str, workers: int) -> dict[str, Any]:
    """Bytes that a worker sends, and seconds of the search."""
    axes = [WorkerAxis(ways) for ways in factors_of(workers)]
    search = partition if name == "found" else BASELINES[name]
    start = time.perf_counter()
    found = search(problem, axes)
    return {
        "operators": len(problem.operations),
        "gigabytes": round(found.cost / 1e9, 3),
        "search_s": round(time.perf_counter() - start, 2),
        "is_exact": found.is_exact,
    }


def main(bench: Bench, *, workers: int = 8, small: bool = False) -> None:
    """Search, and record what was found.

    Args:
        small: tiny models
    """
    cells = bench.cells({"workers": workers})
    for model_name, build in MODELS.items():
        with torch.device("meta"):
            model, forward = build(small)
            problem = trace(model, forward)
        for name in ("found", *BASELINES):
            cells.run(
                f"{model_name}, {name}",
                lambda p=problem, n=name: measured(p, n, workers),
            )

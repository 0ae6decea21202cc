"""Plots of the results of `rgnn.layers`: memory and speed-up (Figures 3.9 and 3.10)."""

from pathlib import Path
from typing import Any

from recipes.bench.rgnn.records import TASKS, Records, compare, used_mib


def write_plots(results: Records, directory: Path) -> None:
    """Write `rgnn_memory.svg` and `rgnn_speedup.svg`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in (("memory", _memory), ("speedup", _speedup)):
        figure, axes = pyplot.subplots(figsize=(7, 4))
        draw(axes, results)
        figure.tight_layout()
        figure.savefig(directory / f"rgnn_{name}.svg")
        pyplot.close(figure)


def _memory(axes: Any, results: Records) -> None:
    for task, marker in zip(TASKS, "os", strict=True):
        points = []
        for graph, about in results.graphs.items():
            cell = {"graph": graph, "model": "hgt", "task": task, "dtype": "float32"}
            plain = used_mib(results.find("hector-none", **cell))
            compact = used_mib(results.find("hector-compaction", **cell))
            if plain and compact:
                ratio = about["entity_compaction_ratio"]
                points.append((ratio, compact / plain))
                axes.annotate(graph, points[-1], fontsize=7)
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, marker=marker, label=f"HGT {task}")
    axes.plot([0, 1], [0, 1], linewidth=0.5, color="grey")
    axes.set_xlabel("entity compaction ratio")
    axes.set_ylabel("memory with compaction / without")
    if axes.collections:
        axes.legend()


def _speedup(axes: Any, results: Records) -> None:
    graphs = list(results.graphs)
    bars = [(m, t) for m in ("rgcn", "rgat", "hgt") for t in TASKS]
    for index, (model, task) in enumerate(bars):
        heights = [
            compare(results, graph=g, model=model, task=task, dtype="float32").speedup
            or 0.0
            for g in graphs
        ]
        at = [i + 0.13 * (index - 2.5) for i in range(len(graphs))]
        axes.bar(at, heights, width=0.12, label=f"{model} {task}")
    axes.axhline(1.0, linewidth=0.5, color="grey")
    axes.set_yscale("log")
    axes.set_xticks(range(len(graphs)), graphs)
    axes.set_ylabel("speed-up over the best other (float32)")
    axes.legend(fontsize=7, ncols=3)

"""Plots of the results of `rgnn.layers` on axes of matplotlib."""

from typing import Any

from recipes.bench.rgnn.choice import taken
from recipes.bench.rgnn.records import TASKS, Records, cells, compare, used_mib


def memory(axes: Any, results: Records) -> None:
    """Memory with compaction over without (Figure 3.10)."""
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


def speedup(axes: Any, results: Records) -> None:
    """Ours over the best other (Figure 3.9)."""
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


def ablation(axes: Any, results: Records) -> None:
    """Each setting's time of `none` over its own, and the cost model's (Table 3.5)."""
    wanted = [(n, c) for n, c in cells(results, ("float32",))]
    for setting, marker in (("compaction", "o"), ("reordering", "s"), ("both", "^")):
        points = []
        for at, (_, cell) in enumerate(wanted):
            base = results.ms("hector-none", **cell)
            own = results.ms(f"hector-{setting}", **cell)
            if base and own:
                points.append((at, base / own))
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, ls="", label=setting)
    chosen = []
    for at, (_, cell) in enumerate(wanted):
        base, own = results.ms("hector-none", **cell), taken(results, **cell).get("ms")
        if base and own:
            chosen.append((at, base / own))
    if chosen:
        axes.plot(*zip(*chosen, strict=True), "kx", label="chosen")
    axes.axhline(1.0, linewidth=0.5, color="grey")
    names = [name.removesuffix(" float32") for name, _ in wanted]
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
    axes.set_ylabel("times faster than without")
    axes.legend(fontsize=7, ncols=4)

"""Tables of the relational benchmarks."""

import math
from itertools import pairwise

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table
from recipes.bench.rgnn.cells import WIDTHS
from recipes.bench.rgnn.records import (
    TASKS,
    Comparison,
    Records,
    cells,
    compare,
    geometric_mean,
    over_best,
    used_mib,
)

# Wu's geometric means over the best of the systems of its time (Table 3.4).
SEED_MEANS = {
    ("rgcn", "inference"): 1.91,
    ("rgat", "inference"): 8.56,
    ("hgt", "inference"): 2.87,
    ("rgcn", "training"): 2.76,
    ("rgat", "training"): 11.3,
    ("hgt", "training"): 8.02,
}


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def summary(data: Data) -> str:
    """Geometric mean, worst and best speed-up, out-of-memory counts."""
    records = Records(data)
    groups: dict[tuple[str, str, str], dict[str, Comparison]] = {}
    for _, cell in cells(records):
        group = groups.setdefault((cell["model"], cell["task"], cell["dtype"]), {})
        group[cell["graph"]] = compare(records, **cell)
    rows = []
    for (model, task, dtype), row in groups.items():
        ranked = sorted(
            (c.speedup, graph) for graph, c in row.items() if c.speedup is not None
        )
        if not ranked:
            continue
        (least, worst), (most, best) = ranked[0], ranked[-1]
        rows.append(
            {
                "cells": f"{model} {task} {dtype}",
                "mean": number(geometric_mean(speedup for speedup, _ in ranked)),
                "Wu": number(SEED_MEANS[model, task]),
                "worst": f"{least:.2f} ({worst})",
                "best": f"{most:.2f} ({best})",
                "graphs": len(ranked),
                "our OOM": sum(
                    c.ours["status"] == "oom" for c in row.values() if c.ours
                ),
                "others' OOM": sum(c.num_oom for c in row.values()),
            }
        )
    return table(rows, {head: f"{{{head}}}" for head in rows[0]}) if rows else ""


def choice(data: Data, tolerance: float = 0.05) -> str:
    """How often the cost model's choice is within `tolerance` of the best setting."""
    records = Records(data)
    found = {name: over_best(records, **cell) for name, cell in cells(records)}
    ratios = {name: ratio for name, ratio in found.items() if ratio is not None}
    if not ratios:
        return ""
    missed = {n: r for n, r in ratios.items() if r > 1 + tolerance}
    close = len(ratios) - len(missed)
    text = (
        f"The cost model's choice is within {100 * tolerance:.0f} % of the best fixed "
        f"setting in {close} of {len(ratios)} cells ({100 * close / len(ratios):.0f} "
        "%)."
    )
    words = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in missed.items())
    return text + (f" Missed: {words}." if missed else "")


def compaction(records: Records, graph: str, task: str) -> tuple[float, float] | None:
    """MiB of HGT without compaction, and the part of it that it takes with."""
    cell = {"graph": graph, "model": "hgt", "task": task, "dtype": "float32"}
    plain = used_mib(records.find("hector-none", **cell))
    compact = used_mib(records.find("hector-compaction", **cell))
    return (plain, compact / plain) if plain and compact else None


def memory(data: Data) -> str:
    """Figure 3.10: memory with compaction over memory without, HGT, against the
    entity compaction ratio. Memory is the peak above what the graph itself holds."""
    records = Records(data)
    columns: dict[str, Column] = {
        "graph": "{name}",
        "entity compaction ratio": "{entity_compaction_ratio:.2f}",
        "average degree": "{average_degree:.1f}",
    }
    for task in TASKS:
        for at, (head, digits) in enumerate((("MiB", 0), ("compact / plain", 2))):
            columns[f"{task} {head}"] = lambda g, t=task, at=at, n=digits: number(
                compaction(records, g["name"], t)[at],  # type: ignore[index]
                n,
            )
    by_ratio = sorted(
        records.graphs.items(), key=lambda graph: graph[1]["entity_compaction_ratio"]
    )
    return table(dict(by_ratio), columns)


def widths(data: Data) -> str:
    """Figure 3.12: what twice the width costs; products may use TF32."""
    records, steps = Records(data), []
    for _, cell in cells(records, ("tf32",)):
        times = [records.ms("hector", **cell, width=width) for width in WIDTHS]
        steps += [b / a for a, b in pairwise(times) if a and b]
    below = sum(step < 2 for step in steps)
    told = f"Twice the width costs less than twice in {below} of {len(steps)} steps."
    return f"{told} Products may use TF32." if steps else ""


def machines(data: Data) -> str:
    """Device and versions of every run that took something."""
    records = Records(data)
    lines = {}
    for at in sorted({record["run"] for record in records.by_key.values()}):
        run = records.runs[at]
        versions = ", ".join(
            f"{k} {run[k]}" for k in ("torch", "triton", "torch_geometric") if k in run
        )
        date = data["environment"].get("date", "")
        lines[f"{run['device']}; {versions}; {date}"] = None
    return "\n".join(lines)


def batches(data: Data) -> str:
    """Mini-batches and captured steps."""
    good = {name: c for name, c in data["cells"].items() if "error" not in c}
    settings = data["settings"]
    drawn: dict[str, Column] = {
        "": lambda c: c["name"].split("/")[1],
        "nodes": "{nodes}",
        "edges": "{edges}",
        "ours": "{hector_ms:.3f}",
        "PyG": "{pyg_ms:.3f}",
        "ratio": "{ratio:.2f}",
        "largest loss error": "{largest_loss_error:.1e}",
    }
    captured: dict[str, Column] = {
        "": lambda c: " ".join(c["name"].split("/")[1:]),
        "ours": "{hector_ms:.3f}",
        "captured": "{captured_ms:.3f}",
        "PyG": "{pyg_ms:.3f}",
        "ratio": "{ratio:.2f}",
    }
    of_batches = table({n: c for n, c in good.items() if n.startswith("batch/")}, drawn)
    return paragraphs(
        of_batches
        and f"**Mini-batches**: two layers, {settings['seeds']} seeds, fanouts "
        f"{' and '.join(map(str, settings['fanouts']))} on ogbn-mag's sizes, features "
        "on the device, the same neighbourhoods for both; forward and backward in ms, "
        "without drawing.",
        of_batches,
        table({n: c for n, c in good.items() if n.startswith("captured/")}, captured),
    )

"""Markdown tables out of the results of `rgnn.layers`.

python -m recipes.bench.rgnn.tables RGNN_JSON    # all of them
"""

import argparse
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from recipes.bench.common import results as files
from recipes.bench.common.text import markdown, where
from recipes.bench.rgnn.accuracy import LEVEL, SEEDS, compared, spread
from recipes.bench.rgnn.cells import WIDTHS
from recipes.bench.rgnn.choice import SETTINGS, over_best, taken, told
from recipes.bench.rgnn.records import (
    TASKS,
    Comparison,
    Records,
    cells,
    compare,
    geometric_mean,
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


def summary(results: Records) -> str:
    """Geometric mean, worst and best speed-up, out-of-memory counts."""
    groups: dict[tuple[str, str, str], dict[str, Comparison]] = {}
    for _, cell in cells(results):
        for what in ("time", "captured"):
            kind = cell["dtype"] if what == "time" else f"{cell['dtype']} captured"
            group = groups.setdefault((cell["model"], cell["task"], kind), {})
            group[cell["graph"]] = compare(results, what=what, **cell)
    rows = []
    for (model, task, dtype), row in groups.items():
        found = {g: c.speedup for g, c in row.items() if c.speedup is not None}
        if not found:
            continue
        ranked = sorted(found.items(), key=lambda item: item[1])
        (worst, least), (best, most) = ranked[0], ranked[-1]
        ours = [c.ours for c in row.values() if c.ours]
        rows.append(
            [
                f"{model} {task} {dtype}",
                number(geometric_mean(found.values())),
                number(SEED_MEANS[model, task]),
                f"{least:.2f} ({worst})",
                f"{most:.2f} ({best})",
                str(len(found)),
                str(sum(r["status"] == "oom" for r in ours)),
                str(sum(c.num_oom for c in row.values())),
            ]
        )
    header = ["cells", "mean", "Wu", "worst", "best", "graphs", "our OOM"]
    return markdown([*header, "others' OOM"], rows)


def details(results: Records) -> str:
    """Every cell: our time, the best other and its time, the ratio."""
    rows = []
    for name, cell in cells(results):
        found = compare(results, **cell)
        if found.ours is None:
            continue
        best, status = found.best, found.ours["status"]
        rows.append(
            [
                name,
                number(found.ours["ms"], 3) if status == "ok" else status,
                number(best["ms"] if best else None, 3),
                best["key"]["contender"] if best else "none ran",
                number(found.speedup),
            ]
        )
    return markdown(["cell", "ours ms", "best other ms", "which", "speed-up"], rows)


def ablation(results: Records) -> str:
    """Table 3.5: speed-up over no optimization, and what the cost model took."""
    rows = []
    for name, cell in cells(results):
        times = [results.ms(f"hector-{s}", **cell) for s in SETTINGS]
        if not any(times):
            continue
        base = times[0]
        gains = (*times[1:], taken(results, **cell).get("ms"))
        texts = [number(base / t if base and t else None) for t in gains]
        rows.append([name, number(base, 3), *texts])
    header = ["cell", "none ms", "compaction", "reordering", "both", "chosen"]
    return markdown(header, rows)


def choice(results: Records, tolerance: float = 0.05) -> str:
    """How often the cost model's choice is within `tolerance` of the best setting."""
    ratios = {name: over_best(results, **cell) for name, cell in cells(results)}
    return told({n: r for n, r in ratios.items() if r is not None}, tolerance)


def memory(results: Records) -> str:
    """Figure 3.10: memory with compaction over memory without, HGT, against the
    entity compaction ratio. Memory is the peak above what the graph itself holds."""
    rows = []
    for graph, about in sorted(
        results.graphs.items(), key=lambda g: g[1]["entity_compaction_ratio"]
    ):
        row = [graph, number(about["entity_compaction_ratio"])]
        row += [number(about["average_degree"], 1)]
        for task in TASKS:
            cell = {"graph": graph, "model": "hgt", "task": task, "dtype": "float32"}
            plain = used_mib(results.find("hector-none", **cell))
            compact = used_mib(results.find("hector-compaction", **cell))
            row += [number(plain, 0)]
            row += [number(compact / plain if plain and compact else None)]
        rows.append(row)
    header = ["graph", "entity compaction ratio", "average degree"]
    for task in TASKS:
        header += [f"{task} MiB", f"{task} compact / plain"]
    return markdown(header, rows)


def widths(results: Records) -> str:
    """Figure 3.12: what twice the width costs; products may use TF32."""
    rows, all_steps = [], []
    for name, cell in cells(results, ("tf32",)):
        times = [results.ms("hector", **cell, width=w) for w in WIDTHS]
        steps = [b / a if a and b else None for a, b in pairwise(times)]
        if any(times):
            rows.append([name, *(number(t, 3) for t in times), *map(number, steps)])
            all_steps += [s for s in steps if s is not None]
    if not rows:
        return "not measured yet"
    header = ["cell", *(f"{w} ms" for w in WIDTHS), "32 to 64", "64 to 128"]
    below = sum(s < 2 for s in all_steps)
    told = (
        f"Twice the width costs less than twice in {below} of {len(all_steps)} steps."
    )
    return f"{told}\n\n{markdown(header, rows)}"


def widths_told(results: Records) -> str:
    """The line above the table of `widths`; empty without any."""
    told, _, table = widths(results).partition("\n\n")
    return f"{told} Products may use TF32." if table else ""


def mapping(results: Records) -> str:
    """One program a group against programs that share small groups."""
    rows = []
    for name, cell in cells(results, ("float32",)):
        one, ours = (results.find(c, **cell) for c in ("hector-program", "hector"))
        if one and ours and "ms" in one and "ms" in ours and results.same(one, ours):
            ratio = number(one["ms"] / ours["ms"])
            rows.append([name, number(one["ms"], 3), number(ours["ms"], 3), ratio])
    return markdown(["cell", "a program a group ms", "shared ms", "ratio"], rows)


def breakdown(results: Records) -> str:
    """Figure 3.3: microseconds an epoch by part."""
    rows = []
    for record in results.by_key.values():
        if record["key"]["what"] != "profile" or "parts_us" not in record:
            continue
        key = record["key"]
        name = f"{key['graph']} {key['model']} {key['task']} {key['contender']}"
        parts = record["parts_us"]
        busy = sum(parts.values())
        api = record["api_us"]
        rows.append(
            [
                name,
                *(number(v, 0) for v in parts.values()),
                number(api, 0),
                number(100 * api / (api + busy) if api + busy else None, 0),
                number(record["num_launches"], 0),
            ]
        )
    header = ["cell", "matmul", "traversal", "indexing and copying", "other"]
    return markdown([*header, "CUDA API", "API %", "launches"], sorted(rows))


def kernels(results: Records, count: int = 5) -> str:
    """Our most expensive kernels of each cell against the device's ceilings."""
    rows = []
    for record in results.by_key.values():
        key = record["key"]
        if (key["what"], key["contender"]) != ("kernels", "hector"):
            continue
        limit = results.runs[record["run"]]["ceilings"]
        for k in record.get("kernels", ())[:count]:
            work = f"{k['gb_per_s']:.0f}", f"{k['tflop_per_s']:.1f}"
            share = 100 * k["gb_per_s"] / limit["copy_gb_per_s"]
            if k["operations"]:
                rate = 300 * k["tflop_per_s"] / limit["tf32_tflop_per_s"]
                share = max(share, rate)
            name = f"{key['graph']} {key['model']} {k['plan']}"
            what = " ".join(k["kernel"].replace("|", "/").split())[:70]
            times = number(k["us"], 0), number(k["predicted_us"], 0)
            rows.append([name, f"`{what}`", *times, *work, f"{share:.0f}"])
    header = ["cell", "kernel", "us", "predicted us", "GB/s", "TFLOP/s"]
    return markdown([*header, "% of a ceiling"], rows)


def kernels_by_setting(results: Records) -> str:
    """Figure 3.11: microseconds of RGAT's kernels with each fixed setting."""
    rows = []
    for record in results.by_key.values():
        key = record["key"]
        if key["what"] != "kernels" or key["contender"] == "hector":
            continue
        parts = dict.fromkeys(("gemm", "traversal", "other"), 0.0)
        for k in record.get("kernels", ()):
            word = k["kernel"].split()[0]
            parts[word if word in parts else "other"] += k["us"]
        setting = key["contender"].removeprefix("hector-")
        name = f"{key['graph']} {key['model']} {key['task']}, {setting}"
        total = sum(parts.values())
        rows.append([name, *(number(v, 0) for v in (*parts.values(), total))])
    return markdown(["cell", "products", "traversal", "other", "all"], sorted(rows))


SECTIONS = {
    "Speed-up over the best other": summary,
    "Ablation (Table 3.5)": ablation,
    "Cost model": choice,
    "Small groups share programs": mapping,
    "Memory against compaction ratio (Figure 3.10)": memory,
    "Widths (Figure 3.12)": widths,
    "Breakdown in microseconds (Figure 3.3)": breakdown,
    "Most expensive kernels": kernels,
    "Kernels by setting, microseconds (Figure 3.11)": kernels_by_setting,
    "All cells": details,
}


def machines(results: Records, date: str) -> str:
    """Device and versions of every run that took something."""
    used = {r["run"] for r in results.by_key.values()}
    lines = {}
    for i in sorted(used):
        run = results.runs[i]
        versions = ", ".join(
            f"{k} {run[k]}" for k in ("torch", "triton", "torch_geometric") if k in run
        )
        lines[f"{run['device']}; {versions}; {date}"] = None
    return "\n".join(lines)


ON_THE_PAGE = {
    "Speed-up over the best other": summary,
    "Cost model": choice,
    "Small groups share programs": mapping,
    "Memory against compaction ratio (Figure 3.10)": memory,
    "Twice the width (Figure 3.12)": widths_told,
    "Where a step's time goes, microseconds (Figure 3.3)": breakdown,
    "Kernels by setting, microseconds (Figure 3.11)": kernels_by_setting,
}


def rgnn(results: Path) -> str:
    """The page's section, from `rgnn.json` and `rgnn_parity.json` of a directory;
    empty if neither is there."""
    parts = []
    data = files.find(results / "rgnn.json")
    if data is not None:
        found = Records(data)
        parts.append(
            "**Relational layers.** One layer, 64 channels, one head, loss on random "
            "labels, 24 GiB: the fastest other of PyG's layers, a sorted per-relation "
            "product and torch's grouped product, over ours. "
            "Medians of 20 steps, all in one process. *Captured*: each contender's "
            "step as one CUDA graph, where it can be one."
        )
        sections = {name: build(found) for name, build in ON_THE_PAGE.items()}
        # A table without rows is a header and a line.
        filled = {n: t for n, t in sections.items() if t and t.count("\n") != 1}
        parts += [f"*{name}*\n\n{text}" for name, text in filled.items()]
        parts.append(machines(found, data["environment"].get("date", "")))
    data = files.find(results / "rgnn_parity.json")
    if data is not None:
        parts.append(parity(data))
    return "\n\n".join(parts)


def parity(data: dict[str, Any]) -> str:
    """Same start, same losses as PyG; accuracies over seeds."""
    rows = [
        [
            f"{r['data']} {r['model']}",
            str(r["num_epochs"]),
            f"{r['loss_difference']:.1e}",
            number(r["accuracy_same_start"], 4),
            number(r["pyg_accuracy_same_start"], 4),
            f"{number(r['mean_accuracy'], 4)} of {len(r['accuracies'])}",
        ]
        for r in data["cells"].values()
    ]
    head = ["", "epochs", "largest loss difference", "accuracy", "PyG's", "mean, seeds"]
    text = "**Training as PyG's layers train**, float64, from the same initial weights."
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"


def batches(data: dict[str, Any]) -> str:
    """Mini-batches, captured steps, and the first call."""
    cells_, settings = data["cells"], data["settings"]
    good = {name: c for name, c in cells_.items() if "error" not in c}
    drawn, captured = [], []
    for name, c in good.items():
        kind, *rest = name.split("/")
        times = [number(c.get(f"{side}_ms"), 3) for side in ("hector", "pyg")]
        if kind == "batch":
            row = [*rest, str(c["nodes"]), str(c["edges"]), *times]
            drawn.append([*row, number(c["ratio"]), f"{c['largest_loss_error']:.1e}"])
        elif kind == "captured":
            row = [" ".join(rest), times[0], number(c["captured_ms"], 3), times[1]]
            row += [number(c["ratio"]), number(c.get("in_a_row_ms"), 3)]
            row += [number(c.get("kernels"), 0), number(c.get("kernels_ms"), 3)]
            captured.append(row)
    parts = []
    if drawn:
        text = (
            f"**Mini-batches**: two layers, {settings['seeds']} seeds, fanouts "
            f"{' and '.join(map(str, settings['fanouts']))} on ogbn-mag's sizes, "
            "features on the device, the same neighbourhoods for both; forward and "
            "backward in ms, without drawing."
        )
        head = ["", "nodes", "edges", "ours", "PyG", "ratio", "largest loss error"]
        parts += [text, markdown(head, drawn)]
    parts += [
        "**Captured steps**: forward, backward and Adam on small graphs, in ms; the "
        "ratio is PyG's time over the captured step's. *In a row*: a captured step of "
        "twenty that nobody waits for; *kernels*: of a captured step, and the sum of "
        "their times.",
        markdown(
            [
                "",
                "ours",
                "captured",
                "PyG",
                "ratio",
                "in a row",
                "kernels",
                "their sum",
            ],
            captured,
        ),
    ]
    first = good.get("first")
    if first is not None:
        parts.append(
            f"The first training step of an RGAT layer of a width that no kernel was "
            f"made for: {first['empty_s']} s with empty caches, {first['kept_s']} s in "
            "a new process with the caches kept"
            + (
                f", {first['shipped_s']} s with a bundle of the kernels."
                if "shipped_s" in first
                else "."
            )
        )
    return "\n\n".join([*parts, where(data)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path)
    args = parser.parse_args(argv)
    results = Records(files.read(args.results))
    for title, section in SECTIONS.items():
        print(f"### {title}\n\n{section(results)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())


def compilation(data: dict[str, Any]) -> str:
    """What a first step compiles, without a GPU."""
    about = data["settings"]
    rows = [
        [
            kind,
            str(c["empty"]["kernels"]),
            *(number(c[way]["cpu_s"]) for way in ("empty", "kept", "shipped")),
            number(c["empty"]["cpu_s"] / c["shipped"]["cpu_s"], 0),
        ]
        for kind, c in data["cells"].items()
        if "error" not in c
    ]
    text = (
        f"**Compilation alone**, for compute capability {about['arch'] / 10} on a "
        f"machine without a GPU: a training step of a layer of {about['width']} "
        "channels on AIFB's sizes in a new process, imports excluded. Seconds of CPU "
        "time: with empty caches, with what the first process left, and with empty "
        "caches and a bundle (`hector kernels add`) of the kernels."
    )
    head = ["", "kernels", "empty", "kept", "shipped", "empty / shipped"]
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"


def accuracy(data: dict[str, Any]) -> str:
    """Mini-batch training beside full-batch training, of seeds that ran both ways."""
    found = compared(data["cells"])
    rows = [
        [
            f"{c.data} {c.model}",
            str(len(c.differences)),
            number(100 * c.full, 1),
            number(100 * c.batches, 1),
            f"{100 * (c.batches - c.full):+.1f}"
            + (f" ± {100 * spread(c.differences):.1f}" if c.differences[1:] else ""),
            number(c.p, 3),
            number(c.corrected, 3),
        ]
        for c in found
    ]
    text = (
        "**Accuracy of mini-batch training.** Test accuracy in percent from the "
        "same initial weights, equally many steps, with seeds that chose no setting; "
        "fanouts "
        f"{' and '.join(map(str, data['settings']['fanouts']))} in each relation. "
        "`mag` is a part of ogbn-mag's graph with made features and labels. p of an "
        "exact sign-flip test of the seeds' differences, and with Holm's correction "
        f"over the {len(found)} cells; "
        f"{sum(c.differs for c in found)} differences are below {LEVEL}."
    )
    if any(len(c.differences) < SEEDS for c in found):
        text += (
            f" The run was cut before its {SEEDS} seeds: cells of fewer than 9 cannot "
            "come below that level, whatever they hold."
        )
    head = ["", "seeds", "full batch", "mini-batches", "difference", "p", "corrected"]
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"


def epochs(data: dict[str, Any]) -> str:
    """Mini-batch epochs with features in host memory."""
    cells_, settings = data["cells"], data["settings"]
    rows = []
    for kind in ("rgcn", "rgat", "hgt"):
        mine = cells_.get(f"{kind}/ours", {})
        found = cells_.get(f"{kind}/ratio", {})
        wrong = cells_.get(f"{kind}/losses", {})
        theirs = {n: c for n, c in cells_.items() if n.startswith(f"{kind}/pyg, ")}
        best = theirs.get(f"{kind}/pyg, {found.get('best')}", {})
        rows.append(
            [
                kind,
                str(mine.get("batches", "-")),
                *(number(mine.get(f"{s}_ms"), 2) for s in ("draw", "gather", "step")),
                number(mine.get("epoch_s"), 3),
                number(mine.get("over_longest_stage"), 2),
                number(best.get("epoch_s"), 3),
                found.get("best", "-"),
                number(found.get("ratio"), 2),
                *(
                    f"{wrong[t]:.1e}" if t in wrong else "-"
                    for t in ("float32", "float64")
                ),
            ]
        )
    text = (
        f"**Mini-batch epochs**, features in host memory: two layers behind a linear "
        f"one, {settings['seeds']} seeds, fanouts "
        f"{' and '.join(map(str, settings['fanouts']))} on ogbn-mag's sizes, Adam. "
        "*Draw*, *gather*, *step*: each stage alone, ms a batch; an epoch in seconds, "
        "over its longest stage, and PyG's best: `NeighborLoader`, torch-sparse's "
        "sampler. Loss errors: of the same samples through both, relative."
    )
    head = [
        "",
        "batches",
        "draw",
        "gather",
        "step",
        "epoch",
        "over its longest stage",
        "PyG's",
        "its best way",
        "ratio",
        "loss error, float32",
        "float64",
    ]
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"

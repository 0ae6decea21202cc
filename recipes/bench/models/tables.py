"""Tables and chart of `models.evaluation`, `models.real_models`, `models.graphs`."""

from pathlib import Path
from typing import Any

from recipes.bench.common.results import Data, find
from recipes.bench.common.text import markdown, where

SEED_CUT = (0.28, 0.40)
"""Figure 5.11: the peak falls by 28 to 40 %, the step time hardly moves."""
COLUMNS = ("keep", "offloaded", "recompute")
COLOURS = {"keep": "#8c959f", "offloaded": "#0969da", "recompute": "#d4a72c"}

Rows = dict[str, dict[str, dict[str, Any]]]


def rows_of(data: dict[str, Any]) -> Rows:
    """Cells by row and column, errors and single cells (the link) left out."""
    rows: Rows = {}
    for name, cell in data["cells"].items():
        if "/" in name and "step_ratio" in cell:
            row, column = name.split("/", 1)
            rows.setdefault(row, {})[column] = cell
    return rows


def shown(cell: dict[str, Any] | None) -> str:
    """Step ratio and peak of a cell."""
    if cell is None:
        return "-"
    return f"{cell['step_ratio']:.3f}x, {cell['peak_gb']:.2f} GB"


def equality(rows: Rows) -> str:
    """What the losses say, and whether the kernels themselves are deterministic."""
    unequal = [
        row
        for row, cells in rows.items()
        if not cells.get("offloaded", {"losses_equal": True})["losses_equal"]
    ]
    if not unequal:
        return (
            "The losses of every offloaded run equal those of `keep` to the last bit."
        )
    restless = [
        row
        for row in unequal
        if not rows[row].get("keep again", {"losses_equal": True})["losses_equal"]
    ]
    text = f"Losses differ from `keep` in {', '.join(unequal)}"
    first = [
        row
        for row in unequal
        if rows[row]["offloaded"]["losses"][0] != rows[row]["keep"]["losses"][0]
    ]
    text += f", the first step's in {', '.join(first) or 'none of them'}"
    again = [row for row in unequal if "keep again" in rows[row]]
    if not again:
        return f"{text}; `keep` was not run a second time."
    return (
        f"{text}; of {', '.join(again)} a second run of `keep` itself differs in "
        f"{', '.join(restless) or 'none'}."
    )


def models(results_dir: Path) -> str:
    """Figure 5.11 as a table; empty when models.json is missing."""
    data = find(results_dir / "models.json")
    if data is None:
        return ""
    rows, settings = rows_of(data), data["settings"]
    body = []
    for name, cells in rows.items():
        ours, keep = cells.get("offloaded"), cells.get("keep")
        cut = f"{1 - ours['peak_ratio']:.0%}" if ours and ours["peak_ratio"] else "-"
        kept = f"{keep['step_ms']:.0f} ms, {keep['peak_gb']:.2f} GB" if keep else "-"
        others = (shown(cells.get(c)) for c in ("recompute", "offloaded, no recipes"))
        body.append([name, kept, shown(ours), cut, *others])
    text = (
        "**BERT, GPT, T5** of `transformers` (hidden x layers; `v50304`: a whole model "
        f"with that vocabulary), {settings['precision']}, {settings['optimizer']}, "
        "batch 16 (the whole model: 8), sequence 1024: step time over `keep` and peak "
        "of forward and backward. `offloaded` is `ssdtrain.offload(model, "
        'target="host")` with its defaults. The dissertation\'s Figure 5.11 reports '
        f"{SEED_CUT[0]:.0%} to {SEED_CUT[1]:.0%} less at no cost. {equality(rows)}"
    )
    head = ["", "keep", "offloaded", "peak cut", "recompute", "offloaded, no recipes"]
    rival = rivals_of_the_full_model(rows)
    return "\n\n".join(filter(None, [text, markdown(head, body), rival, where(data)]))


def real_models(data: Data) -> str:
    """Stock models: ratio, peak and prediction of every column; the host's rows."""
    table: dict[str, dict[str, Data]] = {}
    host: dict[str, Data] = {}
    for name, cell in data["cells"].items():
        place, column = name.rsplit("/", 1)
        if f"/{data['settings']['host_tokens']}/" in name:
            host[column] = cell
        else:
            table.setdefault(column, {})[place] = cell
    places = list(dict.fromkeys(p for cells in table.values() for p in cells))
    rows = [
        [column, *(real_entry(cells.get(place)) for place in places)]
        for column, cells in table.items()
    ]
    text = (
        "**Stock models of transformers**, random weights, bf16, sdpa, Liger's fused "
        "linear cross-entropy for every column, fused AdamW, a process a row: step "
        "over the plain step (the middle of the timed ones; where lengths differ, by "
        "tokens) and activation peak above the level before the step; in "
        "brackets what the plan predicted. `gc` is transformers' non-reentrant "
        "checkpointing, `ours` the defaults. Model, what is trained, tokens a step, "
        "mode; `:24` has 24 layers."
    )
    parts = [text, markdown(["", *places], rows)] if rows else []
    timed = [
        [
            column,
            f"{cell['host_ms']:.1f}",
            f"{cell.get('host_ratio', 1):.2f}x",
            f"{cell.get('host_us_per_saved', 0):.1f}",
        ]
        for column, cell in host.items()
        if "host_ms" in cell
    ]
    if timed:
        parts.append(
            "Host time until forward and backward are enqueued, 4B shape, "
            f"{data['settings']['host_tokens']} tokens: microseconds for each tensor "
            "that autograd saves, parameters included, over plain PyTorch."
        )
        parts.append(markdown(["", "ms", "over plain", "us a tensor"], timed))
    return "\n\n".join([*parts, where(data)])


def real_entry(cell: Data | None) -> str:
    """A column of a model in a table."""
    if cell is None:
        return "-"
    if "step_ms" not in cell:
        return str(cell.get("error", "-"))[:40]
    ratio = cell.get("step_ratio")
    text = f"{ratio:.3f}x" if ratio else f"{cell['step_ms']:.0f} ms"
    text += f", {cell['peak_gb']:.1f} GB"
    if "predicted_ms" in cell:
        text += f" ({cell['predicted_ms'] / cell['step_ms'] - 1:+.1%} of the step)"
    if cell.get("settled") is False:
        text += ", plan not settled"
    return text


def graphs(data: Data) -> str:
    """Captured steps: time and reserved memory over the plain graph's, equality."""
    settings, cells = data["settings"], data["cells"]
    plain = cells.get("graph", {})
    if "pool_gb" not in plain:
        return ""
    rows = [
        ["eager", f"{cells['eager']['step_ms']:.1f} ms", *["-"] * 4],
        ["graph", f"{plain['step_ms']:.1f} ms", "-", f"{plain['pool_gb']:.2f} GB"],
    ]
    rows[-1] += ["-"] * 2
    for name, cell in cells.items():
        if name in ("eager", "graph"):
            continue
        if "pool_ratio" not in cell:
            rows.append([name, str(cell.get("error", "-"))[:40], *["-"] * 4])
            continue
        rows.append(
            [
                name,
                f"{cell['step_ratio']:.3f}x ({cell['eager_ratio']:.2f}x of eager)",
                _foretold(cell.get("graph_plan")),
                f"{cell['pool_gb']:.2f} GB ({cell['pool_ratio']:.0%})",
                f"{cell['pinned_gb']:.2f} GB",
                f"{cell['byte_equal']} of {cell['replays']}",
            ]
        )
    whole = "the most that is in use in it" if "peak_gb" in plain else "the plain one's"
    text = (
        f"**A step as one CUDA graph**: {settings['layers']} decoder layers of Qwen3 "
        f"1.7B's shape, {settings['tokens']} tokens, bf16, deterministic kernels, "
        "forward and backward captured whole, with and without ssdtrain in them; over "
        "the plain graph. `pool` is what the allocator reserves for the graph, "
        f"`budget` is given {settings['budget_share']:g} of {whole}; `equal` are "
        "replays whose loss and gradients are the plain graph's to the last bit."
    )
    head = ["", "step", "predicted", "pool", "pinned", "equal"]
    return "\n\n".join([text, markdown(head, rows), where(data)])


def _foretold(plan: Any) -> str:
    """The plan's step over the step that keeps everything."""
    if not plan or not plan.get("keep_ms"):
        return "-"
    return f"{plan['step_ms'] / plan['keep_ms']:.3f}x"


def rivals_of_the_full_model(rows: Rows) -> str:
    """Columns that only one row has, in a sentence."""
    usual = {*COLUMNS, "offloaded, no recipes", "keep again"}
    found = [
        f"{column} {shown(cell)}"
        for cells in rows.values()
        for column, cell in cells.items()
        if column not in usual
    ]
    return f"The whole model under others: {'; '.join(found)}." if found else ""


def chart(figure: Any, data: Data) -> None:
    """Figure 5.11: step time and peak of every model, kept, offloaded, recomputed."""
    rows = {name: c for name, c in rows_of(data).items() if set(COLUMNS[:2]) <= set(c)}
    axes = figure.subplots(2, 1, sharex=True)
    places = range(len(rows))
    for axis, key, label in (
        (axes[0], "step_ms", "step time (ms)"),
        (axes[1], "peak_gb", "activation peak (GB)"),
    ):
        for number, column in enumerate(COLUMNS):
            values = [cells.get(column, {}).get(key, 0) for cells in rows.values()]
            left = [place + (number - 1) * 0.27 for place in places]
            axis.bar(left, values, 0.25, color=COLOURS[column], label=column)
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    for place, cells in zip(places, rows.values(), strict=True):
        cut = 1 - cells["offloaded"]["peak_ratio"]
        top = cells["offloaded"]["peak_gb"]
        axes[1].text(place, top, f"-{cut:.0%}", ha="center", va="bottom", size=8)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3
    )
    axes[1].set_xticks(list(places), [name.replace(" ", "\n", 1) for name in rows])
    low, high = SEED_CUT
    axes[1].set_xlabel(f"peak cut in the source's Figure 5.11: {low:.0%} to {high:.0%}")

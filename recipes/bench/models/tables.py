"""Tables of the model benchmarks, and what a user gains: one row a model."""

import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from recipes.bench.harness.records import RESULTS, Data, named
from recipes.bench.harness.tables import Column, error_of, grouped, paragraphs, table
from recipes.bench.models.fits import COLUMNS, is_good, is_unfinished
from recipes.bench.models.grid import best_ms, verdict

SEED_CUT = "28% to 40%"
"""Figure 5.11: the peak falls by so much, the step time hardly moves."""
SHORT = re.compile(r"short by (?:at least )?(\d+) bytes")
"""What an error says."""
KEEP, CHECKPOINTED = "keep", "gc"
OURS = "ours budget=1gc"
MODES = {
    "eager": "",
    "compiled": ", compiled layers",
    "fsdp2": ", FSDP2 on two GPUs",
    "tp": ", tensor parallel on two GPUs",
}
Rows = dict[str, dict[str, Data]]


# -- what a user gains -----------------------------------------------------------------


class Cell(NamedTuple):
    """A model on a GPU, and its three rows."""

    gpu: str
    name: str
    rows: Rows


def newest(results: Path = RESULTS) -> list[Cell]:
    """The newest measurement of each cell that has both ways to compare; of one day's
    files the first by name."""
    found: dict[tuple[str, str], Cell] = {}
    kept: dict[tuple[str, str], Data] = {}
    files = reversed(named("models/real_models*", results))
    for data in sorted(files, key=lambda data: str(data["environment"]["date"])):
        gpu = "H200" if "H200" in data["environment"]["device"] else "H100"
        for name, columns in grouped(data["cells"]).items():
            if plain := columns.get(KEEP):
                before = kept.get((gpu, name), plain)
                kept[gpu, name] = plain if "step_ms" in plain else before
            rows = {c: columns.get(c, {}) for c in (CHECKPOINTED, OURS)}
            if all("step_ms" in row for row in rows.values()):
                found[gpu, name] = Cell(gpu, name, rows)
    for key, cell in found.items():
        if key in kept:  # of another day, if need be
            cell.rows[KEEP] = kept[key]
    return [found[key] for key in sorted(found) if key[1].split("/")[-1] in MODES]


def gains(*_: Data) -> str:
    """The first ten cells, plain steps that do not fit first."""
    cells = sorted(newest(), key=lambda cell: "step_ms" in cell.rows.get(KEEP, {}))
    columns: dict[str, Column] = {
        "model": _model,
        "GPU": lambda cell: cell.gpu,
        "tokens": lambda cell: cell.name.split("/")[2],
        "plain": lambda cell: _figures(cell.rows.get(KEEP)),
        "checkpointing": lambda cell: _figures(cell.rows[CHECKPOINTED]),
        "ssdtrain": lambda cell: _figures(cell.rows[OURS]),
        "in words": _faster,
    }
    return table(cells[:10], columns, line="--")


def _model(cell: Cell) -> str:
    model, tuned, _, mode = cell.name.split("/")
    name, _, layers = model.partition(":")
    text = "mixture of 32 experts, 2048 wide" if name == "moe" else name
    text += f", {layers} layers" if layers else ""
    return f"{text}, {'LoRA' if tuned == 'lora' else tuned}{MODES[mode]}"


def _faster(cell: Cell) -> str:
    ratio = cell.rows[CHECKPOINTED]["step_ms"] / cell.rows[OURS]["step_ms"]
    told = f"{ratio - 1:.0%} faster" if ratio > 1 else f"{1 - ratio:.0%} slower"
    return f"{told} than checkpointing"


def _figures(row: Data | None) -> str:
    if row is None:
        return "-"
    if "step_ms" not in row:
        return "out of memory" if "memory" in str(row).lower() else "-"
    return f"{row['step_ms']:.0f} ms, {row['peak_gb']:.1f} GB"


# -- real_models -----------------------------------------------------------------------


def real_models(data: Data) -> str:
    """Ratio, peak and prediction of every column."""
    places = {p: c for p, c in grouped(data["cells"]).items() if not _is_host(p, data)}
    columns = {column: None for cells in places.values() for column in cells}
    rows = [{"": column, **_of_column(places, column)} for column in columns]
    return table(rows, {head: lambda row, h=head: row[h] for head in ("", *places)})


def _of_column(places: Rows, column: str) -> dict[str, str]:
    return {place: real_entry(cells.get(column)) for place, cells in places.items()}


def _is_host(place: str, data: Data) -> bool:
    return f"/{data['settings']['host_tokens']}/" in f"{place}/"


def real_entry(cell: Data | None) -> str:
    """A column of a model in a table."""
    if cell is None or "step_ms" not in cell:
        return str((cell or {}).get("error", "-"))[:40]
    ratio = cell.get("step_ratio")
    text = f"{ratio:.3f}x" if ratio else f"{cell['step_ms']:.0f} ms"
    text += f", {cell['peak_gb']:.1f} GB"
    if "predicted_ms" in cell:
        text += f" ({cell['predicted_ms'] / cell['step_ms'] - 1:+.1%} of the step)"
    return text + (", plan not settled" if cell.get("settled") is False else "")


def real_host(data: Data) -> str:
    """The host's time for the rows of few tokens."""
    cells = {
        column: {"host_ratio": 1, "host_us_per_saved": 0, **cell}
        for place, columns in grouped(data["cells"]).items()
        for column, cell in columns.items()
        if _is_host(place, data)
    }
    columns: dict[str, Column] = {
        "": "{name}",
        "ms": "{host_ms:.1f}",
        "over plain": "{host_ratio:.2f}x",
        "us a tensor": "{host_us_per_saved:.1f}",
    }
    return table(cells, columns, needs="host_ms")


# -- within a limit --------------------------------------------------------------------


def fits(data: Data) -> str:
    """Which cases train in what checkpointing reserves."""
    cases = grouped(data["cells"])
    ours = [column for column in COLUMNS if column != "gc"]
    counts = ", ".join(f"`{each}` {_counted(cases, each)}" for each in ours)
    columns: dict[str, Column] = {"": "{name}", "gc": _plain_fits}
    columns |= {each: lambda c, e=each: _fitted(c.get(e)) for each in ours}
    return f"{counts} trained.\n\n{table(cases, columns)}"


def _plain_fits(cells: Data) -> str:
    plain = cells.get("gc", {})
    if "reserved_gb" not in plain:
        return str(plain.get("error", "-"))[:40]
    return f"{plain['allocated_gb']:.1f}, {plain['reserved_gb']:.1f} GB"


def _counted(cases: Rows, column: str) -> str:
    """How many are good, of those that came to an end."""
    cells = [cells[column] for cells in cases.values() if column in cells]
    unfinished = sum(is_unfinished(cell) for cell in cells)
    text = f"{sum(is_good(cell) for cell in cells)} of {len(cells) - unfinished}"
    return f"{text} ({unfinished} unfinished)" if unfinished else text


def _fitted(cell: Data | None) -> str:
    if cell is None:
        return "-"
    if "error" in cell:
        return error_of(cell, 60)
    return f"{cell['reserved_gb']:.1f} GB" + ("" if is_good(cell) else ", unfinished")


def grid(data: Data) -> str:
    """What became of each model and length under each limit."""
    cells = data["cells"]
    limits = sorted({name.partition("@")[2] for name in cells}, key=int)
    cases: Rows = {}
    for name, cell in cells.items():
        case, _, limit = name.partition("@")
        cases.setdefault(case, {})[limit] = cell
    told = [verdict(cell) for cell in cells.values()]
    ratios = [
        f"`{name}` {cell['step_ms'] / best:.3f} of {best:.0f} ms"
        for name, cell in cells.items()
        if (best := best_ms(cell)) is not None
    ]
    columns: dict[str, Column] = {"": "{name}"}
    columns |= {f"{each} GB": lambda c, e=each: _limited(c[e]) for each in limits}
    counts = ", ".join(f"{told.count(kind)} {kind}" for kind in sorted(set(told)))
    return (
        f"{counts}. Step over the best of plans for a grid of byte budgets in the same "
        f"process: {', '.join(ratios) or 'not measured'}.\n\n{table(cases, columns)}"
    )


def _limited(cell: Data) -> str:
    told = verdict(cell)
    if told == "refused":
        short = SHORT.search(str(cell["error"]))
        return f"refused, {int(short[1]) / 1e9:.1f} GB" if short else "refused"
    if "error" in cell:
        return f"{told}: {error_of(cell)}"
    text = f"{cell['reserved_gb']:.1f} of {cell['limit_gb']:.1f} GB"
    return text if told == "fits" else f"{text}, {told}"


def lengths(data: Data) -> str:
    """Changing lengths: over plain, long steps, budget."""
    settings = data["settings"]
    columns: dict[str, Column] = {
        "tokens a step": lambda c: (
            f"{c['name']}, {min(c['tokens'])} to {max(c['tokens'])}"
            if "ratio" in c
            else c["name"]
        ),
        "over plain": lambda c: f"{c['ratio']:.3f}x" if "ratio" in c else error_of(c),
        "plain, later": lambda c: _later(c.get("plain_later_s"), c.get("plain_s")),
        "longest settled": "{longest_settled:.2f}",
        "longest": "{longest_late:.2f}",
        "long steps": lambda c: f"{c['num_long']} of {len(c['steps_ms'])}",
        "peak": "{peak_gb:.2f} of {budget_gb:.2f} GB",
    }
    told = f"The model is `{settings['model']}`, the budget {settings['share']:.0%}."
    return f"{told}\n\n{table(data['cells'], columns)}"


def predictions(data: Data) -> str:
    """Errors of step and memory, and whether budgets held."""
    plans = {
        name: [each for each in cell.get("plans", {}).values() if "step_ms" in each]
        for name, cell in data["cells"].items()
    }
    every = [each for own in plans.values() for each in own]
    if not every:
        return ""
    rows = {n: {**cell, "plans": plans[n]} for n, cell in data["cells"].items()}
    columns: dict[str, Column] = {
        "": "{name}",
        "plans": lambda c: str(len(c["plans"])) if c["plans"] else error_of(c),
        "step": lambda c: _errors(c["plans"], "step_error"),
        "whole peak": lambda c: _errors(c["plans"], "whole_error"),
        "budgets exceeded": lambda c: _exceeded(c["plans"]),
        "plain, later": lambda c: (
            ""
            if c["name"] == "all"
            else _later(c.get("plain_later_ms"), c.get("plain_ms"))
        ),
    }
    return table({**rows, "all": {"plans": every}}, columns)


def _later(later: float | None, before: float | None) -> str:
    """By how much one is more than the other; "-" where one is not known."""
    return f"{later / before - 1:+.1%}" if later and before else "-"


def _errors(plans: list[Data], key: str) -> str | None:
    """Mean and worst."""
    errors = [abs(plan[key]) for plan in plans if key in plan]
    mean = statistics.fmean(errors) if errors else 0.0
    return f"{mean:.1%}, {max(errors, default=0.0):.1%}" if plans else None


def _exceeded(plans: list[Data]) -> str | None:
    budgets = [plan for plan in plans if "budget_gb" in plan]
    over = sum(plan["peak_gb"] > plan["budget_gb"] for plan in budgets)
    return f"{over} of {len(budgets)}" if plans else None


# -- BERT, GPT, T5 ---------------------------------------------------------------------


def rows_of(data: Data) -> Rows:
    """Cells by row and column, errors and single cells (the link) left out."""
    return grouped(data["cells"], "step_ratio")


def ratio_and_peak(cell: Data | None) -> str:
    """Step ratio and peak of a cell."""
    return "-" if cell is None else "{step_ratio:.3f}x, {peak_gb:.2f} GB".format(**cell)


def models(data: Data) -> str:
    """Figure 5.11 as a table."""
    rows = rows_of(data)
    columns: dict[str, Column] = {
        "": "{name}",
        "keep": "{keep[step_ms]:.0f} ms, {keep[peak_gb]:.2f} GB",
        "offloaded": lambda c: ratio_and_peak(c.get("offloaded")),
        "peak cut": lambda c: f"{1 - c['offloaded']['peak_ratio']:.0%}",
        "recompute": lambda c: ratio_and_peak(c.get("recompute")),
        "offloaded, no recipes": lambda c: ratio_and_peak(
            c.get("offloaded, no recipes")
        ),
    }
    return paragraphs(equality(rows), table(rows, columns))


def equality(rows: Rows) -> str:
    """What the losses say, and whether the kernels themselves are deterministic."""
    equal = {"losses_equal": True}
    unequal = [
        row
        for row, cells in rows.items()
        if not cells.get("offloaded", equal)["losses_equal"]
    ]
    if not unequal:
        return (
            "The losses of every offloaded run equal those of `keep` to the last bit."
        )
    first = [
        row
        for row in unequal
        if rows[row]["offloaded"]["losses"][0] != rows[row]["keep"]["losses"][0]
    ]
    text = f"Losses differ from `keep` in {', '.join(unequal)}"
    text += f", the first step's in {', '.join(first) or 'none of them'}"
    again = [row for row in unequal if "keep again" in rows[row]]
    if not again:
        return f"{text}; `keep` was not run a second time."
    restless = [row for row in again if not rows[row]["keep again"]["losses_equal"]]
    return (
        f"{text}; of {', '.join(again)} a second run of `keep` itself differs in "
        f"{', '.join(restless) or 'none'}."
    )


def graphs(data: Data) -> str:
    """Captured steps: time and reserved memory over the plain graph's, equality."""
    columns: dict[str, Column] = {
        "": "{name}",
        "step": _captured,
        "predicted": lambda c: "{:.3f}x".format(
            c["graph_plan"]["step_ms"] / c["graph_plan"]["keep_ms"]
        ),
        "pool": lambda c: (
            f"{c['pool_gb']:.2f} GB"
            + (f" ({c['pool_ratio']:.0%})" if "pool_ratio" in c else "")
        ),
        "pinned": "{pinned_gb:.2f} GB",
        "equal": "{byte_equal} of {replays}",
    }
    if "pool_gb" not in data["cells"].get("graph", {}):
        return ""
    return table(data["cells"], columns)


def _captured(cell: Data) -> str:
    if cell["name"] in ("eager", "graph"):
        return f"{cell['step_ms']:.1f} ms"
    if "pool_ratio" not in cell:
        return error_of(cell)
    return "{step_ratio:.3f}x ({eager_ratio:.2f}x of eager)".format(**cell)


def chart(figure: Any, data: Data) -> None:
    """Figure 5.11: step time and peak of every model, kept, offloaded, recomputed."""
    colours = {"keep": "#8c959f", "offloaded": "#0969da", "recompute": "#d4a72c"}
    rows = {n: c for n, c in rows_of(data).items() if {"keep", "offloaded"} <= set(c)}
    axes = figure.subplots(2, 1, sharex=True)
    places = range(len(rows))
    for axis, key, label in (
        (axes[0], "step_ms", "step time (ms)"),
        (axes[1], "peak_gb", "activation peak (GB)"),
    ):
        for number, (column, colour) in enumerate(colours.items()):
            values = [cells.get(column, {}).get(key, 0) for cells in rows.values()]
            left = [place + (number - 1) * 0.27 for place in places]
            axis.bar(left, values, 0.25, color=colour, label=column)
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
    axes[1].set_xlabel(f"peak cut in the source's Figure 5.11: {SEED_CUT}")


def frontier(figure: Any, data: Data) -> None:
    """Step over keep against peak, a panel a model: the first four, without the host's
    rows."""
    panels = {n: p for n, p in rows_of(data).items() if not _is_host(n, data)}
    scatter(figure, dict(list(panels.items())[:4]))


def scatter(figure: Any, panels: Rows) -> None:
    """Step over keep against peak, a marker a column, a panel a model."""
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axis, (name, columns) in zip(axes, panels.items(), strict=False):
        for number, (column, cell) in enumerate(columns.items()):
            axis.plot(
                [cell["peak_gb"]],
                [cell["step_ratio"]],
                marker="o" if column.startswith("ours") else "^",
                linestyle="",
                color=f"C{number % 10}",
                label=column,
            )
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("activation peak (GB)")
        axis.set_ylabel("step / keep")
    axes[-1].legend(fontsize=7)

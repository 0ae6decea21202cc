"""Tables of the model benchmarks, and what a user gains: one row a model."""

from pathlib import Path
from typing import Any, NamedTuple

from recipes.bench.harness.records import RESULTS, Data, named
from recipes.bench.harness.tables import Column, grouped, table

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


# -- unseen ----------------------------------------------------------------------------

UNSEEN = {
    "checkpointing": "=gc",
    "every second layer": "=second",
    "selective": "=selective",
    "plain, all fits": "fit",
    "plain, `max_overhead=0.02`": "overhead",
}


def unseen(data: Data) -> str:
    """Step over the base's, and the upper end of its 95 % interval."""
    places = grouped(data["cells"])

    def entry(cell: Data | None) -> str:
        told = cell is not None and "ratio" in cell
        return f"{cell['ratio']:.2f} (to {cell['upper']:.2f})" if told else "-"

    rows = [
        {"model": name} | {head: entry(own.get(way)) for head, way in UNSEEN.items()}
        for name, own in places.items()
    ]
    heads = ("model", *UNSEEN)
    return table(rows, {head: lambda row, h=head: row[h] for head in heads})


# -- real_models -----------------------------------------------------------------------


def real_models(data: Data) -> str:
    """Ratio, peak and prediction of every column."""
    places = grouped(data["cells"])
    columns = {column: None for cells in places.values() for column in cells}
    rows = [
        {"": column}
        | {place: real_entry(cells.get(column)) for place, cells in places.items()}
        for column in columns
    ]
    return table(rows, {head: lambda row, h=head: row[h] for head in ("", *places)})


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


def rows_of(data: Data) -> Rows:
    """Cells by row and column, errors and single cells (the link) left out."""
    return grouped(data["cells"], "step_ratio")


def ratio_and_peak(cell: Data | None) -> str:
    """Step ratio and peak of a cell."""
    return "-" if cell is None else "{step_ratio:.3f}x, {peak_gb:.2f} GB".format(**cell)


def frontier(figure: Any, data: Data) -> None:
    """Step over keep against peak, a panel a model: the first four."""
    scatter(figure, dict(list(rows_of(data).items())[:4]))


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

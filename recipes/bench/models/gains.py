"""What a user gains: one row a model, the newest measurement of each."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from recipes.bench.common.text import markdown

KEEP, CHECKPOINTED = "keep", "gc"
OURS = "ours budget=1gc"
MOST_ROWS = 10
MODES = {
    "eager": "",
    "compiled": ", compiled layers",
    "fsdp2": ", FSDP2 on two GPUs",
    "tp": ", tensor parallel on two GPUs",
}
NAMES = {"moe": "mixture of 32 experts, 2048 wide"}
HEAD = ["model", "GPU", "tokens", "plain", "checkpointing", "ssdtrain", "in words"]
TEXT = (
    "Each row compares three ways to train one model: keeping everything, "
    "checkpointing every layer, and ssdtrain in the memory that checkpointing took "
    "(`memory_budget`). A cell has the time of a step and the memory of "
    'activations. "Out of memory" and "-" mean that there is no such step.'
)


class Cell(NamedTuple):
    """A model on a GPU, and its three rows."""

    gpu: str
    name: str
    rows: dict[str, dict[str, Any]]


def newest(area: Path) -> list[Cell]:
    """Return the newest measurement of each cell that has both ways to compare."""
    files = [json.loads(path.read_text()) for path in area.glob("real_models*.json")]
    found: dict[tuple[str, str], Cell] = {}
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for data in sorted(files, key=lambda data: str(data["environment"]["date"])):
        gpu = "H200" if "H200" in data["environment"]["device"] else "H100"
        for name in {key.rpartition("/")[0] for key in data["cells"]}:
            rows = {
                column: row
                for column in (KEEP, CHECKPOINTED, OURS)
                if (row := data["cells"].get(f"{name}/{column}")) is not None
            }
            if plain := data["cells"].get(f"{name}/{KEEP}"):
                kept[gpu, name] = (
                    plain if "step_ms" in plain else kept.get((gpu, name), plain)
                )
            if all("step_ms" in rows.get(one, {}) for one in (CHECKPOINTED, OURS)):
                found[gpu, name] = Cell(gpu, name, rows)
    for key, cell in found.items():
        if key in kept:  # of another day, if need be
            cell.rows[KEEP] = kept[key]
    return [found[key] for key in sorted(found) if key[1].split("/")[-1] in MODES]


def gains(area: Path) -> str:
    """Return the table of the first ten cells, plain steps that do not fit first;
    empty where nothing is recorded."""
    cells = sorted(newest(area), key=lambda cell: "step_ms" in cell.rows.get(KEEP, {}))
    rows = [_row(cell) for cell in cells[:MOST_ROWS]]
    return f"{TEXT}\n\n{markdown(HEAD, rows, '--')}" if rows else ""


def _row(cell: Cell) -> list[str]:
    model, tuned, tokens, mode = cell.name.split("/")
    name, _, layers = model.partition(":")
    shown = NAMES.get(name, name) + (f", {layers} layers" if layers else "")
    ours, theirs = cell.rows[OURS], cell.rows[CHECKPOINTED]
    faster = theirs["step_ms"] / ours["step_ms"] - 1
    told = f"{faster:.0%} faster than checkpointing"
    if faster <= 0:
        told = f"{1 - theirs['step_ms'] / ours['step_ms']:.0%} slower"
        told = f"{told} than checkpointing"
    return [
        f"{shown}, {'LoRA' if tuned == 'lora' else tuned}{MODES[mode]}",
        cell.gpu,
        tokens,
        *(_figures(cell.rows.get(name)) for name in (KEEP, CHECKPOINTED, OURS)),
        told,
    ]


def _figures(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if "step_ms" not in row:
        return "out of memory" if "memory" in str(row).lower() else "-"
    return f"{row['step_ms']:.0f} ms, {row['peak_gb']:.1f} GB"

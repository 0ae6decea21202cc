"""The figures of docs/compared-with.md are those of the recorded results."""

import json
import re
from typing import Any

from recipes.bench.models.tables import CHECKPOINTED, OURS, Cell, newest
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "compared-with.md"
RESULTS = ROOT / "recipes" / "bench" / "results"
TOOLS = {
    "plain": "keep",
    "checkpointing of every block": "full recompute",
    "DeepSpeed `CheckpointHiddenStatesOffload`": "deepspeed hidden states",
    "transformers `offload=True`": "transformers offload=True",
    "TRL `OffloadActivations`": "trl",
    "**ssdtrain**": "ours recipes + auto",
}


def cells(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / path).read_text())["cells"]
    return found


def table(name: str) -> list[list[str]]:
    """The rows of the table below `<!-- measured: name -->`, without its head."""
    text = PAGE.read_text().partition(f"<!-- measured: {name} -->\n")[2]
    lines = text.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_blocks_beside_other_tools() -> None:
    measured = cells("offload/rivals.json")
    rows = table("offload/rivals 8192x4")
    assert [row[0] for row in rows] == list(TOOLS)
    for way, step, over, peak in rows:
        cell = measured[f"8192x4/{TOOLS[way]}"]
        assert step == f"{cell['step_ms']:.0f} ms"
        assert over in ("-", f"{100 * (cell['step_ratio'] - 1):.0f} %")
        assert peak == f"{cell['peak_gb']:.1f} GB"
    waits = cells("offload/placement.json")["8192x4/save_on_cpu"]
    text = PAGE.read_text()
    assert f"{waits['step_ratio']:.1f} times the plain step" in text
    assert f"the plain step and {waits['peak_gb']:.1f} GB" in text


def gain(cell: Cell) -> float:
    return float(cell.rows[CHECKPOINTED]["step_ms"] / cell.rows[OURS]["step_ms"] - 1)


def figures(row: dict[str, Any]) -> str:
    return f"{row['step_ms']:.0f} ms, {row['peak_gb']:.1f} GB"


def test_models_beside_checkpointing() -> None:
    found = newest(RESULTS)
    known = {
        (cell.gpu, figures(cell.rows[CHECKPOINTED]), figures(cell.rows[OURS])): cell
        for cell in found
    }
    rows = table("gains")
    assert len(rows) >= 5 and any("slower" in row[-1] for row in rows)
    for model, gpu, tokens, theirs, ours, told in rows:
        cell = known[gpu, theirs, ours]
        assert cell.name.startswith(model.split(",")[0])
        assert cell.name.split("/")[2] == tokens
        slower = gain(cell) < 0
        by = 1 / (1 + gain(cell)) - 1 if slower else gain(cell)
        assert told == f"{100 * by:.0f} % {'slower' if slower else 'faster'}"
    gains = sorted(map(gain, found))
    text = " ".join(PAGE.read_text().split())
    low, high = 100 * (1 / (1 + gains[0]) - 1), 100 * gains[-1]
    assert f"between {low:.0f} % slower and {high:.0f} % faster" in text
    assert f"in {len(gains)} measured rows" in text
    assert f"{100 * gains[len(gains) // 2]:.0f} % faster in the middle one" in text


def test_megatron_and_survivors() -> None:
    measured = cells("megatron/scale.json")
    tp = {way: measured[f"2 ranks/megatron tp/{way}"] for way in ("plain", "gc", "=gc")}
    rows = {row[0]: row[1:] for row in table("megatron tp")}
    told = {"plain": "plain", "full recompute": "gc"}
    told["**ssdtrain**, in that memory"] = "=gc"
    assert list(rows) == list(told)
    for way, (over, peak) in rows.items():
        cell, plain_ms = tp[told[way]], tp["plain"]["step_ms"]
        assert over in ("-", f"{100 * (cell['step_ms'] / plain_ms - 1):.0f} %")
        assert peak == f"{max(cell['peak_gb']):.1f} GB"
    survived = {row[0]: row[1] for row in table("survivors")}
    page = (ROOT / "docs" / "results" / "safety.md").read_text()
    sound = re.findall(r"\d+ of 19", next(x for x in page.splitlines() if "sound" in x))
    order = [
        "**ssdtrain**",
        None,
        "`save_on_cpu`",
        "TRL `OffloadActivations`",
        "DeepSpeed `CheckpointHiddenStatesOffload`",
    ]
    for name_of, number in zip(order, sound, strict=True):
        assert name_of is None or survived[name_of] == number

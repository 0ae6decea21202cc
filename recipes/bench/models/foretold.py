"""What `ssdtrain fits` foretells, beside what was measured.

    python -m recipes.bench models.foretold [--most N]

The measured rows are those of `recipes/bench/results/models/real_models*.json` that
train on one GPU without a compiler, with everything kept (`keep`) or under
transformers' checkpointing (`gc`), and behind them what `models.held_out` has recorded.
No GPU is needed.
"""

import itertools
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from recipes.bench.harness.records import named
from recipes.bench.models.stock import num_tokens, shape_of
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.report.build_public import Loss, Shape, Train
from ssdtrain.tools.report.capture import Question, captured_step
from ssdtrain.tools.report.fits import CHECKPOINTING, OURS, PLAIN, priced_ways

COLUMNS = {"keep": PLAIN, "gc": CHECKPOINTING}
DENSE = ("qwen3", "mistral")
"""Architectures whose steps the meta device can show."""


class Measured(NamedTuple):
    """A recorded row; times are the median of all its files."""

    gpu: str
    cell: str
    column: str
    step_ms: float
    peak_bytes: int
    """Everything included."""


def measured() -> list[Measured]:
    """Return the rows that can be compared, by cell."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for values in named("models/real_models*"):
        gpu = "h200" if "H200" in values["environment"]["device"] else "h100"
        for name, row in values["cells"].items():
            cell, _, column = name.rpartition("/")
            if column in COLUMNS and "step_ms" in row and _is_compared(cell):
                found.setdefault((gpu, cell, column), []).append(row)
    return [
        Measured(
            *key,
            statistics.median(row["step_ms"] for row in rows),
            int(1e9 * statistics.median(row["allocated_gb"] for row in rows)),
        )
        for key, rows in sorted(found.items())
    ]


def _is_compared(cell: str) -> bool:
    model, _, tokens, mode = cell.split("/")
    plain = mode == "eager" and tokens.rstrip("k").isdigit()
    return plain and shape_of(model).fused in DENSE


def foretold(gpu: str, cell: str) -> dict[str, tuple[float, int]]:
    """Return (ms, whole peak in bytes) of plain training and of checkpointing."""
    model, tuned, text, _ = cell.split("/")
    tokens, stock = num_tokens(text), shape_of(model)
    question = Question(
        model=model, train=Train(tuned), tokens=tokens, gpu=gpu, loss=Loss.FUSED
    )
    values = stock.config(tokens, depth=stock.depth).to_dict()
    shape = Shape(values, question.train, question.loss)
    # The measured loops set gradients to zero in place.
    device = load_device(gpu)
    found = captured_step(question, shape, device, tokens, keeps_gradients=True)
    return priced_ways(found)


def errors(rows: list[Measured]) -> Iterator[dict[str, Any]]:
    """Return each row with what was foretold, and by what share it is off."""
    known: dict[tuple[str, str], dict[str, tuple[float, int]]] = {}
    for row in rows:
        key = row.gpu, row.cell
        if key not in known:
            known[key] = foretold(*key)
        ms, peak = known[key][COLUMNS[row.column]]
        yield {
            **row._asdict(),
            "foretold_ms": round(ms, 1),
            "foretold_bytes": peak,
            "step_error": round(ms / row.step_ms - 1, 4),
            "peak_error": round(peak / row.peak_bytes - 1, 4),
        }


def held_out() -> Iterator[dict[str, Any]]:
    """The rows of `models.held_out`, as they were foretold before they were measured;
    ssdtrain's once its plan was settled."""
    columns = {way: column for column, way in COLUMNS.items()} | {OURS: OURS}
    for values in named("models/held_out"):
        for cell, each in values["cells"].items():
            for way, told in each["ways"].items():
                if "ms" not in told or not told.get("settled", True):
                    continue
                yield {
                    "gpu": values["settings"]["gpu"],
                    "cell": cell,
                    "column": columns[way],
                    "step_ms": told["ms"],
                    "peak_bytes": told["bytes"],
                    "step_error": round(told["foretold_ms"] / told["ms"] - 1, 4),
                    "peak_error": round(told["foretold_bytes"] / told["bytes"] - 1, 4),
                }


def main(*, most: int | None = None) -> None:
    """Compare and print.

    Args:
        most: only so many rows that are foretold now
    """
    found = []
    for row in itertools.chain(errors(measured()[:most]), held_out()):
        found.append(row)
        print(
            f"{row['gpu']} {row['cell']:28} {row['column']:8} "
            f"step {row['step_ms']:7.1f} ms {100 * row['step_error']:+6.1f} %   "
            f"peak {row['peak_bytes'] / 1e9:6.2f} GB {100 * row['peak_error']:+6.1f} %",
            flush=True,
        )
    for name in ("step_error", "peak_error"):
        off = [abs(row[name]) for row in found]
        print(f"{name}: median {statistics.median(off):.3f}, worst {max(off):.3f}")

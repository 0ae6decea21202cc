"""Predicted against measured steps, from the runs of `foresight.steps`."""

import statistics
from collections.abc import Sequence

from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table
from ssdtrain.tools.foresight.fit import geometric_mean_error

HELD = ("test", "held", "held2", "held3", "held4")
"""Sets of shapes that no model was made on."""
PREDICTIONS = {
    "predicted": ("predicted_us", "measured_us"),
    "kernels alone": ("kernels_us", "measured_us"),
    "one rate, in hindsight": ("constant_us", "measured_us"),
    "peak": ("predicted_peak_bytes", "peak_bytes"),
}
DEVICE_FILES = {"shipped": "as shipped", "calibrated": "a minute's calibration"}
ERRORS: dict[str, Column] = {
    head: lambda rows, names=names: _three(rows, *names)
    for head, names in PREDICTIONS.items()
}


def runs(*found: Data) -> str:
    """Errors of every run."""
    columns: dict[str, Column] = {
        "device, shapes": _name,
        "device file": lambda run: DEVICE_FILES[run["settings"]["device_file"]],
        "steps": lambda run: str(len(run["cells"])),
    }
    for head, names in PREDICTIONS.items():
        columns[head] = lambda run, names=names: _three(_rows(run), *names)
    return table(_held(found), columns)


def last(*found: Data) -> str:
    """Errors by model, and every step, of the runs on the last shapes."""
    held = _held(found)
    own = [run for run in held if _shapes(run) == _shapes(held[-1])]
    return paragraphs(*(part(run) for run in own for part in (_of_models, _of_steps)))


def _held(found: tuple[Data, ...]) -> list[Data]:
    held = [run for run in found if _shapes(run) in HELD]
    return sorted(held, key=lambda run: HELD.index(_shapes(run)))


def _shapes(run: Data) -> str:
    return str(run["settings"]["shapes"])


def _rows(run: Data) -> list[Data]:
    return list(run["cells"].values())


def _name(run: Data) -> str:
    return f"{run['environment']['device']}, `{_shapes(run)}`"


def _of_models(run: Data) -> str:
    by_model: dict[str, list[Data]] = {}
    for row in _rows(run):
        by_model.setdefault(row["model"], []).append(row)
    columns: dict[str, Column] = {"model": lambda rows: rows[0]["model"], **ERRORS}
    return f"By model, {_name(run)}:\n\n{table(by_model.values(), columns)}"


def _of_steps(run: Data) -> str:
    names = list(dict.fromkeys(row["model"] for row in _rows(run)))
    rows = sorted(_rows(run), key=lambda row: (names.index(row["model"]), row["batch"]))
    columns: dict[str, Column] = {
        "model": "{model}",
        "batch": "{batch}",
        "measured": lambda row: f"{row['measured_us'] / 1e3:.1f} ms",
    }
    for head, (own, other) in PREDICTIONS.items():
        columns[head] = lambda row, a=own, b=other: f"{row[a] / row[b]:.3f}"
    told = f"Every step, {_name(run)}; predicted over measured:"
    return f"{told}\n\n{table(rows, columns)}"


def _three(rows: Sequence[Data], predicted: str, measured: str) -> str:
    """Geometric mean, mean and worst of the relative errors, in percent."""
    off = [abs(row[predicted] / row[measured] - 1.0) for row in rows]
    low, mean, worst = geometric_mean_error(off), statistics.fmean(off), max(off)
    return f"{100 * low:.1f} % ({100 * mean:.1f}, {100 * worst:.1f})"

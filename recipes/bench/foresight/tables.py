"""Predicted against measured steps, from the recorded runs of `evaluate`."""

from collections.abc import Sequence
from pathlib import Path

from recipes.bench.common.results import Data, read
from recipes.bench.common.text import section
from recipes.bench.foresight.errors import errors_by_model

HELD = ("test", "held", "held2", "held3", "held4")
"""Sets of shapes that no model was made on."""
PREDICTIONS = {
    "predicted_us": "predicted",
    "kernels_us": "kernels alone",
    "constant_us": "one rate, in hindsight",
}
DEVICE_FILES = {"shipped": "as shipped", "calibrated": "a minute's calibration"}


def steps(folder: Path) -> str:
    """Errors of every run, and every step of the last shapes; empty without runs."""
    found = [read(path) for path in sorted(folder.glob("*.json"))]
    runs = [run for run in found if _shapes(run) in HELD]
    runs.sort(key=lambda run: HELD.index(_shapes(run)))
    last = [run for run in runs if _shapes(run) == _shapes(runs[-1])]
    parts = [_of_runs(runs), *map(_of_models, last), *map(_of_steps, last)]
    return "\n\n".join(filter(None, parts))


def _shapes(run: Data) -> str:
    """The name of its shapes in `subjects.SHAPES`."""
    return str(run["settings"]["shapes"])


def _name(run: Data) -> str:
    return f"{run['environment']['device']}, `{_shapes(run)}`"


def _of_runs(runs: Sequence[Data]) -> str:
    rows = [
        [
            _name(run),
            DEVICE_FILES[run["settings"]["device_file"]],
            str(len(run["cells"])),
            *(_three(run[name]) for name in PREDICTIONS),
            _three(run["peaks"]),
        ]
        for run in runs
    ]
    return section(
        "Whole training steps, captured on the meta device, on shapes that no model "
        "was made on: geometric mean of the relative errors, mean, worst. Those of a "
        "calibrated device are as they were predicted before the run's steps were "
        "known; the others were priced again by later code.",
        ["device, shapes", "device file", "steps", *PREDICTIONS.values(), "peak"],
        rows,
    )


def _of_models(run: Data) -> str:
    found = errors_by_model(list(run["cells"].values()))
    rows = [
        [name, *(_three(own[key]) for key in (*PREDICTIONS, "peaks"))]
        for name, own in found.items()
    ]
    return section(
        f"By model, {_name(run)}:",
        ["model", *PREDICTIONS.values(), "peak"],
        rows,
    )


def _of_steps(run: Data) -> str:
    names = list(dict.fromkeys(row["model"] for row in run["cells"].values()))
    rows = [
        [
            row["model"],
            str(row["batch"]),
            f"{row['measured_us'] / 1e3:.1f} ms",
            *(f"{row[name] / row['measured_us']:.3f}" for name in PREDICTIONS),
            f"{row['predicted_peak_bytes'] / row['peak_bytes']:.3f}",
        ]
        for row in sorted(
            run["cells"].values(),
            key=lambda row: (names.index(row["model"]), row["batch"]),
        )
    ]
    return section(
        f"Every step, {_name(run)}; predicted over measured:",
        ["model", "batch", "measured", *PREDICTIONS.values(), "peak"],
        rows,
    )


def _three(found: dict[str, float]) -> str:
    low, mean, worst = (100 * found[key] for key in ("gmae", "mean", "worst"))
    return f"{low:.1f} % ({mean:.1f}, {worst:.1f})"

"""Predicted against measured steps, from the recorded runs of `evaluate`."""

from recipes.bench.foresight.errors import errors_by_model
from recipes.bench.harness.records import Data
from recipes.bench.harness.tables import Column, paragraphs, table

HELD = ("test", "held", "held2", "held3", "held4")
"""Sets of shapes that no model was made on."""
PREDICTIONS = {
    "predicted_us": "predicted",
    "kernels_us": "kernels alone",
    "constant_us": "one rate, in hindsight",
}
DEVICE_FILES = {"shipped": "as shipped", "calibrated": "a minute's calibration"}
SUMS = {
    head: lambda own, key=key: _three(own[key])
    for key, head in {**PREDICTIONS, "peaks": "peak"}.items()
}


def runs(*found: Data) -> str:
    """Errors of every run."""
    columns: dict[str, Column] = {
        "device, shapes": _name,
        "device file": lambda run: DEVICE_FILES[run["settings"]["device_file"]],
        "steps": lambda run: str(len(run["cells"])),
    }
    return table(_held(found), columns | SUMS)


def last(*found: Data) -> str:
    """Errors by model, and every step, of the runs on the last shapes."""
    held = _held(found)
    return paragraphs(
        *(
            part
            for run in held
            if _shapes(run) == _shapes(held[-1])
            for part in (_of_models(run), _of_steps(run))
        )
    )


def _held(found: tuple[Data, ...]) -> list[Data]:
    held = [run for run in found if _shapes(run) in HELD]
    return sorted(held, key=lambda run: HELD.index(_shapes(run)))


def _shapes(run: Data) -> str:
    """The name of its shapes in `subjects.SHAPES`."""
    return str(run["settings"]["shapes"])


def _name(run: Data) -> str:
    return f"{run['environment']['device']}, `{_shapes(run)}`"


def _of_models(run: Data) -> str:
    found = errors_by_model(list(run["cells"].values()))
    return f"By model, {_name(run)}:\n\n{table(found, {'model': '{name}'} | SUMS)}"


def _of_steps(run: Data) -> str:
    names = list(dict.fromkeys(row["model"] for row in run["cells"].values()))
    rows = sorted(
        run["cells"].values(), key=lambda row: (names.index(row["model"]), row["batch"])
    )
    columns: dict[str, Column] = {
        "model": "{model}",
        "batch": "{batch}",
        "measured": lambda row: f"{row['measured_us'] / 1e3:.1f} ms",
        **{
            head: lambda row, key=key: f"{row[key] / row['measured_us']:.3f}"
            for key, head in PREDICTIONS.items()
        },
        "peak": lambda row: f"{row['predicted_peak_bytes'] / row['peak_bytes']:.3f}",
    }
    told = f"Every step, {_name(run)}; predicted over measured:"
    return f"{told}\n\n{table(rows, columns)}"


def _three(found: dict[str, float]) -> str:
    low, mean, worst = (100 * found[key] for key in ("gmae", "mean", "worst"))
    return f"{low:.1f} % ({mean:.1f}, {worst:.1f})"

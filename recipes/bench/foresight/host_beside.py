"""What calibration's programs say of the host, against the steps that ran beside them.

    python -m recipes.bench.foresight.host_beside held4_h100.json

Reads what `evaluate` wrote of steps before each of which calibration's programs ran.
Where the host binds, three things can be wrong: the host's speed has changed since
calibration (`drift`: programs beside the step over what calibration found), operators'
host times, or the programs, which may be off by another factor than models are (`bias`:
measured over predicted time of a step, over that of the programs in the same seconds).
The bias of the other models, left one out, shows what calibration would gain by it.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.bench.common.cells import RESULTS
from recipes.bench.foresight.errors import errors
from recipes.bench.foresight.host_left_out import MOST_KERNELS


def host_bound(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps whose kernels leave much of them empty."""
    return [
        cell
        for cell in cells
        if "beside_us" in cell
        and cell["kernels_us"] < MOST_KERNELS * cell["measured_us"]
    ]


def judged(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every step's drift and bias, by phase as well, and its time by the bias of the
    other models."""
    rows = []
    for cell in cells:
        drifts = cell["host_drifts"]
        by_phase = {
            phase: round(us / (drifts[phase] * cell["predicted_phases_us"][phase]), 3)
            for phase, us in cell["phases_us"].items()
        }
        rows.append(
            {
                **{key: cell[key] for key in ("model", "batch", "measured_us")},
                "drift": cell["host_drift"],
                "bias": cell["measured_us"] / (cell["host_drift"] * cell["host_us"]),
                "bias_by_phase": by_phase,
                "predicted_us": cell["predicted_us"],
                "beside_us": cell["beside_us"],
            }
        )
    for row in rows:
        others = [other for other in rows if other["model"] != row["model"]]
        scale = statistics.median(other["bias"] for other in others)
        row["unbiased_us"] = row["measured_us"] / row["bias"] * scale
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="of results/steps")
    args = parser.parse_args()
    found = json.loads((RESULTS / "steps" / args.run).read_text())
    rows = judged(host_bound(list(found["cells"].values())))
    for row in rows:
        print(
            f"{row['model']:>10} {row['batch']:>6} drift {row['drift']:.2f}, bias "
            f"{row['bias']:.2f} {row['bias_by_phase']}"
        )
    for name in ("predicted_us", "beside_us", "unbiased_us"):
        print(name, errors(rows, name, "measured_us"))


if __name__ == "__main__":
    main()

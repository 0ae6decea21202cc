"""Errors of predicted steps: geometric mean, mean and worst, of all and by model."""

import statistics
from collections.abc import Sequence
from typing import Any

from ssdtrain.tools.foresight.fit import geometric_mean_error

Row = dict[str, Any]
PREDICTIONS = ("predicted_us", "kernels_us", "constant_us")


def errors(rows: Sequence[Row], name: str, measured: str) -> dict[str, float]:
    """Geometric mean, mean and worst of |predicted - measured| / measured."""
    found = [abs(row[name] / row[measured] - 1.0) for row in rows]
    return {
        "gmae": round(geometric_mean_error(found), 4),
        "mean": round(statistics.fmean(found), 4),
        "worst": round(max(found), 4),
    }


def errors_by_model(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Of each kind of model over its batches: the step by every prediction, the peak
    where it was measured."""
    found = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        found[model] = {
            name: errors(own, name, "measured_us")
            for name in PREDICTIONS
            if all(name in row for row in own)
        }
        if all("peak_bytes" in row for row in own):
            found[model]["peaks"] = errors(own, "predicted_peak_bytes", "peak_bytes")
    return found

"""What the cost model took, against the fixed settings measured beside it."""

from collections.abc import Mapping
from typing import Any

from recipes.bench.rgnn.records import Records

SETTINGS = ("none", "compaction", "reordering", "both")
SETTING_NAMES = {
    "none": "none",
    "compact": "compaction",
    "reorder": "reordering",
    "compact+reorder": "both",
}
"""Contenders by the setting that a record names."""


def cell_name(cell: Mapping[str, Any]) -> str:
    """Such as `fb15k rgcn inference float32`."""
    return " ".join(cell[part] for part in ("graph", "model", "task", "dtype"))


def taken(results: Records, **cell: str) -> dict[str, Any]:
    """The record of the fixed setting that the cost model took, where there is one;
    the one under the model's own name was taken minutes earlier, and a host that bounds
    a step drifts more in minutes than settings differ."""
    chosen = results.find("hector", **cell) or {}
    setting = results.modelled.get(cell_name(cell), chosen.get("setting", ""))
    name = SETTING_NAMES.get(setting)
    return (results.find(f"hector-{name}", **cell) if name else None) or chosen


def over_best(results: Records, **cell: str) -> float | None:
    """Time of the setting taken over the best one's, of one machine."""
    mine = taken(results, **cell)
    if "ms" not in mine:
        return None
    found = [results.find(f"hector-{s}", **cell) or {} for s in SETTINGS]
    known = [r["ms"] for r in found if "ms" in r and results.same(r, mine)]
    return float(mine["ms"] / min(known)) if len(known) > 1 else None


def told(ratios: dict[str, float], tolerance: float) -> str:
    """How many choices are within `tolerance` of the best, and the others by name."""
    if not ratios:
        return ""
    missed = {n: r for n, r in ratios.items() if r > 1 + tolerance}
    close = len(ratios) - len(missed)
    share = 100 * close / len(ratios)
    text = (
        f"The cost model's choice is within {100 * tolerance:.0f} % of the best fixed "
        f"setting in {close} of {len(ratios)} cells ({share:.0f} %)."
    )
    words = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in missed.items())
    return text + (f" Missed: {words}." if missed else "")

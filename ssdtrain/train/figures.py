"""Figures of a step for the log that a training loop keeps anyway."""

from ssdtrain.counters import StepReport

NAMES = (
    "bytes_offloaded",
    "bytes_recomputed",
    "bytes_kept",
    "bytes_written",
    "saved_peak_bytes",
    "stall_ms",
    "recompute_ms",
)
"""Fields of `StepReport`."""


def figures_of(report: StepReport | None) -> dict[str, float]:
    """Return figures such as {"ssdtrain/stall_ms": 0.1}; none before a report."""
    if report is None:
        return {}
    return {f"ssdtrain/{name}": float(getattr(report, name)) for name in NAMES}

"""What a plan is judged by."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a plan is judged by. A memory budget goes before an overhead."""

    max_overhead: float = 0.01
    """Least peak within this fraction of the step with everything kept."""
    memory_budget_bytes: int | None = None
    """Least time within this peak."""
    ssd_bytes_per_s: float | None = None
    """What this rank may write to its SSDs on average; None: no limit. A plan that
    writes more is never chosen: keeping everything writes nothing."""

    def allows(self, ssd_bytes: int, step_ms: float) -> bool:
        """Whether a step of `step_ms` may write `ssd_bytes`."""
        rate = self.ssd_bytes_per_s
        return rate is None or ssd_bytes <= rate * step_ms / 1e3

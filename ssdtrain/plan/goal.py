"""What a plan is judged by."""

from dataclasses import dataclass, replace

from ssdtrain.plan.profile import Profile

BUDGET_MARGIN = 0.019
"""Share of a memory budget that is left for what the profile did not see."""
DEVICE_RESERVE = 0.03
"""Share of `device_bytes` that no plan uses: what the allocator rounds up and cannot
join, libraries' workspaces, and what the observed step did not show."""


GROWTH_MARGIN = 0.15
"""Share of the growth of a batch that a plan for it leaves free."""
MOST_TORN = 0.15
"""Share of the device that is left free for torn blocks at most, next to the
reserve."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a plan is judged by. A memory limit goes before an overhead."""

    max_overhead: float = 0.01
    """Least peak within this fraction of the step with everything kept."""
    memory_budget_bytes: int | None = None
    """Least time within this peak."""
    budget_margin: float = BUDGET_MARGIN
    """Share of the budget that is left free."""
    device_bytes: int | None = None
    """Least time within this much device memory for everything: weights, gradients,
    optimizer and all else included."""
    capacity_bytes: int | None = None
    """What the device holds. Where no limit is set, a plan that needs more is the last
    choice: a longer step is better than none."""
    ssd_bytes_per_s: float | None = None
    """What this rank may write to its SSDs on average; None: no limit. A plan that
    writes more is never chosen: keeping everything writes nothing."""
    spare_bytes: int = 0
    """Of a memory limit, left free because steps needed more than was predicted."""
    torn_bytes: int = 0
    """What the allocator could not give out in the observed step, as other parts of
    its blocks were in use, and what it needed more under a plan: a plan leaves it free
    besides the reserve, if any plan can."""

    def grown(self, ratio: float) -> "Goal":
        """Return the goal of a plan for batches that are larger than the observed one
        by this ratio. Its tensors are taken to grow the same, and some of them grow
        with the square of a length: the limit is lower by `GROWTH_MARGIN` of what came
        with the growth."""
        limits = self.memory_budget_bytes, self.device_bytes
        limit = min((each for each in limits if each is not None), default=0)
        spare_bytes = int(GROWTH_MARGIN * (1.0 - 1.0 / ratio) * limit)
        return replace(self, spare_bytes=self.spare_bytes + max(0, spare_bytes))

    def allows(self, ssd_bytes: int, step_ms: float) -> bool:
        """Return whether a step of `step_ms` may write `ssd_bytes`."""
        rate = self.ssd_bytes_per_s
        return rate is None or ssd_bytes <= rate * step_ms / 1e3

    @property
    def is_by_memory(self) -> bool:
        """Whether the least time in a limit is asked for."""
        return self.memory_budget_bytes is not None or self.device_bytes is not None

    def most_bytes(self, profile: Profile) -> float | None:
        """Return the peak above the step's start that a plan may have; None: any."""
        found = []
        if self.memory_budget_bytes is not None:
            found.append(self.memory_budget_bytes * (1 - self.budget_margin))
        if self.device_bytes is not None:
            found.append(self.device_bytes * (1 - DEVICE_RESERVE) - profile.base_bytes)
        return min(found) - self.spare_bytes if found else None

    def holds_all(self, keep_bytes: int) -> bool:
        """Return whether a budget is at least the peak of the step with everything
        kept: such a step needs no reserve, as there is nothing that a plan could get
        wrong."""
        budget = self.memory_budget_bytes
        is_alone = self.device_bytes is None and not self.spare_bytes
        return is_alone and budget is not None and keep_bytes <= budget

    def beyond(self, peak_bytes: int, start_bytes: int) -> int:
        """Return by how much a step has needed more than a plan may; 0 while it has
        used up less than half of what plans leave free.

        Args:
            peak_bytes: most device memory in use.
            start_bytes: device memory in use when the step started.
        """
        found = [0]
        if self.memory_budget_bytes is not None:
            used_bytes = peak_bytes - start_bytes
            budget, margin = self.memory_budget_bytes, self.budget_margin
            found.append(_over(used_bytes, budget, margin))
        if self.device_bytes is not None:
            found.append(_over(peak_bytes, self.device_bytes, DEVICE_RESERVE))
        return max(found)

    def fitting_bytes(self, profile: Profile) -> float | None:
        """Return the peak above the step's start that fits into the device; None: it
        is not asked, or not known."""
        if self.is_by_memory or self.capacity_bytes is None:
            return None
        return self.capacity_bytes * (1 - DEVICE_RESERVE) - profile.base_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Device memory for everything; None: it is not asked, or not known."""
        if self.is_by_memory:
            return self.device_bytes
        return self.capacity_bytes

    def easy_bytes(self, profile: Profile) -> float | None:
        """Return the peak above the step's start up to which a plan fits although
        blocks are torn; None: it is not asked, or not known."""
        limit = self.limit_bytes
        if limit is None:
            return None
        # Both: another plan's tensors tear more than those of the observed step.
        room_bytes = DEVICE_RESERVE * limit + min(self.torn_bytes, MOST_TORN * limit)
        return limit - room_bytes - profile.base_bytes - self.spare_bytes

    @property
    def memory_limit(self) -> str:
        """The limit as it was set, for errors."""
        if self.device_bytes is not None:
            return f"device_memory={self.device_bytes}"
        return f"memory_budget={self.memory_budget_bytes}"


def _over(used_bytes: int, limit_bytes: int, free_share: float) -> int:
    over_bytes = used_bytes - int(limit_bytes * (1 - free_share))
    return over_bytes if over_bytes > limit_bytes * free_share / 2 else 0

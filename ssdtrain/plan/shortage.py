"""Why no plan fits into memory: by how much, at which module, and what would help."""

from typing import NamedTuple

from ssdtrain.errors import ConfigError
from ssdtrain.plan.goal import BUDGET_MARGIN, DEVICE_RESERVE, Goal
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.simulate import Outcome
from ssdtrain.plan.timeline import Timeline


class Shortage(NamedTuple):
    """The least that was found, and it is too much."""

    timeline: Timeline
    goal: Goal
    keep: Outcome
    """Everything kept."""
    least: Outcome
    """The plan of the least peak."""

    @property
    def missing_bytes(self) -> int:
        """By how much the least peak exceeds what a plan may have."""
        most = self.goal.most_bytes(self.timeline.profile)
        return 0 if most is None else max(0, int(self.least.peak_bytes - most) + 1)

    @property
    def module(self) -> str:
        """Where the least peak is."""
        line = self.timeline
        item = line.items[line.item_of_mark[self.least.peak_mark]]
        where = f" of module {item.module}" if item.module else ""
        return f"{item.name}{where}"

    def error(self, short_of_host: bool) -> ConfigError:
        """Return the error for the user.

        Args:
            short_of_host: a plan would fit if there were more pinned host memory.
        """
        goal, least = self.goal, self.least.peak_bytes
        profile = self.timeline.profile
        if goal.device_bytes is None:
            needed = int(least / (1 - BUDGET_MARGIN)) + 1
            if not goal.spare_bytes:
                needed = min(needed, self.keep.peak_bytes)
            whole = f" {100 * BUDGET_MARGIN:g} % of a budget are a reserve."
            setting = f"Set memory_budget to at least {needed}"
        else:
            needed = int((least + profile.base_bytes) / (1 - DEVICE_RESERVE)) + 1
            beside = "weights and optimizer are not counted (on a CPU nothing is)"
            if profile.base_bytes:
                beside = f"{profile.base_bytes} bytes are in use when a step starts"
                beside += " (weights, optimizer)"
            reserve = f"{100 * DEVICE_RESERVE:g} % are a reserve"
            whole = f" Beside them {beside}, and {reserve}."
            setting = f"Set device_memory to at least {needed}"
        host = (
            f" Pinned host memory is short as well (host_bytes={profile.host_bytes}): "
            "raise it, or give a directory on an SSD."
            if short_of_host
            else ""
        )
        return ConfigError(
            f"{goal.memory_limit} cannot be reached: short by {self.missing_bytes} "
            f"bytes at {self.module}. The least reachable peak of activations is "
            f"{least} bytes (everything kept: {self.keep.peak_bytes}).{whole} "
            f"{setting}, or use a smaller micro-batch."
            f"{host}{_wear_limit(goal)}"
        )


def start_error(
    goal: Goal, needed_bytes: int, where: str, *, is_least: bool = False
) -> ConfigError:
    """Return the error where the steps before the first plan do not fit, which need
    what checkpointing with moved inputs needs.

    Args:
        goal: with `device_bytes`.
        needed_bytes: of device memory in such a step, all included.
        where: the module, or "".
        is_least: the step ended there, and may need more.
    """
    limit_bytes = goal.device_bytes or 0
    missing_bytes = max(1, needed_bytes - limit_bytes)
    least = "at least " if is_least else ""
    at = f" at module {where}" if where else ""
    return ConfigError(
        f"{goal.memory_limit} cannot be reached: short by {least}{missing_bytes} bytes"
        f"{at} in a step in which every repeated module runs again and its inputs are "
        f"moved. Set device_memory to {least}{limit_bytes + missing_bytes}, use a "
        "smaller micro-batch or shorter sequences, shard weights and optimizer states, "
        "or train adapters (LoRA)."
    )


def check_rest(profile: Profile, goal: Goal) -> None:
    """Check that what no plan changes fits into the device as well.

    Raises:
        ConfigError: the optimizer alone needs more.
    """
    if goal.device_bytes is None:
        return
    needed = profile.base_bytes + profile.rest_bytes
    if needed > goal.device_bytes:
        raise ConfigError(
            f"{goal.memory_limit} cannot be reached: weights, gradients and the "
            f"optimizer's step take {needed} bytes, {needed - goal.device_bytes} too "
            "many, whatever happens to activations. Set device_memory to more, shard "
            "the model, or use an optimizer with less state."
        )


def _wear_limit(goal: Goal) -> str:
    if goal.ssd_bytes_per_s is None:
        return ""
    rate = goal.ssd_bytes_per_s / 1e6
    return f" write_budget holds this rank to {rate:.1f} MB/s of SSD writes: raise it."

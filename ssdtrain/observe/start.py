"""Whether the steps before the first plan fit.

In them all regions run again ([Note: the safe start] in planner.py). A model for which
even that is too much is told before its second step, or by the error that ends a step
for want of memory.
(tests/ssdtrain/cache/test_device_memory.py)
"""

from collections.abc import Sequence

from torch import nn

from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.regions import Choice
from ssdtrain.observe.observation import Observation
from ssdtrain.observe.tightened import Tightened
from ssdtrain.plan.shortage import start_error


class SafeStart:
    """Compares what such a step needs with `device_memory`."""

    def __init__(
        self,
        cache: TensorCache,
        goal: Tightened,
        observation: Observation,
        roots: Sequence[nn.Module],
    ) -> None:
        self._cache = cache
        self._goal = goal
        self._observation = observation
        self._roots = roots

    def check(self, base_bytes: int) -> None:
        """Check that the second step fits: it is one like the first, which was
        recorded, and what the optimizer has made is there as well.

        Args:
            base_bytes: in use when it starts.

        Raises:
            ConfigError: it needs more than the limit.
        """
        limit_bytes = self._limit_bytes
        if limit_bytes is None:
            return
        # Gradients that stay were made in the first step.
        kept_bytes = sum(
            each.grad.nbytes
            for root in self._roots
            for each in nn.Module.parameters(root)
            if each.grad is not None
        )
        first = self._observation
        needed_bytes = base_bytes - kept_bytes + first.needed_bytes
        if needed_bytes > limit_bytes:
            raise start_error(self._goal.goal, needed_bytes, first.peak_module)

    def hear_shortage(self, asked_bytes: int) -> None:
        """Say what is short where such a step ends out of memory.

        Args:
            asked_bytes: the allocator's last request.

        Raises:
            ConfigError: it does.
        """
        memory = self._cache.device.memory()
        if self._limit_bytes is None or memory is None:
            return
        needed_bytes = memory.reserved_bytes + asked_bytes
        where = self._observation.module
        raise start_error(self._goal.goal, needed_bytes, where, is_least=True)

    @property
    def _limit_bytes(self) -> int | None:
        """Of everything; None: there is none, or not all regions run again."""
        runs_all = self._cache.regions.choice is Choice.ALL
        return self._goal.goal.device_bytes if runs_all else None

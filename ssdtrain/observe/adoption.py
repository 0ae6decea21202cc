"""A plan that was found, until it is followed.

Its pinned memory is made first, so that nothing waits for that while it is followed for
the first time, and all ranks follow it from the same step on.
(tests/ssdtrain/observe/test_beside.py)
"""

from ssdtrain.cache.cache import TensorCache
from ssdtrain.plan.agree import Peers
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.scaled import Growth


class Adoption:
    """Keeps the plan that was taken last."""

    def __init__(self, cache: TensorCache, peers: Peers) -> None:
        self.taken: Plan | None = None
        """To be followed when there is pinned memory for what it moves."""
        self._cache = cache
        self._peers = peers

    def take(self, plan: Plan) -> None:
        """Follow this plan next."""
        self.taken = plan

    def drop(self) -> None:
        """Follow none."""
        self.taken = None

    def prepare(self, seen: Profile, ratio: float, growth: Growth) -> None:
        """Have the pinned memory made that the plan's step needs, for batches of this
        size over the observed one's."""
        plan, cache = self.taken, self._cache
        if plan is None or not cache.device.runs_beside:
            return
        sizes = [
            growth.bytes_of(order.name, order.num_bytes, max(1.0, ratio))
            for kind in seen.lanes
            for order in plan.orders.get(kind, ())
            if order.release_after > 0
        ]
        cache.offloader.pool.prepare(sizes, soon=cache.tables.place_sizes)

    def due(self, step: int, *, is_now: bool = False) -> Plan | None:
        """Return the plan, if this step is the first one under it, of all ranks; asked
        in every step between two observed ones.

        Args:
            step: that starts.
            is_now: they have all taken it in this step.
        """
        is_ready = self.taken is not None and self._cache.offloader.pool.is_prepared
        if not (is_now or self._peers.adopts(is_ready, step)):
            return None
        plan, self.taken = self.taken, None
        return plan

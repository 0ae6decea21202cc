"""What hooks cost the host, and in which module's hooks a step waited for it.

See [Note: host time] in hosttime.py.
"""

from collections.abc import Callable
from dataclasses import replace

from ssdtrain.cache.cache import TensorCache
from ssdtrain.observe.hostprobe import host_costs
from ssdtrain.observe.hosttime import HostMeter
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.profile import HostCosts
from ssdtrain.transfer.offloader import Drain

SAMPLED_STEPS, FIRST_SAMPLE = 128, 3
"""One step in so many has its hooks timed, from which one on."""


class HostPrices:
    """Times the hooks of one step at a time, and keeps what they cost."""

    def __init__(self, cache: TensorCache) -> None:
        self.costs: HostCosts | None = None
        """None before the first probe, and where the host is the device."""
        self._cache = cache
        self._meter: HostMeter | None = None
        """Of the step that is being timed."""
        self._num_followed = 0
        """Steps since the plan in force was taken."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether the host has the device to wait for."""
        return self._cache.device.torch_device.type == "cuda"

    @property
    def _away(self) -> Placement:
        """Return where the observed step's policy moves tensors."""
        to_ssd = self._cache.offloader.drain is Drain.AT_ONCE
        return Placement.OFFLOAD_SSD if to_ssd else Placement.OFFLOAD

    def listen(self) -> HostMeter:
        """Time the hooks of the next step, which no plan orders."""
        cache = self._cache
        clock = cache.ledger.clock
        meter = self._meter = cache.meter = HostMeter(
            self._away,
            num_rebuilds=lambda: clock.num_begun,
        )
        return meter

    def take(self) -> HostMeter | None:
        """Time no more; return what timed the step that has ended."""
        meter, self._meter = self._meter, None
        self._cache.meter = None
        return meter

    def probe(self) -> HostCosts:
        """Return what a chain of our own costs, asked once."""
        if self.costs is None:
            self.costs = host_costs(self._cache.device.torch_device)
        return self.costs

    def price_regions(self, meter: HostMeter | None) -> None:
        """Take what the calls of regions, if any, cost the host in forward."""
        if meter is not None and self.costs is not None:
            region_ms = meter.costs(self.costs).region_ms
            self.costs = replace(self.costs, region_ms=region_ms)

    def planned(self) -> None:
        """Another plan is followed from now on."""
        self.take()
        self._num_followed = 0

    def sample(self, module_of: Callable[[str, int], str]) -> None:
        """Count the start of a step under a plan, and time the hooks of one in many:
        its report says in which module the host was waited for, and its region calls
        what they cost.

        Args:
            module_of: the module of an item of the profile.
        """
        self.price_regions(self.take())
        cache = self._cache
        if not self.is_on_gpu or cache.bypass is not None:
            return
        self._num_followed += 1
        if self._num_followed % SAMPLED_STEPS == FIRST_SAMPLE:
            clock = cache.ledger.clock
            self._meter = cache.meter = HostMeter(
                self._away,
                moment=clock.now,
                module_of=module_of,
                num_rebuilds=lambda: clock.num_begun,
            )

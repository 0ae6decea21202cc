"""What a compiled plan costs the host on this machine: timed on a chain of its own.

See [Note: host time] in hosttime.py. The chain runs through a cache, a plan and a table
like the model's, so whatever they become, their cost is what is measured.
"""

import torch
from torch import Tensor, nn

from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.course import name_of
from ssdtrain.cache.window import CacheLimits
from ssdtrain.counters import Counters, Trace
from ssdtrain.observe.hosttime import HostMeter
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.policies import KeepAll
from ssdtrain.plan.profile import HostCosts
from ssdtrain.transfer.device import open_device
from ssdtrain.transfer.offloader import Drain, Meters, Offloader
from ssdtrain.transfer.pinned import PinnedPool

NUM_ITEMS = 36
ITEM_BYTES = 16 * 1024
"""Small: the device must not be what the host waits for."""
NUM_BOUND = 2
"""Lanes before the measured ones: the plan is compiled, host memory is pinned."""
NUM_MEASURED = 4
RELEASE_AFTER = 3
LOAD_AHEAD = 2
PLACES = (Placement.KEEP, Placement.OFFLOAD, Placement.OFFLOAD_SSD)


class _Chain(nn.Module):
    """Multiplications: each saves its input and a parameter."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        start = torch.ones(ITEM_BYTES // 4, device=device, dtype=torch.float32)
        self.scales = nn.ParameterList(
            nn.Parameter(start[:1].clone()) for _ in range(NUM_ITEMS)
        )
        self.start = start.requires_grad_()

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        """Return the result and the saved tensors in order."""
        x, saved = self.start * self.scales[0], []
        for scale in self.scales:
            saved.append(x)
            x = x * scale
        return x, saved


def host_costs(torch_device: torch.device) -> HostCosts:
    """Measure what keeping and moving a tensor cost the host; takes 10 to 50 ms."""
    return measured_chain(torch_device).costs(HostCosts())


def measured_chain(
    torch_device: torch.device, meter: HostMeter | None = None
) -> HostMeter:
    """Run the chain; return the meter that timed its hooks."""
    device, counters = open_device(torch_device), Counters()
    pool = PinnedPool(device, 4 * NUM_ITEMS * ITEM_BYTES)
    meters = Meters(counters=counters, trace=Trace(False))
    offloader = Offloader(device, pool, None, Drain.NEVER, 1, meters)
    limits = CacheLimits(min_bytes=ITEM_BYTES, window_bytes=None, prefetch_bytes=None)
    cache = TensorCache(offloader, KeepAll(), limits, counters)
    try:
        with torch.enable_grad(), torch.autocast(torch_device.type, enabled=False):
            chain = _Chain(torch_device)
            return _measured(cache, chain, meter or HostMeter())
    finally:
        cache.close()


def _measured(cache: TensorCache, chain: _Chain, meter: HostMeter) -> HostMeter:
    _, saved = chain()
    cache.course.plan = Plan(orders={"probe/0": _orders(saved)}, policy="probe")
    saved.clear()
    for turn in range(NUM_BOUND + NUM_MEASURED):
        cache.course.step_starts()
        cache.meter = meter if turn >= NUM_BOUND else None
        lane = cache.lanes.begin("probe")
        try:
            with cache.hooks():
                result, saved = chain()
        finally:
            cache.regions.forward_ends()
            cache.lanes.end(lane)
        saved.clear()
        result.sum().backward()
        del result
        cache.collect_now()
    return meter


def _orders(saved: list[Tensor]) -> tuple[Order, ...]:
    # The first multiplication saves the start, a leaf.
    names = ["input [" + name_of(saved[0]).split("[")[1], *map(name_of, saved)]
    orders = []
    for number, name in enumerate(names):
        placement = PLACES[number % len(PLACES)]
        moves = placement is not Placement.KEEP
        used = len(names) - 1 - number
        moves = moves and used > RELEASE_AFTER + LOAD_AHEAD
        orders.append(
            Order(
                name=name,
                num_bytes=ITEM_BYTES,
                placement=placement if moves else Placement.KEEP,
                release_after=RELEASE_AFTER if moves else 0,
                load_at=max(0, used - LOAD_AHEAD) if moves else 0,
            )
        )
    return tuple(orders)

"""What a compiled plan costs the host on this machine: timed on a chain of its own.

See [Note: host time] in hosttime.py. The chain runs through a cache, a plan and a table
like the model's, so whatever they become, their cost is what is measured.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain.cache.cache import TensorCache
from ssdtrain.cache.met import name_of
from ssdtrain.cache.rebuilder import Rebuilder
from ssdtrain.cache.weights import Weights
from ssdtrain.cache.window import CacheLimits
from ssdtrain.counters import Counters, Trace
from ssdtrain.observe.hosttime import HostMeter
from ssdtrain.plan.placement import AWAY_PLACEMENTS, Placement
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.profile import HostCosts
from ssdtrain.plan.rule import KEEP_ALL
from ssdtrain.rebuild.finder import Finder
from ssdtrain.transfer.cuda import open_device
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
PLACES = (
    *(Placement.KEEP, Placement.OFFLOAD),
    *(Placement.OFFLOAD_SSD, Placement.RECOMPUTE),
)
"""What becomes of the links of the chain, in turn."""


class _Chain(nn.Module):
    """Multiplications: each saves its input and a parameter. An input that is to be
    rebuilt is a SiLU's, which saves its own input for that."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        start = torch.ones(ITEM_BYTES // 4, device=device, dtype=torch.float32)
        self.scales = nn.ParameterList(
            nn.Parameter(start[:1].clone()) for _ in range(NUM_ITEMS)
        )
        self.start = start.requires_grad_()

    def forward(self) -> tuple[Tensor, list[tuple[Tensor, Placement]]]:
        """Return the result and the saved tensors in order, with their placements."""
        x, saved = self.start * self.scales[0], [(self.start, PLACES[0])]
        for number, scale in enumerate(self.scales, 1):
            placement = PLACES[number % len(PLACES)]
            if placement is Placement.RECOMPUTE:
                saved.append((x, Placement.KEEP))
                x = F.silu(x)
            saved.append((x, placement))
            x = x * scale
        return x, saved


def host_costs(torch_device: torch.device) -> HostCosts:
    """Measure what it costs the host to keep, move and rebuild a tensor; takes 10 to
    50 ms. A recipe of the chain has one operator and one input."""
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
    cache = TensorCache(offloader, KEEP_ALL, limits, counters)
    cache.recipes = Rebuilder(cache, Finder(), Weights())
    try:
        with torch.enable_grad(), torch.autocast(torch_device.type, enabled=False):
            chain = _Chain(torch_device)
            return _measured(cache, chain, meter or HostMeter())
    finally:
        cache.close()


def _measured(cache: TensorCache, chain: _Chain, meter: HostMeter) -> HostMeter:
    _, saved = chain()
    cache.cursor.plan = Plan(orders={"probe/0": _orders(saved)}, policy="probe")
    saved.clear()
    for turn in range(NUM_BOUND + NUM_MEASURED):
        cache.cursor.step_starts()
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


def _orders(saved: list[tuple[Tensor, Placement]]) -> tuple[Order, ...]:
    orders = []
    for number, (tensor, placement) in enumerate(saved):
        used = len(saved) - 1 - number
        if placement in AWAY_PLACEMENTS and used <= RELEASE_AFTER + LOAD_AHEAD:
            placement = Placement.KEEP  # it would be back before it is gone
        moves = placement in AWAY_PLACEMENTS
        orders.append(
            Order(
                name=name_of(tensor.grad_fn, tensor.shape),
                num_bytes=ITEM_BYTES,
                placement=placement,
                release_after=RELEASE_AFTER if moves else 0,
                load_at=max(0, used - LOAD_AHEAD) if moves else 0,
            )
        )
    return tuple(orders)

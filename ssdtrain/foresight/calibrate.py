"""Scales a shipped device to the machine at hand: a minute of kernels and host time.

A sample of the random design is timed; per family the median of measured over predicted
time is the family's scale. The host's scale comes from one step that it binds, of as
many operators as models have: with more of them than fit into its caches each takes the
host longer. What products draw is found on one at length, where the power limit holds
the clock.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain.foresight.call import Call, Family
from ssdtrain.foresight.capture import capture
from ssdtrain.foresight.device import Device
from ssdtrain.foresight.power import Power
from ssdtrain.foresight.price import estimate_step
from ssdtrain.foresight.spec import Kind
from ssdtrain.foresight.sustained import Watch, products
from ssdtrain.foresight.tracing import step_us

# Fewer measurements than this say nothing of a family.
LEAST_SAMPLES = 8
# A square product of this size is arithmetic and nothing else; so long it runs.
SUSTAINED_SIZE, SUSTAINED_S = 8192, 1.5
# Above it the power limit does not hold the clock, and nothing is known of the power.
HELD_CLOCK = 0.98


def family_scales(
    device: Device, times: Sequence[tuple[Call, float]]
) -> dict[Family, float]:
    """Median of measured over predicted time, by family."""
    ratios: dict[Family, list[float]] = {}
    for call, us in times:
        ratios.setdefault(call.family, []).append(us / device.kernel_us(call))
    return {
        family: statistics.median(found)
        for family, found in ratios.items()
        if len(found) >= LEAST_SAMPLES
    }


class _Block(nn.Module):
    """Attention and two products between normalizations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        batch, sequence, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, sequence, 3, 1, width)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        seen = F.scaled_dot_product_attention(query, key, value)
        joined = self.out(seen.transpose(1, 2).reshape(batch, sequence, width))
        x = x + F.dropout(joined, 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


class _Small(nn.Module):
    """Blocks so small that the host binds, as many as models have."""

    def __init__(self, width: int = 64, depth: int = 20) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to a scalar."""
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def _small(kind: Kind) -> tuple[nn.Module, Callable[[], Any]]:
    dtype = torch.bfloat16 if kind is Kind.CUDA else torch.float32
    model = _Small().to(dtype).train()
    x = torch.randn(2, 32, 64, dtype=dtype)
    return model, lambda: model(x)


def host_scale(device: Device, seconds: float = 1.0) -> float:
    """Measured over predicted time of a small step on this machine."""
    kind = device.spec.kind
    with torch.device("meta"):
        model, forward = _small(kind)
        predicted = estimate_step(capture(model, forward, on=kind), device).step_us
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model, forward = _small(kind)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        forward().backward()

    return step_us(step, seconds=seconds) / predicted


def measured_power(power: Power) -> Power:
    """What products draw on this machine's GPU, by the clock that a long one keeps."""
    with Watch() as watch:
        [run] = products((SUSTAINED_SIZE,), SUSTAINED_S)
    return drawn(power, run, watch.between(run["from"], run["to"]))


def drawn(power: Power, run: Mapping[str, Any], seen: Mapping[str, float]) -> Power:
    """The energy of arithmetic at which the limit holds the clock where it was seen.

    Args:
        power: as shipped; its limit and the energy of memory traffic stay.
        run: a product's `size` and its `steady_us`.
        seen: its `sm_mhz` and `max_sm_mhz`; without them the power stays as it is.
    """
    clock = seen.get("sm_mhz", 0.0) / seen.get("max_sm_mhz", 1.0)
    if not 0.0 < clock < HELD_CLOCK:
        return power
    seconds, size = run["steady_us"] * 1e-6, run["size"]
    joules = (power.limit_watts - power.idle_watts) * seconds
    at_top = joules / clock**power.exponent
    moved = 3 * 2 * size**2 * 1e-9 * power.joules_per_gb
    return replace(power, joules_per_tflop=(at_top - moved) / (2 * size**3 * 1e-12))

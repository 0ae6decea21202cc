"""Scales a shipped device to the machine at hand: a minute of kernels and host time.

A sample of the random design is timed; per family the median of measured over predicted
time is the family's scale. The host's scale comes from one small step that it binds.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ssdtrain.foresight.call import Call, Family
from ssdtrain.foresight.capture import capture
from ssdtrain.foresight.device import Device
from ssdtrain.foresight.price import estimate_step
from ssdtrain.foresight.spec import Kind
from ssdtrain.foresight.tracing import step_us

# Fewer measurements than this say nothing of a family.
LEAST_SAMPLES = 8


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


class _Small(nn.Module):
    """Normalization, attention and two products, small enough that the host binds."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 1, 2 * width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to a scalar."""
        for layer in self.layers:
            x = layer(x)
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

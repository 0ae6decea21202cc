"""What closed forms of kernels' times are made of (`laws.py`, `traffic.py`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssdtrain.tools.foresight.call import Call
from ssdtrain.tools.foresight.spec import DeviceSpec

Columns = Mapping[str, Tensor]
"""One number a call, by name."""
Parameters = Mapping[str, Tensor]

SHARPNESS = 4.0
"""Of the longer of two times that overlap: a norm's exponent."""


class ClosedForm(NamedTuple):
    """A family's closed form."""

    columns: Callable[[Sequence[Call], DeviceSpec], Columns]
    start: Callable[[], Parameters]
    log_us: Callable[[Columns, Parameters, DeviceSpec], Tensor]


def double_tensor(values: Sequence[float]) -> Tensor:
    """In double precision on the CPU, whatever the default device."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def sizes(calls: Sequence[Call], name: str) -> Tensor:
    """One size of every call."""
    return double_tensor([call.sizes[name] for call in calls])


def flags(values: Sequence[bool]) -> Tensor:
    """1 where it is so, else 0."""
    return double_tensor([float(value) for value in values])


def constants(count: int, value: float, *more: int) -> Tensor:
    """`count` (by `more`) constants before they are found."""
    return torch.full((count, *more), value, dtype=torch.float64, device="cpu")


def longer(first: Tensor, second: Tensor) -> Tensor:
    """Of two times that overlap, nearly."""
    power: Tensor = (first**SHARPNESS + second**SHARPNESS) ** (1 / SHARPNESS)
    return power


def moved_us(num_bytes: Tensor, share: Tensor, spec: DeviceSpec) -> Tensor:
    """Memory traffic at a share (its logit) of the data sheet's rate."""
    return num_bytes / (spec.memory_gb_per_s * 1e3 * torch.sigmoid(share))


def in_waves(tiles: Tensor, num_sms: int, tail: Tensor) -> Tensor:
    """Waves; what the last one lacks counts by the share `tail`."""
    waves = tiles / num_sms
    full = torch.ceil(waves)
    return torch.where(waves <= 1, full, waves + torch.sigmoid(tail) * (full - waves))


def cached(num_bytes: Tensor, room: Tensor, edge: Tensor, spec: DeviceSpec) -> Tensor:
    """The share of a call's bytes that the L2 cache holds: all of a small call's."""
    most = room + math.log(max(1.0, 2.0 * spec.l2_bytes))
    return torch.sigmoid((most - torch.log(num_bytes)) * torch.exp(edge))

"""First weights, as PyG draws them."""

import math

from torch import Tensor, nn


def glorot(t: Tensor | None) -> None:
    """PyG's initialization: uniform within sqrt(6 / (fan in + fan out))."""
    if t is not None:
        bound = math.sqrt(6.0 / (t.size(-2) + t.size(-1)))
        nn.init.uniform_(t, -bound, bound)


def kaiming_uniform(t: Tensor, fan: int) -> None:
    """PyG's default for typed linear layers: within 1 / sqrt(fan)."""
    bound = 1.0 / math.sqrt(fan) if fan > 0 else 0.0
    nn.init.uniform_(t, -bound, bound)

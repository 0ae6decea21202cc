"""`dgl.init`."""

import torch
from torch import Tensor


def zero_initializer(
    shape: tuple[int, ...], dtype: torch.dtype, ctx: torch.device, id_range: slice
) -> Tensor:
    """Return zeros."""
    return torch.zeros(shape, dtype=dtype, device=ctx)

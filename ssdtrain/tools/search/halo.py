"""Rows of neighbours, for convolutions that are split along a spatial dimension."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional

from ssdtrain.errors import ConfigError
from ssdtrain.tools.search.placement import Cut


def with_halo(local: Tensor, cut: Cut, group: ProcessGroup) -> Tensor:
    """Return a worker's piece with rows of the workers before and after it; zeros at
    the ends, as padding makes them. Raises ConfigError: a piece has fewer rows than a
    halo."""
    dim, rows = cut.dim, local.shape[cut.dim]
    if max(cut.before, cut.after) > rows:
        raise ConfigError(
            f"a halo of {max(cut.before, cut.after)} rows expects pieces of at least "
            f"as many, got {rows}; use fewer workers on this axis"
        )
    first = local.narrow(dim, 0, cut.after)
    last = local.narrow(dim, rows - cut.before, cut.before)
    edges = torch.cat([first, last], dim).contiguous()
    gathered = functional.all_gather_tensor(edges, 0, group)
    each = functional.wait_tensor(gathered).chunk(group.size(), 0)
    rank = group.rank()
    before = torch.zeros_like(last)
    after = torch.zeros_like(first)
    if rank > 0:
        before = each[rank - 1].narrow(dim, cut.after, cut.before)
    if rank + 1 < group.size():
        after = each[rank + 1].narrow(dim, 0, cut.after)
    return torch.cat([before, local, after], dim)

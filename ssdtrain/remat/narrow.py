"""The narrow form of a tensor that was widened, to be stored in its place."""

import sys

import torch
from torch import Tensor


def narrow(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a widened tensor as it was before, in memory of its own.

    A CPU's cast to bfloat16 gives all NaN the same bits, which widened again are not
    the tensor's: there the upper half of every element is copied.
    """
    if dtype is not torch.bfloat16 or wide.device.type != "cpu":
        return wide.to(dtype)
    upper = int(sys.byteorder == "little")
    halves = torch.empty(0, dtype=torch.int16, device="cpu").set_(
        wide.untyped_storage(),
        2 * wide.storage_offset() + upper,
        wide.shape,
        [2 * step for step in wide.stride()],
    )
    found = torch.empty_like(wide, dtype=dtype)
    found.view(torch.int16).copy_(halves)
    return found

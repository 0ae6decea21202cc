"""Functions of 16-bit numbers by table: all 65,536 results, made by torch itself."""

from collections.abc import Callable

import torch
from torch import Tensor

NUM_ENTRIES = 2**16


def every_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All numbers of a 16-bit dtype, in the order of their bits taken as unsigned."""
    bits = torch.arange(NUM_ENTRIES, dtype=torch.int32, device=device)
    return bits.to(torch.int16).view(dtype)


def tabulate(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The bits of its results, 65,536 int16.

    Raises:
        ValueError: it makes another dtype or shape of its input.
    """
    numbers = every_number(dtype, device)
    results = function(numbers)
    if results.dtype is not dtype or results.shape != numbers.shape:
        raise ValueError(
            f"expected an elementwise function of {dtype}, got "
            f"{results.dtype} {tuple(results.shape)}"
        )
    return results.contiguous().view(torch.int16)

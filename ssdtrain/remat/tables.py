"""Functions of 16-bit numbers by table: all 65,536 results, made by torch itself."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ssdtrain.remat import nvrtc

SOURCE = Path(__file__).with_name("table.cu")
NUM_THREADS = 1024
VECTOR = 8
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


class SharedTable:
    """The kernel that keeps a table in shared memory, on one device."""

    def __init__(self, device: torch.device) -> None:
        """Compile it.

        Raises:
            KernelUnavailableError: see `nvrtc.load`.
        """
        self._kernel = nvrtc.load(SOURCE, "look_up", device, 2 * NUM_ENTRIES)
        properties = torch.cuda.get_device_properties(device)
        self._num_blocks = properties.multi_processor_count

    def look_up(self, source: Tensor, table: Tensor) -> Tensor:
        """table[bits of source].

        Args:
            source: contiguous, 16-bit.
            table: of `tabulate`, for the dtype of `source`.

        Returns:
            As `source`.
        """
        target = torch.empty_like(source)
        size = source.numel()
        aligned = (source.data_ptr() | target.data_ptr()) % 16 == 0
        num_vectors = size // VECTOR if aligned else 0
        self._kernel.launch(
            self._num_blocks,
            NUM_THREADS,
            (table, source, target),
            num_vectors,
            size - VECTOR * num_vectors,
        )
        return target

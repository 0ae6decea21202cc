"""A host table: rows in pinned memory with an alias on each device that asks."""

from collections.abc import Sequence

import torch

from pydirect.memory.alias import device_alias
from pydirect.memory.allocate import empty_table
from pydirect.memory.pinning import Pinnable, is_pinned, pin


class HostTable:
    """Rows of equal size in host memory that GPUs read in place.

    Build it once for a feature matrix; `pydirect.gather.index_select` takes it (or its
    ``tensor``). Aliases are made on first use and kept.
    """

    def __init__(self, source: Pinnable) -> None:
        """Pin ``source`` in place; see `pydirect.memory.pin`.

        Raises:
            ValueError: ``source`` has no dimension, or cannot be pinned.
        """
        self.tensor = pin(source)
        """CPU tensor, shape (num_rows, ...)."""
        if self.tensor.dim() == 0:
            raise ValueError("HostTable expects at least one dimension (the rows)")
        self._aliases: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> "HostTable":
        """An uninitialised table; see `pydirect.memory.empty_table`."""
        return cls(empty_table(shape, dtype))

    @property
    def num_rows(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        rows = max(1, self.num_rows)
        return self.tensor.nbytes // rows

    @property
    def is_pinned(self) -> bool:
        return is_pinned(self.tensor)

    def alias(self, device: torch.device | str | int) -> torch.Tensor:
        """The table as a tensor on ``device``, without a copy."""
        key = torch.device("cuda", device) if isinstance(device, int) else device
        key = torch.device(key)
        if key not in self._aliases:
            self._aliases[key] = device_alias(self.tensor, key)
        return self._aliases[key]

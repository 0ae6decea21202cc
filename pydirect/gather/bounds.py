"""Index errors: at once on the CPU, without a wait on the GPU.

[Note: Errors without a wait] Checking an index on the GPU before using it would stop
the CPU until the GPU has caught up. So kernels skip a bad index and leave the first one
in pinned host memory, written over the link only when there is one. The next gather on
that device looks there, `check` waits and looks. Rows of bad indices hold whatever the
output held.
"""

import torch


class GatherIndexError(IndexError):
    """An index points outside the table; ``value`` and ``position`` say which."""

    def __init__(self, *, value: int, position: int, num_rows: int) -> None:
        super().__init__(
            f"index {value} at position {position} is out of range: expects 0 <= index "
            f"< {num_rows} (the rows of the table)"
        )
        self.value = value
        self.position = position
        self.num_rows = num_rows


def check_on_cpu(index: torch.Tensor, num_rows: int) -> None:
    """Raise `GatherIndexError` for the first bad index of a CPU tensor."""
    if index.numel() == 0:
        return
    low, high = torch.aminmax(index)
    if int(low) >= 0 and int(high) < num_rows:
        return
    position = int(((index < 0) | (index >= num_rows)).nonzero()[0])
    raise GatherIndexError(
        value=int(index[position]), position=position, num_rows=num_rows
    )

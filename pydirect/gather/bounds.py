"""Index errors: at once on the CPU, without a wait on the GPU.

[Note: Errors without a wait] Checking an index on the GPU before using it would stop
the CPU until the GPU has caught up. So kernels skip a bad index and leave the first one
in pinned host memory, written over the link only when there is one. The next gather on
that device looks there, `check` waits and looks. Rows of bad indices hold whatever the
output held.
"""

import ctypes
import functools
from collections.abc import Callable

import torch

from pydirect.memory import empty_pinned


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


def check_on_cpu(
    rows: torch.Tensor, num_rows: int, *, given: torch.Tensor | None = None
) -> None:
    """Raise `GatherIndexError` for the first bad row of a CPU tensor.

    Args:
        rows: int32 or int64, shape (num_indices,).
        num_rows: of the table.
        given: the index as it was given, for the message; None for ``rows``.
    """
    if rows.numel() == 0:
        return
    low, high = torch.aminmax(rows)
    if int(low) >= 0 and int(high) < num_rows:
        return
    position = int(((rows < 0) | (rows >= num_rows)).nonzero()[0])
    value = int((rows if given is None else given)[position])
    raise GatherIndexError(value=value, position=position, num_rows=num_rows)


class Faults:
    """The fault record of one device."""

    def __init__(
        self, device: torch.device, wait: Callable[[], object] | None = None
    ) -> None:
        """``wait``: returns once the device has done its work; None for its own."""
        self._wait = wait or functools.partial(_wait_for, device)
        # Atomics of a GPU on host memory need a link that supports them, so the first
        # bad index is elected on the device and only the winner writes to the host.
        self._elected = torch.zeros(1, dtype=torch.int64, device=device)
        self._record = empty_pinned((3,), torch.int64).zero_()
        # Every gather looks here, and reading a tensor costs microseconds.
        self._first = ctypes.c_int64.from_address(self._record.data_ptr())
        self.elected_address = self._elected.data_ptr()
        self.record_address = self._record.data_ptr()

    def raise_if_any(self) -> None:
        """Raise for the first bad index that a finished kernel met, once; no wait."""
        if self._first.value == 0:
            return
        # Kernels in flight may hold more bad indices; they are of the same kind, and
        # a report of them after the reset would look like a new one.
        self._wait()
        position, value, num_rows = self._record.tolist()
        self._record.zero_()
        self._elected.zero_()
        self._wait()
        raise GatherIndexError(value=value, position=position - 1, num_rows=num_rows)

    def wait_and_raise(self) -> None:
        """Wait for the device, then as `raise_if_any`."""
        self._wait()
        self.raise_if_any()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

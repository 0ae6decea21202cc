"""CPU gather and DMA: the paths that move bytes without a kernel.

Two pinned buffers take turns: threads fill one while the other is on the link.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from pydirect.gather.bounds import check_on_cpu
from pydirect.gather.request import Request
from pydirect.gather.runs import find_runs
from pydirect.memory import empty_pinned

_BUFFER_BYTES = 8 << 20
# A gather is cut into this many parts at least, so that its copies overlap with it.
_PARTS = 4
_SMALLEST_PART_BYTES = 512 << 10


class Marker(Protocol):
    """What marks the end of a copy: `torch.cuda.Event`, or nothing on the CPU."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Staging:
    """Double-buffered CPU gather. Not for two threads at once."""

    def __init__(
        self, new_marker: Callable[[], Marker], buffer_bytes: int = _BUFFER_BYTES
    ) -> None:
        """``buffer_bytes``: of each of the two; one row at least always fits."""
        self._buffer_bytes = buffer_bytes
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._markers = [new_marker() for _ in range(2)]
        self._turn = 0

    def gather(self, request: Request) -> None:
        """Threads gather, the current stream copies; returns when the last part of
        the gather is queued for its copy.

        Raises:
            GatherIndexError: before any byte is written.
        """
        index = request.index.cpu()
        check_on_cpu(index, request.num_rows)
        rows = max(1, self._part_bytes(request) // request.row_bytes)
        for start in range(0, request.num_indices, rows):
            part = index[start : start + rows]
            staged = self._next_buffer(part.numel() * request.row_bytes).view(
                part.numel(), request.row_bytes
            )
            _select(request.table_bytes, part, staged)
            request.out_bytes[start : start + rows].copy_(staged, non_blocking=True)
            self._markers[self._turn].record()

    def _part_bytes(self, request: Request) -> int:
        part = max(_SMALLEST_PART_BYTES, request.out_bytes.nbytes // _PARTS)
        return min(self._buffer_bytes, part)

    def _next_buffer(self, num_bytes: int) -> torch.Tensor:
        """The other buffer, once its last copy is done."""
        self._turn = 1 - self._turn
        self._markers[self._turn].synchronize()
        if self._buffers[self._turn].numel() < num_bytes:
            size = max(num_bytes, self._buffer_bytes)
            self._buffers[self._turn] = empty_pinned((size,), torch.uint8)
        return self._buffers[self._turn][:num_bytes]


def copy_runs(request: Request) -> int:
    """One copy on the current stream for every run of consecutive rows.

    Returns:
        The number of copies.

    Raises:
        GatherIndexError: before any byte is written.
    """
    index = request.index.cpu()
    check_on_cpu(index, request.num_rows)
    runs = find_runs(index)
    for run in runs:
        source = request.table_bytes[run.first_row : run.first_row + run.num_rows]
        target = request.out_bytes[run.position : run.position + run.num_rows]
        target.copy_(source, non_blocking=True)
    return len(runs)


def _select(table: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """torch's threaded gather, on the widest word that rows and addresses allow."""
    together = table.data_ptr() | out.data_ptr() | table.shape[1]
    word = torch.int64 if together % 8 == 0 else torch.uint8
    torch.index_select(table.view(word), 0, index, out=out.view(word))

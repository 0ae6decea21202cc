"""The paths that CPU threads and copy engines carry: no kernel moves a row.

`gather_on_cpu` serves an index on the CPU. `Staging` gathers for a GPU through two
pinned buffers that take turns: threads fill one while the other is on the link.
`copy_runs` asks for one copy for each run of consecutive rows.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from pydirect.gather.bounds import check_on_cpu
from pydirect.gather.request import Path, Request
from pydirect.memory import empty_pinned

_BUFFER_BYTES = 8 << 20
# A gather is cut into this many parts at least, so that its copies overlap with it.
_PARTS = 4
_SMALLEST_PART_BYTES = 512 << 10


class Run(NamedTuple):
    """``index[position + k] == first_row + k`` for 0 <= k < num_rows."""

    position: int
    first_row: int
    num_rows: int


def find_runs(index: torch.Tensor) -> list[Run]:
    """Split a CPU index (1-D, integers) into its longest runs, in order."""
    if index.numel() == 0:
        return []
    broken = (index[1:] != index[:-1] + 1).nonzero().flatten() + 1
    starts = torch.cat((broken.new_zeros(1), broken))
    ends = torch.cat((broken, broken.new_full((1,), index.numel())))
    return [
        Run(position, row, end - position)
        for position, row, end in zip(
            starts.tolist(), index[starts].tolist(), ends.tolist(), strict=True
        )
    ]


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
        self._buffers = [
            torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)
        ]
        self._markers = [new_marker() for _ in range(2)]
        self._turn = 0

    def gather(self, request: Request) -> None:
        """Threads gather, the current stream copies; returns when the last part of
        the gather is queued for its copy.

        Raises:
            GatherIndexError: before any byte is written.
        """
        index = rows_on_cpu(request)
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


def rows_on_cpu(request: Request) -> torch.Tensor:
    """The checked rows that the index means, on the CPU; waits for an index on a GPU.

    Raises:
        GatherIndexError: an index is out of range.
    """
    index = request.index.cpu()
    if not request.wraps:
        check_on_cpu(index, request.num_rows)
        return index
    rows = torch.where(index < 0, index + request.num_rows, index)
    check_on_cpu(rows, request.num_rows, given=index)
    return rows


def copy_runs(request: Request) -> int:
    """One copy on the current stream for every run of consecutive rows.

    Returns:
        The number of copies.

    Raises:
        GatherIndexError: before any byte is written.
    """
    index = rows_on_cpu(request)
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


def gather_on_cpu(request: Request, path: Path) -> None:
    """Write ``request.out``; raises `GatherIndexError` before any byte is written."""
    rows = rows_on_cpu(request)
    if request.num_indices == 0 or request.row_bytes == 0:
        return
    if path is Path.SORTED:
        # Each row once in address order, then to its places.
        unique, places = torch.unique(rows, return_inverse=True)
        read = request.table_bytes.index_select(0, unique)
        torch.index_select(read, 0, places, out=request.out_bytes)
    elif path is Path.DMA:
        copy_runs(request)
    else:
        torch.index_select(request.table_bytes, 0, rows, out=request.out_bytes)

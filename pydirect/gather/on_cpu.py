"""Every path for an index on the CPU: same results and errors, no GPU needed."""

import torch

from pydirect.gather.bounds import check_on_cpu
from pydirect.gather.request import Path, Request
from pydirect.gather.runs import find_runs


def gather_on_cpu(request: Request, path: Path) -> None:
    """Write ``request.out``; raises `GatherIndexError` before any byte is written."""
    check_on_cpu(request.index, request.num_rows)
    if request.num_indices == 0 or request.row_bytes == 0:
        return
    if path is Path.SORTED:
        _sorted(request)
    elif path is Path.DMA:
        _runs(request)
    else:
        torch.index_select(request.table_bytes, 0, request.index, out=request.out_bytes)


def _sorted(request: Request) -> None:
    """Each row once in address order, then to its places."""
    unique, places = torch.unique(request.index, return_inverse=True)
    torch.index_select(
        request.table_bytes.index_select(0, unique), 0, places, out=request.out_bytes
    )


def _runs(request: Request) -> None:
    for run in find_runs(request.index):
        source = request.table_bytes[run.first_row : run.first_row + run.num_rows]
        request.out_bytes[run.position : run.position + run.num_rows].copy_(source)

"""Gather rows of host memory onto the device that asks for them.

`index_select` is the door. For an index on a GPU the rows come over the link by one of
four paths (`Path`), chosen by a model calibrated on this machine.
"""

import torch

from pydirect.gather.bounds import GatherIndexError
from pydirect.gather.on_cpu import gather_on_cpu
from pydirect.gather.request import (
    Path,
    as_request,
    check_index,
    check_out,
    empty_out,
    host_tensor,
)
from pydirect.memory import HostTable

__all__ = ["GatherIndexError", "Path", "index_select"]


def index_select(
    table: torch.Tensor | HostTable,
    index: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    path: Path | str | None = None,
    max_sms: int | None = None,
    stream: "torch.cuda.Stream | None" = None,
) -> torch.Tensor:
    """``table[index]`` along the first dimension, on the index's device.

    Args:
        table: host table, shape (num_rows, ...), any dtype and row size.
        index: int32 or int64, shape (num_indices,), on the CPU or a GPU.
        out: where to write, shape (num_indices, ...), on the index's device.
        path: force a path; None lets the calibrated model choose.
        max_sms: at most so many streaming multiprocessors work on the gather.
        stream: CUDA stream to work on; None for the current one.

    Returns:
        Tensor of shape (num_indices, ...), dtype of the table, on ``index.device``.

    Raises:
        ValueError: table, index, out or path are not what they should be.
        GatherIndexError: an index is out of range; for an index on a GPU at the next
            gather there or at `check`.
    """
    chosen = None if path is None else Path(path)
    rows = host_tensor(table)
    check_index(index)
    if out is None:
        out = empty_out(rows, index)
    else:
        check_out(rows, index, out)
    request = as_request(rows, index, out)
    if index.device.type == "cpu":
        gather_on_cpu(request, chosen or Path.DIRECT)
    else:
        out.copy_(rows.index_select(0, index.cpu()))
    return out

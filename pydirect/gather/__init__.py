"""Gather rows of host memory onto the device that asks for them.

`index_select` is the door. For an index on a GPU the rows come over the link by one of
four paths (`Path`), chosen by a model calibrated on this machine.
"""

import torch

from pydirect.gather.bounds import GatherIndexError
from pydirect.gather.cpu import gather_on_cpu
from pydirect.gather.explain import Explanation, explain
from pydirect.gather.front import GatherStats, front_of, process_counters
from pydirect.gather.request import (
    Path,
    Request,
    Tiers,
    as_request,
    check_index,
    check_out,
    empty_out,
    host_tensor,
)
from pydirect.memory import HostTable

__all__ = [
    "Explanation",
    "GatherIndexError",
    "GatherStats",
    "Path",
    "check",
    "explain",
    "index_select",
    "stats",
]


def index_select(
    table: torch.Tensor | HostTable,
    index: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    path: Path | str | None = None,
    max_sms: int | None = None,
    stream: "torch.cuda.Stream | None" = None,
    wraps: bool = False,
    tiers: Tiers | None = None,
) -> torch.Tensor:
    """``table[index]`` along the first dimension, on the index's device.

    Args:
        table: host table, shape (num_rows, ...), any dtype and row size.
        index: int32 or int64, shape (num_indices,), on the CPU or a GPU.
        out: where to write, shape (num_indices, ...), on the index's device.
        path: force a path; None lets the calibrated model choose.
        max_sms: at most so many streaming multiprocessors work on the gather, ordering
            and copying of repeats included.
        stream: CUDA stream to work on, after what is queued on the current one; None
            for the current one. Other streams wait for it before they use the result.
        wraps: whether negative indices count from the end, as subscripts do.
        tiers: copies of the hottest rows in GPU memory, from where they are read
            (`pydirect.tiering.TieredTable` makes them); the table must be pinned then.

    Returns:
        Tensor of shape (num_indices, ...), dtype of the table, on ``index.device``.

    Raises:
        ValueError: table, index, out, path or max_sms are not what they should be.
        GatherIndexError: an index is out of range; for an index on a GPU at the next
            gather there or at `check`.
    """
    wanted = None if path is None else Path(path)
    if max_sms is not None and max_sms < 1:
        raise ValueError(f"max_sms: expects at least 1, or None, got {max_sms}")
    rows = host_tensor(table)
    check_index(index)
    if index.device.type == "cpu":
        request, out = _prepare(rows, index, out, wraps, tiers)
        gather_on_cpu(request, wanted or Path.DIRECT)
        return out
    if index.device.type != "cuda":
        raise ValueError(
            f"gather expects an index on the CPU or a GPU, got {index.device}: move it "
            'with .to("cuda")'
        )
    if stream is None:
        return _on_gpu(rows, index, out, wanted, max_sms, wraps, tiers)
    caller = torch.cuda.current_stream(index.device)
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        result = _on_gpu(rows, index, out, wanted, max_sms, wraps, tiers)
    # Each belongs to one stream's memory and is in use on the other.
    index.record_stream(stream)
    result.record_stream(stream if out is not None else caller)
    return result


def check(device: torch.device | str | None = None) -> None:
    """Wait for a GPU and raise for a bad index of any earlier gather onto it.

    Args:
        device: CUDA device; None for the current one.

    Raises:
        GatherIndexError: the first bad index since the last check.
    """
    if torch.cuda.is_available():
        front_of(_with_index(torch.device(device or "cuda"))).engine.check()


def stats() -> GatherStats:
    """Which paths the gathers of this process took; see `GatherStats`."""
    return process_counters().read()


def _prepare(
    rows: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor | None,
    wraps: bool,
    tiers: Tiers | None,
) -> tuple[Request, torch.Tensor]:
    if rows.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "gather does not differentiate: the table requires grad; pass "
            "table.detach(), or work under torch.no_grad()"
        )
    if out is None:
        out = empty_out(rows, index)
    else:
        check_out(rows, index, out)
    return as_request(rows, index, out, wraps=wraps, tiers=tiers), out


def _on_gpu(
    rows: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor | None,
    path: Path | None,
    max_sms: int | None,
    wraps: bool,
    tiers: Tiers | None,
) -> torch.Tensor:
    with torch.cuda.device(index.device):
        request, result = _prepare(rows, index, out, wraps, tiers)
        front_of(index.device).gather(request, path, max_sms)
    return result


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())

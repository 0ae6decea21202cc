"""Subscripts that are row gathers: ``features[index]`` at link speed.

Reading rows through a plain alias is bound by address translation and by misaligned
rows (section 4.4.5 and docs/pydirect.md); `pydirect.gather` is not. So a subscript of a
unified table by integers goes there.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch

from pydirect.gather import index_select
from pydirect.gather.front import BoundTable, front_of
from pydirect.region import DEVICE_TYPE, region_of
from pydirect.transfer import alias_on, gradient_of, leaf_of

_HOST = torch.device("cpu")
_PREPARED = 64
_NAMES = {
    torch.ops.aten.index.Tensor: "index",
    torch.ops.aten.index_select.default: "index_select",
    torch.ops.aten.embedding.default: "embedding",
}


@dataclass(frozen=True, kw_only=True)
class RowGather:
    """``table[index]`` along the first dimension."""

    table: torch.Tensor
    """Unified, contiguous, at least 2-D (shorter rows are not worth it)."""

    index: torch.Tensor
    """int32 or int64, any shape, CPU or CUDA."""

    wraps: bool
    """Whether negative indices count from the end."""


def as_row_gather(op: Any, args: tuple[Any, ...]) -> RowGather | None:
    """The call as a row gather, or None where it is something else."""
    name = _NAMES.get(op)
    if name is None:
        return None
    table, index, wraps = None, None, False
    if name == "index" and len(args[1]) == 1:
        table, index, wraps = args[0], args[1][0], True
    elif name == "index_select" and len(args) == 3 and args[1] == 0:
        table, index = args[0], args[2]
    elif name == "embedding":
        plain = len(args) < 4 or not args[3]
        table, index = (args[0], args[1]) if plain else (None, None)
    if table is None or index is None or not _fits(table, index):
        return None
    return RowGather(table=table, index=index, wraps=wraps)


def gather_rows(request: RowGather, device: torch.device) -> torch.Tensor:
    """The rows on ``device``, shape (*index.shape, *table.shape[1:]); differentiable.

    Raises:
        IndexError: an index is out of range (see `pydirect.gather.index_select`).
    """
    if torch.is_grad_enabled() and request.table.requires_grad:
        leaf_of(request.table)
        return cast(torch.Tensor, _Rows.apply(request.table, request, device))  # type: ignore[no-untyped-call]
    return _gather(request, device)


def _fits(table: torch.Tensor, index: torch.Tensor) -> bool:
    return (
        table.device.type == DEVICE_TYPE
        and table.dim() >= 2
        and table.numel() > 0
        and table.is_contiguous()
        and not table.is_conj()
        and not table.is_neg()
        and index.device.type != DEVICE_TYPE
        and index.dtype in (torch.int32, torch.int64)
    )


def _gather(request: RowGather, device: torch.device) -> torch.Tensor:
    table, index = request.table, request.index
    flat = index.reshape(-1).to(device, non_blocking=True)
    if device.type == "cuda":
        rows = _on_gpu(table, flat, request.wraps)
    else:
        host = alias_on(table, _HOST, writes=False)
        rows = index_select(host, flat, wraps=request.wraps)
    return rows if index.dim() == 1 else rows.view(*index.shape, *table.shape[1:])


def _on_gpu(table: torch.Tensor, index: torch.Tensor, wraps: bool) -> torch.Tensor:
    device, region = index.device, region_of(table)
    key = device, table.storage_offset(), table.shape, table.dtype
    prepared = region.prepared.get(key)
    if prepared is None:
        region.on_device(device)  # pins the memory
        host = alias_on(table, _HOST, writes=False)
        prepared = BoundTable(front_of(device), host)
        if len(region.prepared) >= _PREPARED:
            region.prepared.clear()
        region.prepared[key] = prepared
    else:
        # The paths of the CPU read what other streams have written.
        region.wait_for_gpu(before_write=False)
    region.note_gathers(device)
    if torch.cuda.current_device() == device.index:
        return prepared.index_select(index, wraps=wraps)
    with torch.cuda.device(device):
        return prepared.index_select(index, wraps=wraps)


class _Rows(torch.autograd.Function):
    """A gather whose gradient is summed on the host, where there is room for it."""

    @staticmethod
    def forward(
        ctx: Any, table: torch.Tensor, request: RowGather, device: torch.device
    ) -> torch.Tensor:
        ctx.request = request
        return _gather(request, device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        (grad,) = grads
        table, index = ctx.request.table, ctx.request.index
        flat = index.reshape(-1).to(_HOST)
        flat = torch.where(flat < 0, flat + table.shape[0], flat)
        rows = grad.reshape(flat.shape[0], *table.shape[1:]).to(_HOST)
        with gradient_of(table) as total:
            total.index_add_(0, flat, rows)
        return None, None, None

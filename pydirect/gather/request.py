"""What a gather is asked for, checked once at the door."""

import ctypes
import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch

from pydirect.kernels.gather import MAX_GPUS, TierArgs
from pydirect.memory import HostTable


class Path(str, Enum):
    """How rows travel from host memory to the index's device."""

    DIRECT = "direct"
    """The GPU reads the rows in place, in the order of the index."""

    SORTED = "sorted"
    """The GPU reads the rows in place, in the order of their addresses, each row once,
    and scatters them to the order of the index."""

    CPU = "cpu"
    """CPU threads gather into pinned staging buffers, DMA copies them."""

    DMA = "dma"
    """One DMA copy for every run of consecutive rows."""


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Where the hottest rows of a host table lie besides; see `pydirect.tiering`."""

    heat: torch.Tensor | None
    """int32, shape (num_rows,), on the device: each row's rank; None where rows are
    numbered by it."""

    local: torch.Tensor
    """Shape (num_local, ...): the rows of ranks below num_local, on the device."""

    shares: tuple[torch.Tensor, ...] = ()
    """Of each GPU, the rows of the ranks after those, dealt out one by one."""

    @cached_property
    def num_near(self) -> int:
        """Rows that GPUs hold."""
        return self.local.shape[0] + self.num_spread

    @cached_property
    def num_spread(self) -> int:
        return sum(share.shape[0] for share in self.shares)

    @cached_property
    def arguments(self) -> TierArgs:
        """Addresses for the kernels."""
        given = [share.data_ptr() for share in self.shares]
        return TierArgs(
            heat=None if self.heat is None else self.heat.data_ptr(),
            replicated=self.local.shape[0],
            spread=self.num_spread,
            num_gpus=max(1, len(given)),
            local=self.local.data_ptr(),
            share=(ctypes.c_void_p * MAX_GPUS)(*given),
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked gather: ``out[i] = table[index[i]]``.

    Kernels take addresses and sizes; the views as bytes are for the paths of the CPU,
    and made when they ask.
    """

    table: torch.Tensor
    """CPU, any dtype, shape (num_rows, ...), contiguous."""

    index: torch.Tensor
    """int32 or int64, shape (num_indices,), contiguous, on the device of ``out``."""

    out: torch.Tensor
    """Dtype of the table, shape (num_indices, ...), contiguous."""

    wraps: bool = False
    """Whether negative indices count from the end of the table."""

    tiers: Tiers | None = None
    """Copies of the hottest rows near the device; paths of the CPU pass them by."""

    @cached_property
    def num_rows(self) -> int:
        return self.table.shape[0]

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.table.shape[1:]) * self.table.element_size()

    @cached_property
    def num_indices(self) -> int:
        return self.index.shape[0]

    @cached_property
    def table_bytes(self) -> torch.Tensor:
        """The table as uint8, shape (num_rows, row_bytes)."""
        return _row_bytes(self.table)

    @cached_property
    def out_bytes(self) -> torch.Tensor:
        """``out`` as uint8, shape (num_indices, row_bytes)."""
        return _row_bytes(self.out)


def host_tensor(table: torch.Tensor | HostTable) -> torch.Tensor:
    """The rows of ``table``; a `HostTable` stands for its tensor."""
    rows = table.tensor if isinstance(table, HostTable) else table
    if not isinstance(rows, torch.Tensor):
        raise TypeError(
            f"gather expects a table that is a tensor or a HostTable, got "
            f"{type(rows).__name__}: pass torch.from_numpy(array)"
        )
    if rows.dim() == 0 or rows.device.type != "cpu" or not rows.is_contiguous():
        raise ValueError(
            "gather expects a contiguous CPU table with at least one dimension, got "
            f"shape {tuple(rows.shape)} on {rows.device}, strides {rows.stride()}: "
            "call .contiguous(), or pydirect.to_host(table) for a unified one"
        )
    return rows


def check_index(index: torch.Tensor) -> None:
    """Shape and dtype of an index; its values are checked where it is used.

    Raises:
        TypeError: not a tensor.
        ValueError: not 1-D, or neither int32 nor int64.
    """
    if not isinstance(index, torch.Tensor):
        raise TypeError(
            f"gather expects a 1-D tensor of row numbers, got {index!r}: pass "
            "torch.tensor([0, 1, ...]), or torch.arange(n) for the first n rows"
        )
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        mask = index.dtype == torch.bool
        how = "mask.nonzero().flatten()" if mask else "index.long().flatten()"
        raise ValueError(
            "gather expects a 1-D index of int32 or int64, got shape "
            f"{tuple(index.shape)} of {index.dtype}: pass {how}"
        )


def empty_out(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The result's memory, shape (num_indices, ...), on the index's device."""
    shape = (index.shape[0], *rows.shape[1:])
    return torch.empty(shape, dtype=rows.dtype, device=index.device)


def check_out(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Whether ``out`` fits what is asked for.

    Raises:
        ValueError: shape, dtype, device or layout differ.
    """
    shape = (index.shape[0], *rows.shape[1:])
    fits = out.shape == shape and out.dtype == rows.dtype
    if not (fits and out.device == index.device and out.is_contiguous()):
        raise ValueError(
            f"gather expects out of shape {shape}, {rows.dtype}, contiguous on "
            f"{index.device}, got {tuple(out.shape)}, {out.dtype} on {out.device}"
        )


def as_request(
    rows: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
    *,
    wraps: bool = False,
    tiers: Tiers | None = None,
) -> Request:
    """The request for checked tensors."""
    index = index.contiguous()
    return Request(table=rows, index=index, out=out, wraps=wraps, tiers=tiers)


def _row_bytes(rows: torch.Tensor) -> torch.Tensor:
    num_rows = rows.shape[0]
    if rows.numel() == 0:
        return rows.new_empty((num_rows, 0), dtype=torch.uint8)
    return rows.reshape(num_rows, -1).view(torch.uint8)

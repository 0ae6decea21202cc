"""Sums of neighbours' rows on a CPU without a program: of a small graph the host's work
for one is longer than the sum."""

from typing import Any

import torch
from torch import Tensor

from hector.ir.types import Domain, Index
from hector.message.functions import Combine, MessageFunction, Reducer, Side
from hector.message.programs import SHARED
from hector.runtime.again import transformed
from hector.runtime.bags import Edges
from hector.runtime.executable import graph_arrays

PLAIN = (torch.float32, torch.float64)


class _Sum(torch.autograd.Function):
    """Add up the rows of one end at the other; its gradient is a sum the other way, and
    so differentiable again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, edges: Edges, read: Index, at: Index) -> Tensor:
        """Return [nodes, width], what a program's sum is."""
        ctx.edges, ctx.ends = edges, (at, read)
        return edges.total(rows.contiguous(), read, at, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of rows."""
        found = _Sum.apply(grad, ctx.edges, *ctx.ends)  # type: ignore[no-untyped-call]
        return found, None, None, None


def plain_sum(r: Any, message: MessageFunction, reducer: Reducer) -> Tensor | None:
    """Return the sum or mean of sources' rows, None where a program is needed."""
    side, name = message.left
    if (
        message.combine is not Combine.COPY
        or side is not Side.SOURCE
        or reducer not in (Reducer.SUM, Reducer.MEAN)
        or r.two_sided
        or r.programs is not SHARED
        or r.device.type != "cpu"
        or not r.num_edges()
    ):
        return None
    rows = r.srcdata[name]
    if rows.dim() != 2 or not rows.shape[1] or rows.dtype not in PLAIN or transformed():
        return None
    edges = Edges(graph_arrays(r.structure), Domain.EDGE)
    found: Tensor = _Sum.apply(rows, edges, Index.SRC, Index.DST)  # type: ignore[no-untyped-call]
    if reducer is Reducer.SUM:
        return found
    count: Tensor = r.derived(_counts)
    return found / count.to(found.dtype)


def _counts(r: Any) -> Tensor:
    found: Tensor = r.in_degrees().clamp(min=1)[:, None]
    return found

"""Sums and dot products over edges on a CPU, without messages in memory.

PyTorch's `embedding_bag` reads rows and adds them up in one kernel, where a gather and
an `index_add` write and read a row an edge. Its gradients have no gradients, so those
are written here in terms of each other.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hector.arrays import GraphArrays
from hector.ir.types import Domain, Index
from hector.kept import kept
from hector.precision import MANY

PART = 32
"""Edges of a group of more than `MANY` that are added up in the rows' own precision;
such sums are added up in float64."""
CHUNK = 1024
"""Edges of one step of a dot product: their rows stay in the processor's cache."""


class Edges(NamedTuple):
    """Rows of a domain, and where they lead."""

    arrays: GraphArrays
    domain: Domain

    def at(self, rows: Tensor, index: Index | None) -> Tensor:
        """A row an edge: of where `index` leads; None: rows are the edges' own."""
        if index is None:
            return rows
        return rows.index_select(0, self.arrays.index(self.domain, index))

    def levels(self, group: Index) -> tuple[Tensor, Tensor | None]:
        """Where groups begin among edges ordered by them; where some have more than
        `MANY`, where their parts of `PART` do, and where groups begin among parts."""

        def make() -> tuple[Tensor, Tensor | None]:
            ptr = self.arrays.segments(self.domain, group).ptr
            sizes = ptr.diff()
            if not sizes.numel() or int(sizes.max()) <= MANY:
                return ptr, None
            parts = torch.where(sizes > MANY, (sizes + PART - 1) // PART, 1)
            first = torch.cat((parts.new_zeros(1), parts.cumsum(0))).to(ptr.dtype)
            within = torch.arange(int(first[-1]), device=ptr.device)
            within = within - first[:-1].repeat_interleave(parts)
            starts = ptr[:-1].repeat_interleave(parts) + within * PART
            return torch.cat((starts.to(ptr.dtype), ptr[-1:])), first

        return kept(self.arrays.known, ("levels", self.domain, group), make)

    def order(self, group: Index) -> Tensor | None:
        """Edges in the order of their groups; None: as they are."""
        return self.arrays.segments(self.domain, group).items

    def ids(self, group: Index, read: Index | None) -> Tensor:
        """What edges read, in the order of their groups."""
        if read is not None:
            return self.arrays.segment_index(self.domain, group, read)
        items = self.order(group)
        return self._counted(self.arrays.rows(self.domain)) if items is None else items

    def _counted(self, size: int) -> Tensor:
        device = self.arrays.graph.device
        return kept(
            self.arrays.known,
            ("counted", size),
            lambda: torch.arange(size, dtype=self.arrays.dtype, device=device),
        )

    def total(
        self, rows: Tensor, read: Index | None, group: Index, weight: Tensor | None
    ) -> Tensor:
        """[groups, heads, width]: the sum over a group's edges of what they read,
        times `weight` [edges, 1 or heads, 1]."""
        shape = rows.shape[1:]
        levels, ids = self.levels(group), self.ids(group, read)
        if weight is None or weight.shape[1] == 1 or shape[0] == 1:
            flat = rows.flatten(1)
            one = None if weight is None else self._ordered(weight, group).flatten()
            out = self._sum(flat, ids, levels, one)
        else:
            by_head = self._ordered(weight, group).flatten(1).t().contiguous()
            parts = [
                self._sum(part.contiguous(), ids, levels, one)
                for part, one in zip(rows.unbind(1), by_head, strict=True)
            ]
            out = torch.stack(parts, 1)
        return out.view(out.shape[0], *shape)

    def _ordered(self, weight: Tensor, group: Index) -> Tensor:
        items = self.order(group)
        return weight if items is None else weight.index_select(0, items)

    def _sum(
        self,
        rows: Tensor,
        ids: Tensor,
        levels: tuple[Tensor, Tensor | None],
        weight: Tensor | None,
    ) -> Tensor:
        ptr, first = levels
        if not ids.numel() or not rows.shape[1]:
            count = (ptr if first is None else first).numel() - 1
            return rows.new_zeros(count, rows.shape[1])
        made = torch.embedding_bag(rows, ids, ptr, False, 0, False, weight, True)[0]
        if first is None:
            return made
        parts = self._counted(made.shape[0])
        args = (False, 0, False, None, True)
        return torch.embedding_bag(made.double(), parts, first, *args)[0].to(made.dtype)

    def dot(
        self, left: Tensor, read: Index | None, right: Tensor, other: Index | None
    ) -> Tensor:
        """[edges, heads, 1]: the dot product of what edges read, head by head."""
        size = self.arrays.rows(self.domain)
        out = left.new_empty(size, left.shape[1], 1)
        pairs = [
            (t, None if i is None else self.arrays.index(self.domain, i))
            for t, i in ((left, read), (right, other))
        ]
        for begin in range(0, size, CHUNK):
            end = min(begin + CHUNK, size)
            a, b = (
                t[begin:end] if i is None else t.index_select(0, i[begin:end])
                for t, i in pairs
            )
            torch.sum(a * b, 2, keepdim=True, out=out[begin:end])
        return out


def differentiable(function: Any, *args: Any) -> Any:
    """What a function of this file gives, in the autograd graph."""
    return function.apply(*args)


class Total(torch.autograd.Function):
    """`Edges.total`, with derivatives of every order."""

    @staticmethod
    def forward(
        ctx: Any,
        edges: Edges,
        rows: Tensor,
        read: Index | None,
        group: Index,
        weight: Tensor | None,
    ) -> Tensor:
        ctx.edges, ctx.read, ctx.group = edges, read, group
        ctx.save_for_backward(rows, weight)
        return edges.total(rows, read, group, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        edges, read, group = ctx.edges, ctx.read, ctx.group
        grad = grad.contiguous()
        to_rows = to_weight = None
        if ctx.needs_input_grad[1] and read is None:
            to_rows = differentiable(Read, edges, grad, group)
            to_rows = to_rows if weight is None else to_rows * weight
        elif ctx.needs_input_grad[1]:
            to_rows = differentiable(Total, edges, grad, group, read, weight)
        if weight is not None and ctx.needs_input_grad[4]:
            to_weight = differentiable(Dot, edges, rows, read, grad, group)
            if weight.shape[1] != rows.shape[1]:
                to_weight = to_weight.sum(1, keepdim=True)
        return None, to_rows, None, None, to_weight


class Dot(torch.autograd.Function):
    """`Edges.dot`, with derivatives of every order."""

    @staticmethod
    def forward(
        ctx: Any,
        edges: Edges,
        left: Tensor,
        read: Index | None,
        right: Tensor,
        other: Index | None,
    ) -> Tensor:
        ctx.edges, ctx.read, ctx.other = edges, read, other
        ctx.save_for_backward(left, right)
        return edges.dot(left, read, right, other)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        left, right = ctx.saved_tensors
        edges: Edges = ctx.edges
        found: list[Tensor | None] = []
        sides = ((1, ctx.read, right, ctx.other), (3, ctx.other, left, ctx.read))
        for place, mine, rows, theirs in sides:
            if not ctx.needs_input_grad[place]:
                found.append(None)
            elif mine is not None:
                found.append(differentiable(Total, edges, rows, theirs, mine, grad))
            else:
                there = (
                    rows
                    if theirs is None
                    else differentiable(Read, edges, rows, theirs)
                )
                found.append(there * grad)
        return None, found[0], None, found[1], None


class Read(torch.autograd.Function):
    """`Edges.at`, with derivatives of every order."""

    @staticmethod
    def forward(ctx: Any, edges: Edges, rows: Tensor, index: Index) -> Tensor:
        ctx.edges, ctx.index = edges, index
        return edges.at(rows, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = differentiable(
            Total, ctx.edges, grad.contiguous(), None, ctx.index, None
        )
        return None, found, None

"""Sums, maxima and dot products over edges on a CPU, without messages in memory.

PyTorch's `embedding_bag` reads rows and adds them up in one kernel, where a gather and
an `index_add` write and read a row an edge.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hector.arrays import GraphArrays
from hector.ir.types import Domain, Index
from hector.kept import apart, kept
from hector.precision import MANY

PART = 32
"""Edges of a group of more than `MANY` that are added up in the rows' own precision;
such sums are added up in float64."""
CHUNK = 1024
"""Edges of one step of a dot product: their rows stay in the processor's cache."""
WHOLE = 4096
"""Edges of a dot product that is taken in one step: of fewer, steps take longer."""


class Bags(NamedTuple):
    """Sums as `embedding_bag` takes them."""

    ids: Tensor
    """Rows that are read, bag by bag."""
    ptr: Tensor
    """Where bags begin; of bags of more than `MANY`, where their parts of `PART` do."""
    first: Tensor | None
    """Where bags begin among parts; None: they are whole."""
    order: Tensor | None
    """Where the weight of each row lies; None: as they are."""

    def sum(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        """[bags, width] of rows [n, width]."""
        if not self.ids.numel() or not rows.shape[1]:
            count = (self.ptr if self.first is None else self.first).numel() - 1
            return rows.new_zeros(count, rows.shape[1])
        if weight is not None and self.order is not None:
            weight = weight.index_select(0, self.order)
        args = (False, 0, False, weight, True)
        # Of rows that want gradients it would note whose bag each is, whoever asks.
        rows = rows.detach() if rows.requires_grad else rows
        made = torch.embedding_bag(rows, self.ids, self.ptr, *args)[0]
        if self.first is None:
            return made
        parts = torch.arange(len(made), device=rows.device, dtype=self.first.dtype)
        args = (False, 0, False, None, True)
        wide = torch.embedding_bag(made.double(), parts, self.first, *args)[0]
        return wide.to(made.dtype)

    def total(
        self, rows: Tensor, shape: tuple[int, ...], heads: int, weight: Tensor | None
    ) -> Tensor:
        """[groups, *shape] of rows of `shape`; a bag for each of `heads`, `weight`
        [edges, 1 or heads, 1]."""
        flat = None if weight is None else weight.flatten()
        width = shape[0] * shape[1] // heads
        made = self.sum(rows.reshape(rows.numel() // max(width, 1), width), flat)
        return made.view(made.shape[0] // heads, *shape)


def _bags(ids: Tensor, ptr: Tensor, order: Tensor | None) -> Bags:
    sizes = ptr.diff()
    if not sizes.numel() or int(sizes.max()) <= MANY:
        return Bags(ids, ptr, None, order)
    parts = torch.where(sizes > MANY, (sizes + PART - 1) // PART, 1)
    first = torch.cat((parts.new_zeros(1), parts.cumsum(0))).to(ptr.dtype)
    within = torch.arange(int(first[-1]), device=ptr.device)
    within = within - first[:-1].repeat_interleave(parts)
    starts = ptr[:-1].repeat_interleave(parts) + within * PART
    return Bags(ids, torch.cat((starts.to(ptr.dtype), ptr[-1:])), first, order)


class EdgeRows(NamedTuple):
    """Rows of a domain, and where they lead."""

    arrays: GraphArrays
    domain: Domain

    def at(self, rows: Tensor, index: Index | None) -> Tensor:
        """A row an edge: of where `index` leads; None: rows are the edges' own."""
        if index is None:
            return rows
        return rows.index_select(0, self.arrays.index(self.domain, index))

    def bags(self, group: Index, read: Index | None, heads: int) -> Bags:
        """Bags of what a group's edges read; with several heads, one for each."""
        key = ("bags", self.domain, group, read, heads)
        return kept(self.arrays.known, key, lambda: self._make_bags(group, read, heads))

    def _make_bags(self, group: Index, read: Index | None, heads: int) -> Bags:
        ptr, items = self.arrays.segments(self.domain, group)
        size = self.arrays.rows(self.domain)
        every = torch.arange(size, device=ptr.device, dtype=ptr.dtype)
        order = every if items is None else items
        ids = order
        if read is not None:
            ids = self.arrays.segment_index(self.domain, group, read)
        if heads == 1:
            return _bags(ids, ptr, items)
        sizes, head = ptr.diff(), torch.arange(heads, device=ptr.device)
        begin, length = (t.repeat_interleave(sizes)[:, None] for t in (ptr[:-1], sizes))
        place = heads * begin + head * length + every[:, None] - begin
        place = place.flatten().long()
        parts = []
        for found in (ids, order):
            spread = (found[:, None] * heads + head).flatten().to(ptr.dtype)
            parts.append(torch.empty_like(spread).index_copy_(0, place, spread))
        starts = heads * ptr[:-1, None] + head * sizes[:, None]
        ends = torch.cat((starts.flatten(), heads * ptr[-1:])).to(ptr.dtype)
        return _bags(parts[0], ends, parts[1])

    def total(
        self, rows: Tensor, read: Index | None, group: Index, weight: Tensor | None
    ) -> Tensor:
        """[groups, heads, width]: the sum over a group's edges of what they read,
        times `weight` [edges, 1 or heads, 1]."""
        if group is Index.ALL and read is None and weight is None and len(rows) <= MANY:
            return rows.sum(0, keepdim=True)
        heads = 1
        if weight is not None and weight.shape[1] > 1:
            heads = weight.shape[1]
        bags = self.bags(group, read, heads)
        return bags.total(rows, rows.shape[1:], heads, weight)

    def largest(self, rows: Tensor, group: Index) -> Tensor:
        """[groups, ...]: the largest of a group's rows; 0 for none."""
        order, ptr, none = self._runs(group)
        if not rows.numel():
            return rows.new_zeros(ptr.numel() - 1, *rows.shape[1:])
        rows = rows if order is None else rows.index_select(0, order)
        # Several times as fast as `scatter_reduce`, which sorts in every call.
        out = torch.segment_reduce(rows.contiguous(), "max", offsets=ptr, unsafe=True)
        return out if none is None else out.masked_fill_(none, 0.0)

    def _runs(self, group: Index) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The edges group by group, None: as they are; where groups begin; those
        without edges, None: there are none."""

        def make() -> tuple[Tensor | None, Tensor, Tensor | None]:
            ptr, items = self.arrays.segments(self.domain, group)
            size = self.arrays.rows(self.domain)
            same = torch.arange(size, device=ptr.device, dtype=ptr.dtype)
            order = None if items is None or torch.equal(items, same) else items
            none = (ptr.diff() == 0).view(-1, 1, 1)
            return order, ptr.long(), none if bool(none.any()) else None

        return kept(self.arrays.known, ("runs", self.domain, group), make)

    def is_small(self) -> bool:
        """Whether dot products are taken in one step."""
        return self.arrays.rows(self.domain) <= WHOLE

    def small_dot(
        self, shape: tuple[int, ...], read: Index | None, other: Index | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """`dot` of rows of `shape` [heads, width] in one step."""
        (heads, width), size = shape, self.arrays.rows(self.domain)
        ids, others = (
            None if i is None else self.arrays.index(self.domain, i)
            for i in (read, other)
        )
        ones: list[Tensor] = []

        def run(left: Tensor, right: Tensor) -> Tensor:
            a = left if ids is None else left.index_select(0, ids)
            b = right if others is None else right.index_select(0, others)
            product = a * b if ids is None else a.mul_(b)
            if not ones or ones[0].dtype is not product.dtype:
                with apart():
                    ones[:] = [product.new_ones(width)]
            return torch.mv(product.reshape(-1, width), ones[0]).view(size, heads, 1)

        return run

    def dot(
        self, left: Tensor, read: Index | None, right: Tensor, other: Index | None
    ) -> Tensor:
        """[edges, heads, 1]: the dot product of what edges read, head by head."""
        size, (heads, width) = self.arrays.rows(self.domain), left.shape[1:]
        if self.is_small():
            return self.small_dot((heads, width), read, other)(left, right)
        ones = left.new_ones(width)
        out = left.new_empty(size, heads, 1)
        sides = [
            t.flatten(1).split(CHUNK)
            if i is None
            else _gathered(t.flatten(1), self.arrays.index(self.domain, i))
            for t, i in ((left, read), (right, other))
        ]
        places = out.view(-1).split(CHUNK * heads)
        for a, b, place in zip(*sides, places, strict=True):
            product = a * b if read is None else a.mul_(b)
            torch.mv(product.view(-1, width), ones, out=place)
        return out


def _gathered(rows: Tensor, ids: Tensor) -> Iterator[Tensor]:
    for part in ids.split(CHUNK):
        yield rows.index_select(0, part)

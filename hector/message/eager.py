"""Message passing with messages in memory: what is no compiled program.

User functions that the compiler cannot read get real tensors, as in DGL: a message
function all edges at once, a reduce function the nodes of one degree at once (degree
buckets: [nodes, degree, ...]). Median and product pad groups to powers of two, so that
a graph with hundreds of degrees has a dozen buckets; an LSTM reads all groups as one
packed sequence.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hector.indexing import group_by
from hector.kept import kept
from hector.message.functions import Combine, MessageFunction, ReduceFunction, Reducer


@dataclass(frozen=True)
class Bucket:
    """Hold nodes that receive equally many messages, and the ids of those edges."""

    nodes: Tensor
    """int64 [num_nodes]."""
    edges: Tensor
    """int64 [num_nodes, degree] edge ids, ascending in a row."""


class Groups:
    """Sort edges by destination into `Bucket`s, in the order of their ids."""

    def __init__(self, dst: Tensor, num_nodes: int) -> None:
        grouping = group_by(dst, num_nodes)
        self.device, self.num_edges = dst.device, dst.numel()
        self.items, self.first = grouping.items, grouping.ptr[:-1]
        self.degrees = grouping.ptr.diff()
        self._kept: dict[str, Any] = {}

    def exact(self) -> list[Bucket]:
        """Return a `Bucket` for each degree above 0. The first use waits for the
        device."""

        def make() -> list[Bucket]:
            return [
                self._bucket((self.degrees == d).nonzero().flatten(), d)
                for d in self.degrees.unique().tolist()
                if d
            ]

        return kept(self._kept, "exact", make)

    def padded(self) -> list[Bucket]:
        """Return `Bucket`s of degrees up to a power of two; missing edges have id
        num_edges."""

        def make() -> list[Bucket]:
            found, low, size = [], 0, 1
            while low < self.longest:
                inside = (self.degrees > low) & (self.degrees <= size)
                nodes = inside.nonzero().flatten()
                if nodes.numel():
                    found.append(self._bucket(nodes, size))
                low, size = size, 2 * size
            return found

        return kept(self._kept, "padded", make)

    @property
    def longest(self) -> int:
        """Edges of the largest group; the first use waits for the device."""
        return kept(
            self._kept,
            "longest",
            lambda: int(self.degrees.max()) if self.num_edges else 0,
        )

    def _bucket(self, nodes: Tensor, size: int) -> Bucket:
        places = torch.arange(size, device=self.device)
        there = places < self.degrees[nodes, None]
        at = (self.first[nodes, None] + places).clamp_(max=self.num_edges - 1)
        edges = torch.where(there, self.items[at], self.num_edges)
        return Bucket(nodes, edges)

    def packing(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return nodes with messages by falling degree, their edges in the order of a
        `PackedSequence` (first messages of all nodes, second ones, ...), and how many
        nodes have an i-th message (on the CPU, as PyTorch wants it)."""

        def make() -> tuple[Tensor, Tensor, Tensor]:
            order = torch.argsort(self.degrees, descending=True, stable=True)
            falling = self.degrees[order]
            nodes = order[falling > 0]
            falling = falling[: nodes.numel()]
            largest = int(falling[0]) if nodes.numel() else 0
            steps = torch.arange(largest, device=self.device)
            # Nodes with more than t messages: the list falls.
            counts = nodes.numel() - torch.searchsorted(
                falling.flip(0).contiguous(), steps, right=True
            )
            step = steps.repeat_interleave(counts, output_size=self.num_edges)
            begin = counts.cumsum(0) - counts
            row = torch.arange(self.num_edges, device=self.device) - begin[step]
            edges = self.items[self.first[nodes[row]] + step]
            return nodes, edges, counts.cpu()

        return kept(self._kept, "packing", make)


def combine(f: MessageFunction, left: Tensor, right: Tensor | None) -> Tensor:
    """Combine real rows as a built-in message function does; missing leading axes of a
    row count as 1."""
    if right is None:
        return left
    rank = max(left.dim(), right.dim())
    left, right = (
        t.view(t.shape[0], *(1,) * (rank - t.dim()), *t.shape[1:])
        for t in (left, right)
    )
    match f.combine:
        case Combine.ADD:
            return left + right
        case Combine.SUB:
            return left - right
        case Combine.MUL:
            return left * right
        case Combine.DIV:
            return left / right
        case _:
            product = left * right
            return product.sum(-1, keepdim=True) if rank > 1 else product


def reduce_builtin(f: ReduceFunction, messages: Tensor, groups: Groups) -> Tensor:
    """Reduce messages to [num_nodes, ...] by a reducer that is no sum or maximum."""
    if f.reducer is Reducer.LSTM:
        return _lstm(f, messages, groups)
    fill = {Reducer.MUL: 1.0, Reducer.MEDIAN: float("inf")}[f.reducer]
    last = messages.new_full((1, *messages.shape[1:]), fill)
    extended = torch.cat((messages, last))
    rows: list[Tensor] = []
    for bucket in groups.padded():
        box = extended[bucket.edges]
        if f.reducer is Reducer.MUL:
            made = box.prod(1)
        else:
            middle = ((groups.degrees[bucket.nodes] - 1) // 2).view(
                -1, 1, *(1,) * (box.dim() - 2)
            )
            places = middle.expand(-1, 1, *box.shape[2:])
            # Sorted, NaN comes last, behind what fills the rows.
            unknown = box.isnan().any(1, keepdim=True)
            places = torch.where(unknown, box.shape[1] - 1, places)
            made = box.sort(dim=1).values.gather(1, places).squeeze(1)
        rows.append(made)
    return _scattered(groups.padded(), rows, groups, messages)


def _scattered(
    buckets: Sequence[Bucket], rows: Sequence[Tensor], groups: Groups, like: Tensor
) -> Tensor:
    """Put the rows of all buckets into their places in [num_nodes, ...], each
    written once; nodes without messages get zeros. Without buckets rows are as those
    of `like`."""
    joined = torch.cat(tuple(rows)) if rows else like[:0]
    empty = joined.new_zeros(groups.degrees.numel(), *joined.shape[1:])
    if not rows:
        return empty
    return empty.index_copy(0, torch.cat([b.nodes for b in buckets]), joined)


def _lstm(f: ReduceFunction, messages: Tensor, groups: Groups) -> Tensor:
    module = f.module
    if module is None or messages.dim() != 2:
        raise ValueError(
            f"expected messages {f.message!r} [edges, width] for an LSTM, got "
            f"{list(messages.shape)}"
        )
    if messages.shape[1] != module.input_size:
        raise ValueError(
            f"expected messages of width {module.input_size} for the LSTM, got "
            f"{messages.shape[1]}"
        )
    nodes, edges, counts = groups.packing()
    width = module.proj_size or module.hidden_size
    width *= 2 if module.bidirectional else 1
    out = messages.new_zeros(groups.degrees.numel(), width)
    if not nodes.numel():
        return out
    packed = PackedSequence(messages[edges], counts, None, None)
    _, (hidden, _) = module(packed)
    ways = 2 if module.bidirectional else 1
    last = torch.cat(tuple(hidden[-ways:]), -1)
    return out.index_copy(0, nodes, last)


def reduce_user(
    call: Callable[[Bucket, Mapping[str, Tensor]], Mapping[str, Tensor]],
    messages: Mapping[str, Tensor],
    groups: Groups,
) -> dict[str, Tensor]:
    """Run a user's reduce function on the buckets of every degree; nodes without
    messages get zeros."""
    parts: dict[str, list[Tensor]] = {}
    buckets = groups.exact()
    for i, bucket in enumerate(buckets):
        mailbox = {k: m[bucket.edges] for k, m in messages.items()}
        made = checked(call(bucket, mailbox), bucket.nodes.numel(), "reduce function")
        if i and set(made) != set(parts):
            raise ValueError(
                f"expected the same results for nodes of every degree, got "
                f"{sorted(made)} after {sorted(parts)}"
            )
        for name, value in made.items():
            parts.setdefault(name, []).append(value)
    return {k: _scattered(buckets, rows, groups, rows[0]) for k, rows in parts.items()}


def checked(made: Any, rows: int, what: str) -> dict[str, Tensor]:
    """Return what a user function gave; ValueError unless it is a dict of `rows`
    rows."""
    if not isinstance(made, Mapping):
        raise ValueError(f"expected a dict from the {what}, got {type(made).__name__}")
    for name, value in made.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (rows,):
            shape = list(getattr(value, "shape", ())) or type(value).__name__
            raise ValueError(
                f"expected {name!r} from the {what} with {rows} rows, got {shape}"
            )
    return dict(made)


def levels_of(src: Tensor, dst: Tensor, num_nodes: int) -> Iterator[Tensor]:
    """Group nodes by the longest path that leads to them: no edge is inside a level.

    Raises ValueError for a graph with a cycle.
    """
    left = torch.bincount(dst, minlength=num_nodes)
    order = torch.sort(src, stable=True).indices
    out_degree = torch.bincount(src, minlength=num_nodes)
    first = out_degree.cumsum(0) - out_degree
    level = (left == 0).nonzero().flatten()
    done = 0
    while level.numel():
        yield level
        done += level.numel()
        sizes = out_degree[level]
        at = torch.repeat_interleave(first[level], sizes)
        inside = torch.arange(at.numel(), device=at.device)
        begin = sizes.cumsum(0) - sizes
        at = at + inside - torch.repeat_interleave(begin, sizes)
        reached = dst[order[at]]
        left.index_add_(0, reached, -torch.ones_like(reached))
        candidates = reached.unique()
        level = candidates[left[candidates] == 0]
    if done != num_nodes:
        raise ValueError(
            f"expected a graph without cycles, {num_nodes - done} nodes lie on or "
            f"behind one"
        )

"""TreeLSTM by levels: all nodes of one height, over all trees of a batch, at once.

[Note: one product a level] A child's row enters its parent by two products, with the
gates' matrix (summed over children) and with the forget gate's (a child each). A sum of
products is the product of a sum, so each row is multiplied once, by both matrices
together, when its level is done; parents then only add. A level is one product and one
kernel, backward as well: gates are read, forget gates computed again, and the weights'
gradients are one product over all nodes at the end.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hector.indexing import offsets, segment_ptr
from hector.message.graph import Graph
from hector.precision import HALF, entering, wide, wide_linear
from hector.tracing import untraced


@dataclass(frozen=True)
class Level:
    """Hold nodes first to last - 1, and the edges that end in them."""

    first: int
    last: int
    first_edge: int
    last_edge: int


class Levels:
    """Order the nodes of a forest by their `Level`s, leaves first; edges lead from
    children to parents."""

    def __init__(self, graph: Graph) -> None:
        levels = graph.topological_levels()
        src, dst = graph.edges()
        self.order = torch.cat((src[:0], *levels))
        """int64 [nodes]: node at each position."""
        self.position = torch.empty_like(self.order)
        places = torch.arange(self.order.numel(), device=graph.device)
        self.position[self.order] = places
        parent, by_parent = torch.sort(self.position[dst], stable=True)
        self.child = self.position[src][by_parent]
        """int64 [edges]: positions of the children, parent by parent."""
        self.parent = parent
        self.ptr = segment_ptr(parent, self.order.numel())
        """int64 [nodes + 1]: children of position p are child[ptr[p]:ptr[p + 1]]."""
        ends = offsets([v.numel() for v in levels], graph.device)
        edges = self.ptr[ends].tolist()
        at = ends.tolist()
        self.levels = tuple(
            Level(at[i], at[i + 1], edges[i], edges[i + 1]) for i in range(len(levels))
        )
        self.forest = not src.numel() or int(graph.out_degrees().max()) == 1
        """Whether no node has two parents."""


@dataclass(frozen=True)
class _Memory:
    """Hold what a run over the levels fills: rows by position."""

    x: Tensor
    """[nodes, 4 * hidden]: the inputs' part of the input, output, update and forget
    gate."""
    z: Tensor
    """[nodes, 4 * hidden]: the node's own row times both matrices."""
    gates: Tensor
    """[nodes, 3 * hidden]: input, output and update gate."""
    h: Tensor
    c: Tensor


class TorchCell:
    """Compute a level in PyTorch's operations: any device, dtype and graph without
    cycles."""

    @staticmethod
    def forward(m: _Memory, lv: Levels, at: Level) -> None:
        width = m.h.shape[1]
        child = lv.child[at.first_edge : at.last_edge]
        parent = lv.parent[at.first_edge : at.last_edge] - at.first
        x, z = m.x[at.first : at.last], m.z[child]
        gates = x[:, : 3 * width].index_add(0, parent, z[:, : 3 * width])
        i, o, u = gates.chunk(3, 1)
        i, o, u = torch.sigmoid(i), torch.sigmoid(o), torch.tanh(u)
        f = torch.sigmoid(x[parent, 3 * width :] + z[:, 3 * width :])
        c = (i * u).index_add_(0, parent, f * m.c[child])
        m.gates[at.first : at.last] = torch.cat((i, o, u), 1)
        m.c[at.first : at.last] = c
        m.h[at.first : at.last] = o * torch.tanh(c)

    @staticmethod
    def backward(m: _Memory, d: _Memory, lv: Levels, at: Level) -> None:
        width = m.h.shape[1]
        rows = slice(at.first, at.last)
        child = lv.child[at.first_edge : at.last_edge]
        parent = lv.parent[at.first_edge : at.last_edge]
        i, o, u = m.gates[rows].chunk(3, 1)
        t = torch.tanh(m.c[rows])
        dh = d.h[rows]
        dc = d.c[rows] + dh * o * (1 - t * t)
        d.c[rows] = dc
        d.x[rows, : 3 * width] = torch.cat(
            (dc * u * i * (1 - i), dh * t * o * (1 - o), dc * i * (1 - u * u)), 1
        )
        f = torch.sigmoid(m.x[parent, 3 * width :] + m.z[child, 3 * width :])
        df = d.c[parent] * m.c[child] * f * (1 - f)
        d.x[:, 3 * width :].index_add_(0, parent, df)
        d.z[:, : 3 * width].index_add_(0, child, d.x[parent, : 3 * width])
        d.z[:, 3 * width :].index_add_(0, child, df)
        d.c.index_add_(0, child, d.c[parent] * f)


def _cell(lv: Levels, like: Tensor) -> Any:
    """Return who computes levels: `TritonCell` where each node has one parent."""
    if lv.forest and like.is_cuda and like.dtype is not torch.float64:
        from hector.message.tree_kernels import TritonCell

        return TritonCell
    return TorchCell


class _Run(torch.autograd.Function):
    """Run all levels, leaves first; see [Note: one product a level]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, u: Tensor, levels: Levels, cell: Any
    ) -> tuple[Tensor, Tensor]:
        rows, width = x.shape[0], u.shape[0]
        m = _Memory(
            x=x.contiguous(),
            z=x.new_empty(rows, 4 * width),
            gates=x.new_empty(rows, 3 * width),
            h=x.new_empty(rows, width),
            c=x.new_empty(rows, width),
        )
        for at in levels.levels:
            cell.forward(m, levels, at)
            if at.last < rows:
                torch.mm(m.h[at.first : at.last], u, out=m.z[at.first : at.last])
        ctx.save_for_backward(u, *vars(m).values())
        ctx.levels, ctx.cell = levels, cell
        return m.h, m.c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        u, *values = ctx.saved_tensors
        m, levels = _Memory(*values), ctx.levels
        d = _Memory(
            x=torch.zeros_like(m.x),
            z=torch.zeros_like(m.z),
            gates=m.gates,
            h=dh.clone(memory_format=torch.contiguous_format),
            c=dc.clone(memory_format=torch.contiguous_format),
        )
        back = u.t()
        for at in reversed(levels.levels):
            rows = slice(at.first, at.last)
            if at.last < m.h.shape[0]:
                d.h[rows].addmm_(d.z[rows], back)
            ctx.cell.backward(m, d, levels, at)
        return d.x, m.h.t() @ d.z, None, None


def run_levels(
    gates: Tensor, hidden: Tensor, levels: Levels, cell: Any
) -> tuple[Tensor, Tensor]:
    """Return states and memory cells by position, for the inputs' part of the gates
    [nodes, 4 * width] and the matrix of children's rows [width, 4 * width]."""
    found: tuple[Tensor, Tensor] = _Run.apply(gates, hidden, levels, cell)  # type: ignore[no-untyped-call]
    return found


class TreeLSTM(nn.Module):
    """Child-sum TreeLSTM (arXiv 1503.00075, equations 2 to 8)."""

    def __init__(self, in_channels: int, hidden: int) -> None:
        super().__init__()
        self.lin = nn.Linear(in_channels, 4 * hidden)
        """Inputs to the input, output, update and forget gate."""
        self.hidden = nn.Parameter(torch.empty(hidden, 4 * hidden))
        """A child's row to the same."""
        nn.init.orthogonal_(self.hidden)

    @untraced
    def forward(self, g: Graph, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return states and memory cells [nodes, hidden] for x [nodes, in_channels];
        edges lead from children to parents.

        Raises ValueError if there is a cycle, or x has no row for each node.
        """
        if x.shape[:1] != (g.num_nodes(),):
            raise ValueError(
                f"expected x with {g.num_nodes()} node rows, got {list(x.shape)}"
            )
        levels = g.derived(Levels)
        x, dtype = entering(x, self.hidden)
        gates = wide_linear(self.lin, x[levels.order])
        if gates.dtype in HALF:  # under autocast
            dtype = gates.dtype
        # Gates may be narrower than the parameter, and are then computed wide on a CPU.
        gates = wide(gates)
        hidden = self.hidden.to(gates.dtype)
        h, c = run_levels(gates, hidden, levels, _cell(levels, gates))
        return h[levels.position].to(dtype), c[levels.position].to(dtype)

"""The PyTorch back end: runs the inter-operator IR operation by operation.

It is the oracle of every generated kernel (in float64) and the path on a CPU. Every
function here is differentiable by PyTorch, so gradients of the un-optimized program
can be had from autograd, independent of `hector.passes.autodiff`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hector.arrays import GraphArrays
from hector.ir.node import Node, Op, topological
from hector.ir.types import Domain, Index
from hector.precision import index_sum
from hector.runtime.contract import in_order

UNARY: dict[Op, Callable[[Tensor], Tensor]] = {
    Op.NEG: torch.neg,
    Op.EXP: torch.exp,
    Op.LOG: torch.log,
    Op.SQRT: torch.sqrt,
    Op.SIGMOID: torch.sigmoid,
    Op.TANH: torch.tanh,
    Op.RELU: torch.relu,
    Op.ELU: F.elu,
    Op.GELU: F.gelu,
    Op.COS: torch.cos,
    Op.SIN: torch.sin,
    Op.ERF: torch.erf,
    Op.DETACH: torch.detach,
}

BINARY: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    Op.ADD: torch.add,
    Op.SUB: torch.sub,
    Op.MUL: torch.mul,
    Op.DIV: torch.div,
    Op.MAXIMUM: torch.maximum,
    Op.EQ: lambda a, b: (a == b).to(a.dtype),
    Op.GT: lambda a, b: (a > b).to(a.dtype),
}


class Reference:
    """Evaluates nodes against one graph; values are [rows, *shape] tensors."""

    def __init__(self, arrays: GraphArrays, dtype: torch.dtype) -> None:
        self.arrays = arrays
        self.dtype = dtype

    def run(
        self, nodes: Iterable[Node], bindings: Mapping[Node, Tensor]
    ) -> dict[Node, Tensor]:
        """Values of `nodes`. `bindings` gives leaves, and any node already known."""
        nodes = tuple(nodes)
        values: dict[Node, Tensor] = dict(bindings)
        for node in _needed(nodes, values):
            values[node] = self.evaluate(node, [values[i] for i in node.inputs])
        return {n: values[n] for n in nodes}

    def evaluate(self, node: Node, args: list[Tensor]) -> Tensor:
        """One operation on the values of its operands."""
        if node.op in UNARY:
            return UNARY[node.op](args[0])
        if node.op in BINARY:
            return BINARY[node.op](args[0], args[1])
        return _OTHER[node.op](self, node, args)

    def bound(self, node: Node) -> Callable[..., Tensor]:
        """The operation as a function of its operands' values."""
        if node.op is Op.LEAKY_RELU:
            return partial(F.leaky_relu, negative_slope=node.number("slope"))
        if node.op is Op.READ and node.index is not Index.ALL:
            ids = self.arrays.index(node.domain, node.index)
            return lambda rows: rows.index_select(0, ids)
        if node.op is Op.SUM_WIDTH:
            return lambda rows: rows.sum(2, keepdim=True)
        return lambda *args: self.evaluate(node, list(args))

    def _input(self, node: Node, args: list[Tensor]) -> Tensor:
        raise KeyError(f"no tensor is bound to input {node.name!r}")

    def _graph(self, node: Node, args: list[Tensor]) -> Tensor:
        return self.arrays.number(node.name, self.dtype).unsqueeze(-1)

    def _const(self, node: Node, args: list[Tensor]) -> Tensor:
        rows = self.arrays.rows(node.domain)
        device = self.arrays.graph.device
        # Made on the device: a copy from the host would wait for it. A number beyond
        # the dtype becomes infinite, as in PyTorch's arithmetic.
        value = node.number("value")
        full = torch.full((1, 1, 1), value, dtype=torch.float64, device=device)
        return full.to(self.dtype).expand(rows, 1, 1)

    def _read(self, node: Node, args: list[Tensor]) -> Tensor:
        if node.index is Index.ALL:
            return args[0].expand(self.arrays.rows(node.domain), *node.shape)
        return args[0].index_select(0, self.arrays.index(node.domain, node.index))

    def _agg(self, node: Node, args: list[Tensor]) -> Tensor:
        x, domain = args[0], node.inputs[0].domain
        index = self.arrays.index(domain, node.index)
        rows = self.arrays.rows(node.domain)
        if node.attr("reduce") == "sum":
            return index_sum(x, index, rows, self.arrays.longest(domain, node.index))
        out = x.new_zeros(rows, *node.shape)
        where = index.long().view(-1, 1, 1).expand_as(x)
        # Groups without a row stay 0, as in PyG's `scatter`.
        return out.scatter_reduce(0, where, x, "amax", include_self=False)

    def _linear(self, node: Node, args: list[Tensor]) -> Tensor:
        product = self._product(node, args[0], args[1])
        if len(args) == 2:
            return product
        if node.index is Index.ALL:
            return product + args[2]
        kinds = self.arrays.index(node.domain, node.index)
        return product + args[2].index_select(0, kinds)

    def _product(self, node: Node, x: Tensor, w: Tensor) -> Tensor:
        if node.attr("transpose"):
            w = w.transpose(-1, -2)
        w = w.to(x.dtype)
        offsets = self.arrays.type_offsets(node.domain, node.index)
        if len(offsets) == 2:
            return torch.einsum("ehk,hkn->ehn", x, w[0])
        # Split and unbound, gradients are joined once; of slices each would be a whole.
        parts = [
            torch.einsum("ehk,hkn->ehn", rows, matrix)
            for rows, matrix in zip(_parts(x, offsets), w.unbind(), strict=True)
        ]
        return torch.cat(parts)

    def _outer(self, node: Node, args: list[Tensor]) -> Tensor:
        x, y = args
        offsets = self.arrays.type_offsets(node.inputs[0].domain, node.index)
        parts = [
            torch.einsum("ehk,ehn->hkn", rows, others)
            for rows, others in zip(_parts(x, offsets), _parts(y, offsets), strict=True)
        ]
        return torch.stack(parts)

    def _einsum(self, node: Node, args: list[Tensor]) -> Tensor:
        left, right = str(node.attr("equation")).split("->")
        typed = [n.domain is not Domain.GLOBAL for n in node.inputs]
        letters = left.split(",")
        # Z is the type axis; a GLOBAL operand has one row, which is dropped.
        left = ",".join(
            f"Z{s}" if t else s for s, t in zip(letters, typed, strict=True)
        )
        operands = [a if t else a[0] for a, t in zip(args, typed, strict=True)]
        to_type = node.domain is not Domain.GLOBAL
        out = torch.einsum(f"{left}->{'Z' if to_type else ''}{right}", *operands)
        return in_order(out, out.shape if to_type else (1, *out.shape))

    def _leaky_relu(self, node: Node, args: list[Tensor]) -> Tensor:
        return F.leaky_relu(args[0], node.number("slope"))

    def _sum_width(self, node: Node, args: list[Tensor]) -> Tensor:
        return args[0].sum(2, keepdim=True)

    def _sum_heads(self, node: Node, args: list[Tensor]) -> Tensor:
        return args[0].sum(1, keepdim=True)

    def _expand(self, node: Node, args: list[Tensor]) -> Tensor:
        return args[0].expand(args[0].shape[0], *node.shape)

    def _reshape(self, node: Node, args: list[Tensor]) -> Tensor:
        return args[0].reshape(args[0].shape[0], *node.shape)

    def _slice(self, node: Node, args: list[Tensor]) -> Tensor:
        start = node.integer("start")
        return args[0][:, :, start : start + node.shape[1]]

    def _concat(self, node: Node, args: list[Tensor]) -> Tensor:
        return torch.cat(args, 2)


_OTHER: dict[Op, Callable[[Reference, Node, list[Tensor]], Tensor]] = {
    Op.INPUT: Reference._input,
    Op.GRAPH: Reference._graph,
    Op.CONST: Reference._const,
    Op.READ: Reference._read,
    Op.AGG: Reference._agg,
    Op.LINEAR: Reference._linear,
    Op.OUTER: Reference._outer,
    Op.EINSUM: Reference._einsum,
    Op.LEAKY_RELU: Reference._leaky_relu,
    Op.SUM_WIDTH: Reference._sum_width,
    Op.SUM_HEADS: Reference._sum_heads,
    Op.EXPAND: Reference._expand,
    Op.RESHAPE: Reference._reshape,
    Op.SLICE: Reference._slice,
    Op.CONCAT: Reference._concat,
}


def _parts(x: Tensor, offsets: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows of each type."""
    sizes = [b - a for a, b in pairwise(offsets)]
    return torch.split(x[: offsets[-1]], sizes)


def _needed(nodes: Iterable[Node], known: Mapping[Node, Tensor]) -> list[Node]:
    """The unknown nodes that `nodes` need, operands first."""
    needed: dict[Node, None] = {}
    wanted = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in wanted or node in known:
            continue
        wanted.add(node)
        stack.extend(node.inputs)
    for node in topological(nodes):
        if node in wanted:
            needed[node] = None
    return list(needed)

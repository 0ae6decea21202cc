"""Programs on a CPU: the reference back end with its gathers fused.

A sum over edges, or a dot product of an edge's two ends, reads its rows where they lie
(see `hector.runtime.bags`); a typed product gathers the rows of one type at a time.
What a fused operation leaves out is computed only if something else reads it, and
values go when their last reader is done.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hector.arrays import GraphArrays
from hector.ir.node import Node, Op
from hector.ir.types import Domain, Index
from hector.kept import kept
from hector.runtime.bags import Dot, Edges, Read, Total, differentiable
from hector.runtime.reference import BINARY, UNARY, Reference

Run = Callable[[Reference, list[Tensor]], Tensor]
"""Not a closure over the `Host` that keeps it: a cycle would wait for the collector."""


@dataclass(frozen=True)
class _Step:
    node: Node
    operands: tuple[Node, ...]
    run: Run
    last: tuple[Node, ...]
    """Values that no later step reads."""


@dataclass(frozen=True)
class _Rows:
    """Rows of a factor, and by which index edges read them."""

    node: Node
    read: Index | None


class Host(Reference):
    """Evaluates nodes against one graph on a CPU, differentiably in grad mode."""

    def __init__(self, arrays: GraphArrays, dtype: torch.dtype) -> None:
        super().__init__(arrays, dtype)
        self._steps: dict[object, list[_Step]] = {}

    def run(
        self, nodes: Iterable[Node], bindings: Mapping[Node, Tensor]
    ) -> dict[Node, Tensor]:
        """See `Reference.run`."""
        nodes = tuple(nodes)
        key = (nodes, tuple(bindings))
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = self._planned(nodes, set(bindings))
        values = dict(bindings)
        for step in steps:
            values[step.node] = step.run(self, [values[n] for n in step.operands])
            for node in step.last:
                del values[node]
        return {n: values[n] for n in nodes}

    def _planned(self, nodes: tuple[Node, ...], given: set[Node]) -> list[_Step]:
        found: dict[Node, tuple[tuple[Node, ...], Run]] = {}
        done: list[Node] = []
        stack = [(n, False) for n in reversed(nodes)]
        placed = set(given)
        while stack:
            node, ready = stack.pop()
            if node in placed:
                continue
            if ready:
                placed.add(node)
                done.append(node)
                continue
            if node not in found:
                found[node] = self._fused(node, given) or self._plain(node)
            stack.append((node, True))
            stack.extend((n, False) for n in found[node][0] if n not in placed)
        return self._with_ends(done, found, set(nodes))

    @staticmethod
    def _with_ends(
        order: list[Node],
        found: Mapping[Node, tuple[tuple[Node, ...], Run]],
        wanted: set[Node],
    ) -> list[_Step]:
        last: dict[Node, int] = {}
        for i, node in enumerate(order):
            for operand in found[node][0]:
                last[operand] = i
        ends: list[list[Node]] = [[] for _ in order]
        for operand, i in last.items():
            if operand not in wanted:
                ends[i].append(operand)
        return [_Step(n, *found[n], tuple(e)) for n, e in zip(order, ends, strict=True)]

    def _plain(self, node: Node) -> tuple[tuple[Node, ...], Run]:
        function = UNARY.get(node.op) or BINARY.get(node.op)
        if function is not None:
            return node.inputs, lambda _, args: function(*args)
        if node.op is Op.CONST:
            key = ("const", node, self.dtype)
            made = kept(self.arrays.known, key, lambda: self.evaluate(node, []))
            return (), lambda _, args: made
        return node.inputs, lambda host, args: host.evaluate(node, args)

    def _fused(
        self, node: Node, given: set[Node]
    ) -> tuple[tuple[Node, ...], Run] | None:
        if node.op is Op.READ and node.index is not Index.ALL:
            edges, index = Edges(self.arrays, node.domain), node.index
            return node.inputs, lambda _, args: _read(edges, args[0], index)
        if node.op is Op.AGG and node.attr("reduce") == "sum":
            return self._total(node, given)
        if node.op is Op.SUM_WIDTH and node.inputs[0].domain is not Domain.NODE:
            return self._dot(node, given)
        if node.op in (Op.LINEAR, Op.OUTER):
            return self._typed(node, given)
        return None

    def _total(self, node: Node, given: set[Node]) -> tuple[tuple[Node, ...], Run]:
        x, group = node.inputs[0], node.index
        whole, narrow = _factors(x, given)
        if len(whole) != 1 or not narrow:
            whole, narrow = [x], []
        rows = _rows(whole[0], given)
        edges, shape = Edges(self.arrays, x.domain), x.shape

        def run(host: Reference, args: list[Tensor]) -> Tensor:
            first = _shaped(args[0], shape)
            weight = _multiplied(args[1:], narrow)
            if _grows(args):
                made: Tensor = differentiable(
                    Total, edges, first, rows.read, group, weight
                )
                return made
            return edges.total(first, rows.read, group, weight)

        return (rows.node, *(n for n, _ in narrow)), run

    def _dot(self, node: Node, given: set[Node]) -> tuple[tuple[Node, ...], Run] | None:
        x = node.inputs[0]
        whole, narrow = _factors(x, given)
        if len(whole) != 2:
            return None
        a, b = (_rows(n, given) for n in whole)
        edges, shape = Edges(self.arrays, x.domain), x.shape

        def run(host: Reference, args: list[Tensor]) -> Tensor:
            left, right = (_shaped(t, shape) for t in args[:2])
            if _grows(args):
                out: Tensor = differentiable(Dot, edges, left, a.read, right, b.read)
            else:
                out = edges.dot(left, a.read, right, b.read)
            weight = _multiplied(args[2:], narrow)
            return out if weight is None else out * weight

        return (a.node, b.node, *(n for n, _ in narrow)), run

    def _typed(
        self, node: Node, given: set[Node]
    ) -> tuple[tuple[Node, ...], Run] | None:
        """A product whose rows are gathered type by type; in grad mode all at once."""
        sides = 1 if node.op is Op.LINEAR else 2
        rows = [_rows(n, given) for n in node.inputs[:sides]]
        if all(r.read is None for r in rows) or node.inputs[0].shape[0] != 1:
            return None
        domain = node.inputs[0].domain
        edges, shapes = Edges(self.arrays, domain), [n.shape for n in node.inputs]
        offsets = self.arrays.type_offsets(domain, node.index)
        ids = [
            None if r.read is None else self.arrays.index(domain, r.read) for r in rows
        ]

        def run(host: Reference, args: list[Tensor]) -> Tensor:
            flat = [_shaped(t, s) for t, s in zip(args[:sides], shapes, strict=False)]
            if _grows(args):
                there = [
                    t if r.read is None else _read(edges, t, r.read)
                    for t, r in zip(flat, rows, strict=False)
                ]
                return host.evaluate(node, [*there, *args[sides:]])
            parts = []
            for t, (a, b) in enumerate(pairwise(offsets)):
                x = [
                    f[a:b, 0] if i is None else f[:, 0].index_select(0, i[a:b])
                    for f, i in zip(flat, ids, strict=False)
                ]
                if sides == 2:
                    parts.append(x[0].t() @ x[1])
                    continue
                w = args[1][t, 0].to(x[0].dtype)
                w = w.t() if node.attr("transpose") else w
                bias = args[2][t].view(1, -1) if len(args) > 2 else None
                parts.append(x[0] @ w if bias is None else torch.addmm(bias, x[0], w))
            out = torch.stack(parts) if sides == 2 else torch.cat(parts)
            return out.unsqueeze(1)

        return (*(r.node for r in rows), *node.inputs[sides:]), run


def _read(edges: Edges, rows: Tensor, index: Index) -> Tensor:
    if _grows([rows]):
        made: Tensor = differentiable(Read, edges, rows, index)
        return made
    return edges.at(rows, index)


def _shaped(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    return rows.reshape(rows.shape[0], *shape)


def _grows(args: Iterable[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in args)


def _factors(x: Node, given: set[Node]) -> tuple[list[Node], list[tuple[Node, bool]]]:
    """Factors of `x` with its whole rows, and with a number a head: those that divide
    are marked. Nothing where there are others."""
    whole: list[Node] = []
    narrow: list[tuple[Node, bool]] = []
    left = [(x, False)]
    while left:
        node, divides = left.pop()
        if node.shape != x.shape:
            if node.shape not in ((1, 1), (x.shape[0], 1)):
                return [], []
            narrow.append((node, divides))
        elif node.op is Op.MUL and node not in given:
            left += [(n, divides) for n in reversed(node.inputs)]
        elif node.op is Op.DIV and node not in given and not divides:
            left += [(node.inputs[1], True), (node.inputs[0], False)]
        elif divides:
            return [], []
        else:
            whole.append(node)
    return whole, narrow


def _rows(x: Node, given: set[Node]) -> _Rows:
    """Where the rows of a factor lie."""
    base = x
    while base.op is Op.RESHAPE and base not in given:
        base = base.inputs[0]
    if base.op is Op.READ and base.index is not Index.ALL and base not in given:
        return _Rows(base.inputs[0], base.index)
    return _Rows(x, None)


def _multiplied(args: list[Tensor], narrow: list[tuple[Node, bool]]) -> Tensor | None:
    out: Tensor | None = None
    for value, (_, divides) in zip(args, narrow, strict=True):
        if divides:
            out = value.reciprocal() if out is None else out / value
        else:
            out = value if out is None else out * value
    return out

"""Programs on a CPU: the reference back end with its gathers fused.

A sum over edges, or a dot product of an edge's two ends, reads its rows where they lie
(see `hector.runtime.bags`), term by term where messages are sums of products; a typed
product gathers its rows a few at a time. What a fused operation leaves out is computed
only if something else reads it, and values go when their last reader is done.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hector.arrays import GraphArrays
from hector.ir.node import Node, Op, stored, topological
from hector.ir.types import Domain, Index
from hector.kept import kept
from hector.runtime.bags import CHUNK, EdgeRows
from hector.runtime.reference import BINARY, UNARY, Reference

Run = Callable[..., Tensor]
"""Makes a value of those of its operands. Not a closure over the `Host` that keeps it:
a cycle would wait for the collector."""


_COMPARED: dict[Op, Run] = {
    Op.EQ: lambda a, b: torch.eq(a, b, out=a.new_empty(0)),
    Op.GT: lambda a, b: torch.gt(a, b, out=a.new_empty(0)),
}
"""Into numbers at once."""


class _Step(NamedTuple):
    node: Node
    operands: tuple[Node, ...]
    run: Run
    last: tuple[Node, ...]
    """Values that no later step reads."""


class _Rows(NamedTuple):
    """Rows of a factor, and by which index edges read them."""

    node: Node
    read: Index | None


class _Term(NamedTuple):
    """A product of whole rows and of numbers a head."""

    whole: tuple[Node, ...]
    narrow: tuple[tuple[Node, bool], ...]
    """Those that divide are marked."""

    def weight(self, numbers: Sequence[Tensor]) -> Tensor | None:
        """The product of the numbers."""
        out: Tensor | None = None
        for value, (_, divides) in zip(numbers, self.narrow, strict=True):
            if divides:
                out = value.reciprocal() if out is None else out / value
            else:
                out = value if out is None else out * value
        return out


class Host(Reference):
    """Evaluates nodes against one graph on a CPU, without gradients."""

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
            steps = self._steps[key] = self.planned(nodes, set(bindings))
        values = dict(bindings)
        get = values.__getitem__
        for node, operands, run, last in steps:
            values[node] = run(*map(get, operands))
            for done in last:
                del values[done]
        return {n: values[n] for n in nodes}

    def planned(self, nodes: tuple[Node, ...], given: set[Node]) -> list[_Step]:
        """The operations that make `nodes` of what is given, in their order."""
        found: dict[Node, tuple[tuple[Node, ...], Run]] = {}
        done: list[Node] = []
        stack = [(n, False) for n in reversed(nodes)]
        placed = set(given)
        decided = _decided(nodes).difference(map(stored, nodes))
        while stack:
            node, ready = stack.pop()
            if node in placed:
                continue
            if ready:
                placed.add(node)
                done.append(node)
                continue
            if node not in found:
                found[node] = (
                    (self._kept(node) if node in decided else None)
                    or self._fused(node, given)
                    or self._plain(node)
                )
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

    def _kept(self, node: Node) -> tuple[tuple[Node, ...], Run] | None:
        """What the graph alone decides, if it is a number a row: made once, and the
        caller's to read."""
        if node.type.width > 1:
            return None
        plain = Reference(self.arrays, self.dtype)
        key = ("decided", node, self.dtype)
        made = kept(self.arrays.known, key, lambda: plain.run([node], {})[node])
        return (), lambda: made

    def _plain(self, node: Node) -> tuple[tuple[Node, ...], Run]:
        run: Run | None = _COMPARED.get(node.op)
        run = run or UNARY.get(node.op) or BINARY.get(node.op)
        if run is None:
            run = Reference(self.arrays, self.dtype).bound(node)
        return node.inputs, run

    def _fused(
        self, node: Node, given: set[Node]
    ) -> tuple[tuple[Node, ...], Run] | None:
        if node.op is Op.AGG and node.attr("reduce") == "sum":
            return self._total(node, given)
        if node.op is Op.AGG:
            edges, group = EdgeRows(self.arrays, node.inputs[0].domain), node.index
            return node.inputs, lambda rows: edges.largest(rows, group)
        if node.op is Op.SUM_WIDTH and node.inputs[0].domain is not Domain.NODE:
            return self._dot(node, given)
        if node.op in (Op.LINEAR, Op.OUTER):
            return self._typed(node, given)
        return _leaky_slope(node, given) if node.op is Op.MUL else None

    def _total(self, node: Node, given: set[Node]) -> tuple[tuple[Node, ...], Run]:
        x, group = node.inputs[0], node.index
        edges, shape = EdgeRows(self.arrays, x.domain), x.shape

        def total(term: _Term, read: Index | None) -> Run:
            if group is Index.ALL:
                return lambda rows, *numbers: edges.total(
                    _shaped(rows, shape), read, group, term.weight(numbers)
                )
            # Asked for once: of a small graph questions take as long as sums.
            heads = max((n.shape[0] for n, _ in term.narrow), default=1)
            bags = edges.bags(group, read, heads)
            return lambda rows, *numbers: bags.total(
                rows, shape, heads, term.weight(numbers)
            )

        return _summed(_terms_of(x, given), given, total)

    def _dot(self, node: Node, given: set[Node]) -> tuple[tuple[Node, ...], Run] | None:
        x = node.inputs[0]
        terms = _terms(x, given)
        if any(len(t.whole) != 2 for t in terms):
            return None
        edges, shape = EdgeRows(self.arrays, x.domain), x.shape

        def dot(term: _Term, read: Index | None, other: Index | None) -> Run:
            if edges.is_small() and not term.narrow:
                small = edges.small_dot(shape, read, other)
                return lambda a, b: small(_shaped(a, shape), _shaped(b, shape))

            def run(left: Tensor, right: Tensor, *numbers: Tensor) -> Tensor:
                left, right = _shaped(left, shape), _shaped(right, shape)
                out, weight = edges.dot(left, read, right, other), term.weight(numbers)
                return out if weight is None else out.mul_(weight)

            return run

        return _summed(terms, given, dot)

    def _typed(self, node: Node, given: set[Node]) -> tuple[tuple[Node, ...], Run]:
        """A typed product, or the gradient of its weight, whose rows are gathered and
        weighed a few at a time."""
        sides = 1 if node.op is Op.LINEAR else 2
        rows = [_Factor(self.arrays, n, given) for n in node.inputs[:sides]]
        operands = (*(o for r in rows for o in r.operands), *node.inputs[sides:])
        offsets = self.arrays.type_offsets(node.inputs[0].domain, node.index)
        step = CHUNK if any(r.gathers for r in rows) else max(offsets[-1], 1)
        cuts = [
            (t, i, min(i + step, b))
            for t, (a, b) in enumerate(pairwise(offsets))
            for i in range(a, b, step)
        ]
        heads = node.inputs[0].shape[0]
        flipped = node.op is Op.LINEAR and bool(node.attr("transpose"))

        def linear(*args: Tensor) -> Tensor:
            parts, (w, *bias) = rows[0].bound(args), args[rows[0].size :]
            w = w.transpose(-1, -2) if flipped else w
            out = w.new_empty(offsets[-1], heads, w.shape[-1])
            for t, i, j in cuts:
                x, place = rows[0].part(parts, i, j), out[i:j]
                if heads == 1:
                    torch.mm(x[:, 0], w[t, 0], out=place[:, 0])
                else:
                    place.copy_((x.transpose(0, 1) @ w[t]).transpose(0, 1))
                if bias:
                    place += bias[0][t]
            return out

        def outer(*args: Tensor) -> Tensor:
            left = rows[0].bound(args)
            right = rows[1].bound(args[rows[0].size :])
            out = args[0].new_zeros(len(offsets) - 1, heads, *(r.width for r in rows))
            for t, i, j in cuts:
                x, y = rows[0].part(left, i, j), rows[1].part(right, i, j)
                if heads == 1:
                    out[t, 0].addmm_(x[:, 0].t(), y[:, 0])
                else:
                    out[t].baddbmm_(x.permute(1, 2, 0), y.transpose(0, 1))
            return out

        return operands, linear if sides == 1 else outer


def _leaky_slope(node: Node, given: set[Node]) -> tuple[tuple[Node, ...], Run] | None:
    """A product with the slope of a leaky ReLU, (x > 0) * (1 - slope) + slope, as the
    one operation that PyTorch has for it."""
    for x, factor in (node.inputs, node.inputs[::-1]):
        match factor:
            case Node(
                op=Op.ADD,
                inputs=(
                    Node(
                        op=Op.MUL,
                        inputs=(
                            Node(op=Op.GT, inputs=(of, Node(op=Op.CONST) as zero)),
                            Node(op=Op.CONST) as rest,
                        ),
                    ),
                    Node(op=Op.CONST) as slope,
                ),
            ) if factor not in given and x.type == of.type:
                part = slope.number("value")
                plain = zero.number("value") == 0 and rest.number("value") == 1 - part
                if plain:
                    return (x, of), partial(_slope_times, slope=part)
    return None


_LEAKY_BACKWARD = torch.ops.aten.leaky_relu_backward.default


def _slope_times(x: Tensor, of: Tensor, slope: float) -> Tensor:
    found: Tensor = _LEAKY_BACKWARD(x, of, slope, False)
    return found


class _Factor:
    """The rows of a product's operand, a part at a time."""

    def __init__(self, arrays: GraphArrays, node: Node, given: set[Node]) -> None:
        self.shape, self.width = node.shape, node.shape[1]
        base = node
        while base.op is Op.RESHAPE and base not in given:
            base = base.inputs[0]
        self._inner = base.shape
        self.terms = _terms_of(base, given)
        self._reads = [_rows(t.whole[0], given) for t in self.terms]
        self.operands = tuple(
            o
            for t, r in zip(self.terms, self._reads, strict=True)
            for o in (r.node, *(n for n, _ in t.narrow))
        )
        self.size = len(self.operands)
        self._ids = [
            None if r.read is None else arrays.index(base.domain, r.read)
            for r in self._reads
        ]
        self.gathers = any(t.narrow for t in self.terms) or any(
            i is not None for i in self._ids
        )

    def bound(self, args: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Rows and weight of each term."""
        found, at = [], 0
        for term in self.terms:
            mine = args[at : at + 1 + len(term.narrow)]
            found.append((_shaped(mine[0], self._inner), term.weight(mine[1:])))
            at += len(mine)
        return found

    def part(self, bound: list[tuple[Tensor, Tensor | None]], i: int, j: int) -> Tensor:
        """The rows from `i` to `j`: [j - i, heads, width]."""
        out: Tensor | None = None
        for (rows, weight), ids in zip(bound, self._ids, strict=True):
            x = rows[i:j] if ids is None else rows.index_select(0, ids[i:j])
            x = x if weight is None else x * weight[i:j]
            out = x if out is None else out + x
        return _shaped(_made(out), self.shape)


def _summed(
    terms: Sequence[_Term], given: set[Node], make: Callable[..., Run]
) -> tuple[tuple[Node, ...], Run]:
    """The sum of what each term's function, made by `make` of it and its indices, makes
    of the term's values."""
    operands: list[Node] = []
    calls: list[tuple[Run, int, int]] = []
    for term in terms:
        rows = [_rows(n, given) for n in term.whole]
        begin = len(operands)
        operands += [r.node for r in rows] + [n for n, _ in term.narrow]
        calls.append((make(term, *(r.read for r in rows)), begin, len(operands)))
    if len(calls) == 1:
        return tuple(operands), calls[0][0]

    def run(*args: Tensor) -> Tensor:
        out: Tensor | None = None
        for call, begin, end in calls:
            made = call(*args[begin:end])
            out = made if out is None else out.add_(made)
        return _made(out)

    return tuple(operands), run


def _made(out: Tensor | None) -> Tensor:
    if out is None:
        raise ValueError("expected a sum of at least one term")
    return out


def _decided(nodes: Iterable[Node]) -> set[Node]:
    """What the graph alone decides."""
    found: set[Node] = set()
    for node in topological(nodes):
        leaf = node.op in (Op.CONST, Op.GRAPH)
        if found.issuperset(node.inputs) if node.inputs else leaf:
            found.add(node)
    return found


def _shaped(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    return rows if rows.shape[1:] == shape else rows.reshape(rows.shape[0], *shape)


MAX_TERMS = 6
"""A sum of more products is made as it is written."""


def _terms_of(x: Node, given: set[Node]) -> tuple[_Term, ...]:
    """`x` as a sum of rows times numbers; itself where that leaves nothing out."""
    terms = _terms(x, given)
    fused = any(t.narrow or _rows(t.whole[0], given).read for t in terms if t.whole)
    if not fused or any(len(t.whole) != 1 for t in terms):
        return (_Term((x,), ()),)
    return terms


def _terms(x: Node, given: set[Node]) -> tuple[_Term, ...]:
    """`x` as a sum of products, in whole rows of its shape and numbers a head. Rows of
    one column are left as they are."""
    found = _expanded(x, x.shape, given) if x.shape[1] > 1 else ()
    return found if 0 < len(found) <= MAX_TERMS else (_Term((x,), ()),)


def _expanded(
    node: Node, shape: tuple[int, ...], given: set[Node]
) -> tuple[_Term, ...]:
    """Differences stay as they are: sums of large numbers would cancel."""
    alone = (_Term((node,), ()),)
    if node in given or node.op not in (Op.MUL, Op.DIV, Op.ADD):
        return alone
    sides: list[tuple[_Term, ...]] = []
    for place, i in enumerate(node.inputs):
        if i.shape == shape:
            sides.append(_expanded(i, shape, given))
        elif node.op is Op.ADD or i.shape not in ((1, 1), (shape[0], 1)):
            return alone
        else:
            sides.append((_Term((), ((i, node.op is Op.DIV and place == 1),)),))
    left, right = sides
    if node.op is Op.ADD:
        terms = left + right
        return alone if any(map(_negative, terms)) else terms
    if node.op is Op.DIV and (right[0].whole or not left[0].whole):
        return alone
    return tuple(
        _Term(a.whole + b.whole, a.narrow + b.narrow) for a in left for b in right
    )


def _negative(term: _Term) -> bool:
    factors = (*term.whole, *(n for n, _ in term.narrow))
    return any(
        n.op is Op.NEG or (n.op is Op.CONST and n.number("value") < 0) for n in factors
    )


def _rows(x: Node, given: set[Node]) -> _Rows:
    """Where the rows of a factor lie."""
    base = x
    while base.op is Op.RESHAPE and base not in given:
        base = base.inputs[0]
    if base.op is Op.READ and base.index is not Index.ALL and base not in given:
        return _Rows(base.inputs[0], base.index)
    return _Rows(x, None)

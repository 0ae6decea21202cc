"""Reverse-mode differentiation at the inter-operator level (Wu, section 3.3.5).

Gradient rules are a table from operation to function. Only gradients that the wanted
inputs need are ever built: a node that no wanted input reaches gets none, which is the
seed's removal of unused gradients done before they exist.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from hector.ir.builder import Builder
from hector.ir.node import Node, Op, topological
from hector.ir.types import TYPE_DOMAINS

Grads = list[Node | None]
Rule = Callable[[Builder, Node, Node], Grads]


def differentiate(
    b: Builder, outputs: Sequence[tuple[Node, Node]], wanted: Iterable[Node]
) -> dict[Node, Node]:
    """Gradients of `wanted` given those of the outputs, as (output, gradient)."""
    # In the caller's order: the generated text must not differ from run to run.
    wanted = dict.fromkeys(wanted)
    order = topological(n for n, _ in outputs)
    reached = _reached(order, set(wanted))
    grads: dict[Node, Node] = {}
    for node, given in outputs:
        _accumulate(b, grads, node, given)
    for node in reversed(order):
        grad = grads.get(node)
        if grad is None or not node.inputs or node not in reached:
            continue
        for operand, part in zip(
            node.inputs, RULES[node.op](b, node, grad), strict=True
        ):
            if part is not None and operand in reached:
                _accumulate(b, grads, operand, part)
    return {n: grads[n] for n in wanted if n in grads}


def _reached(order: list[Node], wanted: set[Node]) -> set[Node]:
    """Nodes whose value depends on a wanted input through differentiable steps."""
    reached = set(wanted)
    for node in order:
        if node.op in (Op.DETACH, Op.EQ, Op.GT):
            continue
        if any(i in reached for i in node.inputs):
            reached.add(node)
    return reached


def _accumulate(b: Builder, grads: dict[Node, Node], node: Node, part: Node) -> None:
    if part.shape != node.shape:
        raise ValueError(f"gradient {part.type} does not fit {node}")
    known = grads.get(node)
    grads[node] = part if known is None else _sum(b, known, part)


def _sum(b: Builder, x: Node, y: Node) -> Node:
    if x.domain in TYPE_DOMAINS and len(x.shape) == 3:
        return b.binary(Op.ADD, x, y)
    return b.add(x, y)


def _fit(b: Builder, grad: Node, node: Node) -> Node:
    """Adjoint of broadcasting a row: sums the axes that were stretched."""
    if len(node.shape) == 2:
        if node.shape[1] == 1 and grad.shape[1] != 1:
            grad = b.sum_width(grad)
        if node.shape[0] == 1 and grad.shape[0] != 1:
            grad = b.sum_heads(grad)
    return grad


def _read(b: Builder, n: Node, g: Node) -> Grads:
    return [b.agg(g, n.index)]


def _agg(b: Builder, n: Node, g: Node) -> Grads:
    (x,) = n.inputs
    back = b.read(g, n.index, x.domain)
    if n.attr("reduce") == "sum":
        return [back]
    # The gradient of a maximum is shared evenly by the rows that reach it.
    hit = b.binary(Op.EQ, x, b.read(n, n.index, x.domain))
    ties = b.read(b.agg(hit, n.index), n.index, x.domain)
    return [b.div(b.mul(back, hit), ties)]


def _linear(b: Builder, n: Node, g: Node) -> Grads:
    x, w = n.inputs
    flipped = bool(n.attr("transpose"))
    dw = b.outer(g, x, w.domain) if flipped else b.outer(x, g, w.domain)
    return [b.linear(g, w, transpose=not flipped), dw]


def _outer(b: Builder, n: Node, g: Node) -> Grads:
    x, y = n.inputs
    return [b.linear(y, g, transpose=True), b.linear(x, g)]


def _einsum(b: Builder, n: Node, g: Node) -> Grads:
    left, right = str(n.attr("equation")).split("->")
    letters = left.split(",")
    grads: Grads = []
    for i, (mine, node) in enumerate(zip(letters, n.inputs, strict=True)):
        others = [o for j, o in enumerate(n.inputs) if j != i]
        names = [s for j, s in enumerate(letters) if j != i]
        eq = f"{','.join([right, *names])}->{mine}"
        grads.append(b.contract(eq, (g, *others), node.domain))
    return grads


def _add(b: Builder, n: Node, g: Node) -> Grads:
    return [_fit(b, g, n.inputs[0]), _fit(b, g, n.inputs[1])]


def _sub(b: Builder, n: Node, g: Node) -> Grads:
    return [_fit(b, g, n.inputs[0]), _fit(b, b.unary(Op.NEG, g), n.inputs[1])]


def _mul(b: Builder, n: Node, g: Node) -> Grads:
    x, y = n.inputs
    return [_fit(b, b.mul(g, y), x), _fit(b, b.mul(g, x), y)]


def _div(b: Builder, n: Node, g: Node) -> Grads:
    x, y = n.inputs
    scaled = b.div(g, y)
    return [_fit(b, scaled, x), _fit(b, b.unary(Op.NEG, b.mul(scaled, n)), y)]


def _maximum(b: Builder, n: Node, g: Node) -> Grads:
    x, y = n.inputs
    left = b.binary(Op.GT, x, y)
    half = b.mul(b.binary(Op.EQ, x, y), b.const(0.5))
    take_x = b.add(left, half)
    take_y = b.sub(b.const(1.0), take_x)
    return [_fit(b, b.mul(g, take_x), x), _fit(b, b.mul(g, take_y), y)]


def _nothing(b: Builder, n: Node, g: Node) -> Grads:
    return [None] * len(n.inputs)


def _positive(b: Builder, x: Node) -> Node:
    return b.binary(Op.GT, x, b.const(0.0))


def _leaky(b: Builder, n: Node, g: Node) -> Grads:
    slope = n.number("slope")
    gate = b.add(b.mul(_positive(b, n.inputs[0]), b.const(1 - slope)), b.const(slope))
    return [b.mul(g, gate)]


def _elu(b: Builder, n: Node, g: Node) -> Grads:
    # 1 where x > 0, else exp(x), of which elu(x) + 1 has lost the last digits.
    below = b.unary(Op.RELU, b.unary(Op.NEG, n.inputs[0]))
    return [b.mul(g, b.unary(Op.EXP, b.unary(Op.NEG, below)))]


def _gelu(b: Builder, n: Node, g: Node) -> Grads:
    (x,) = n.inputs
    erf = b.unary(Op.ERF, b.mul(x, b.const(math.sqrt(0.5))))
    cdf = b.mul(b.add(erf, b.const(1.0)), b.const(0.5))
    bell = b.unary(Op.EXP, b.mul(b.mul(x, x), b.const(-0.5)))
    pdf = b.mul(bell, b.const(1.0 / math.sqrt(2 * math.pi)))
    return [b.mul(g, b.add(cdf, b.mul(x, pdf)))]


def _sigmoid(b: Builder, n: Node, g: Node) -> Grads:
    return [b.mul(g, b.mul(n, b.sub(b.const(1.0), n)))]


def _tanh(b: Builder, n: Node, g: Node) -> Grads:
    return [b.mul(g, b.sub(b.const(1.0), b.mul(n, n)))]


def _cos(b: Builder, n: Node, g: Node) -> Grads:
    return [b.unary(Op.NEG, b.mul(g, b.unary(Op.SIN, n.inputs[0])))]


def _erf(b: Builder, n: Node, g: Node) -> Grads:
    (x,) = n.inputs
    bell = b.unary(Op.EXP, b.unary(Op.NEG, b.mul(x, x)))
    return [b.mul(g, b.mul(bell, b.const(2.0 / math.sqrt(math.pi))))]


def _stretch(b: Builder, n: Node, g: Node) -> Grads:
    """Adjoint of a sum within the row: the gradient, broadcast."""
    return [b.expand(g, n.inputs[0].shape)]


def _reshape(b: Builder, n: Node, g: Node) -> Grads:
    return [b.reshape(g, n.inputs[0].shape)]


def _slice(b: Builder, n: Node, g: Node) -> Grads:
    (x,) = n.inputs
    start, length = n.integer("start"), n.shape[1]
    heads, width = x.shape
    if start:
        g = b.concat(b.full(0.0, x.domain, (heads, start)), g)
    if start + length < width:
        g = b.concat(g, b.full(0.0, x.domain, (heads, width - start - length)))
    return [g]


def _concat(b: Builder, n: Node, g: Node) -> Grads:
    x, y = n.inputs
    return [b.slice(g, 0, x.shape[1]), b.slice(g, x.shape[1], y.shape[1])]


RULES: dict[Op, Rule] = {
    Op.READ: _read,
    Op.AGG: _agg,
    Op.LINEAR: _linear,
    Op.OUTER: _outer,
    Op.EINSUM: _einsum,
    Op.ADD: _add,
    Op.SUB: _sub,
    Op.MUL: _mul,
    Op.DIV: _div,
    Op.MAXIMUM: _maximum,
    Op.EQ: _nothing,
    Op.GT: _nothing,
    Op.DETACH: _nothing,
    Op.NEG: lambda b, n, g: [b.unary(Op.NEG, g)],
    Op.EXP: lambda b, n, g: [b.mul(g, n)],
    Op.LOG: lambda b, n, g: [b.div(g, n.inputs[0])],
    Op.SQRT: lambda b, n, g: [b.div(b.mul(g, b.const(0.5)), n)],
    Op.SIGMOID: _sigmoid,
    Op.TANH: _tanh,
    Op.RELU: lambda b, n, g: [b.mul(g, _positive(b, n.inputs[0]))],
    Op.LEAKY_RELU: _leaky,
    Op.ELU: _elu,
    Op.GELU: _gelu,
    Op.COS: _cos,
    Op.SIN: lambda b, n, g: [b.mul(g, b.unary(Op.COS, n.inputs[0]))],
    Op.ERF: _erf,
    Op.SUM_WIDTH: _stretch,
    Op.SUM_HEADS: _stretch,
    Op.EXPAND: lambda b, n, g: [_fit(b, g, n.inputs[0])],
    Op.RESHAPE: _reshape,
    Op.SLICE: _slice,
    Op.CONCAT: _concat,
}

"""Every rewrite rule on the expression that it is for, on ones that it must leave, and
in its list: a rule that is lost or never fires is slower code, which no comparison of
values notices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hector.arrays import GraphArrays
from hector.graph import HeteroGraph
from hector.ir.builder import Builder
from hector.ir.node import Node, Op, topological
from hector.ir.types import Domain, Index
from hector.passes import canonicalize, finish, optimize
from hector.passes.pipeline import Optimizations, passes
from hector.passes.rewrite import Rule
from hector.runtime.reference import Reference

EDGE, NODE, SRC, DST = Domain.EDGE, Domain.NODE, Index.SRC, Index.DST
W = 4
G = HeteroGraph.from_arrays(
    [0, 1, 2, 3, 3, 0, 2], [1, 2, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 2, 2], num_nodes=5
)


class Made:
    """A builder with the values that layers begin with."""

    def __init__(self) -> None:
        self.b = b = Builder()
        self.x = b.input("x", NODE, (1, W))
        self.h = b.input("h", NODE, (2, W))
        self.s = b.input("s", NODE, (1, 1))
        self.e = b.input("e", EDGE, (1, W))
        self.k = b.input("k", EDGE, (1, 1))
        self.k2 = b.input("k2", EDGE, (2, 1))
        self.w = b.input("w", Domain.ETYPE, (1, W, W))
        self.w2 = b.input("w2", Domain.ETYPE, (1, W, W))
        self.wide = b.input("wide", Domain.ETYPE, (1, W, 2 * W))
        self.heads = b.input("heads", Domain.ETYPE, (2, W, 3))
        self.v = b.input("v", Domain.ETYPE, (1, W))
        self.v2 = b.input("v2", Domain.ETYPE, (2, W))
        self.shared = b.input("shared", Domain.GLOBAL, (1, W, W))
        self.bias = b.input("bias", Domain.ETYPE, (1, W))
        self.row = b.input("row", Domain.ETYPE, (1, 1, W))
        self.xs, self.xd = (b.read(self.x, i, EDGE) for i in (SRC, DST))
        self.hs = b.read(self.h, SRC, EDGE)
        self.ss, self.sd = (b.read(self.s, i, EDGE) for i in (SRC, DST))

        self.infinite = b.read(b.unary(Op.LOG, self.s), DST, EDGE)

    def on_edges(self, parameter: Node) -> Node:
        return self.b.spread(parameter, EDGE)


Case = tuple[Rule, Callable[[Made], Node], str]
c, o, f = canonicalize, optimize, finish


def expression(n: Node) -> str:
    """Nested text without serial numbers."""
    if n.op is Op.INPUT:
        return n.name
    if n.op is Op.CONST:
        return f"{n.number('value'):g}"
    attrs = [str(getattr(v, "value", v)) for k, v in n.attrs if k != "transpose"]
    attrs += ["T"] if dict(n.attrs).get("transpose") else []
    inner = ", ".join(map(expression, n.inputs))
    return f"{'.'.join([n.op.value, *attrs])}({inner})"


def soft(m: Made) -> Node:
    power = m.b.unary(Op.EXP, m.k)
    return m.b.div(power, m.b.read(m.b.agg(power, DST), DST, EDGE))


CASES: list[Case] = [
    (
        c.compose_reads,
        lambda m: m.b.read(
            m.b.read(m.x, Index.PAIR_NODE, Domain.SRC_PAIR), Index.SRC_PAIR, EDGE
        ),
        "read.src(x)",
    ),
    (
        c.compose_reads,
        lambda m: m.b.read(m.b.expand(m.s, (1, W)), SRC, EDGE),
        "expand(read.src(s))",
    ),
    (
        c.sink_reshape,
        lambda m: m.b.reshape(m.hs, (1, 2 * W)),
        "read.src(reshape(h))",
    ),
    (
        c.sink_reshape,
        lambda m: m.b.reshape(m.b.unary(Op.TANH, m.e), (2, 2)),
        "tanh(reshape(e))",
    ),
    (
        c.float_reshape,
        lambda m: m.b.unary(Op.TANH, m.b.reshape(m.b.linear(m.hs, m.heads), (1, 6))),
        "reshape(tanh(linear.etype(read.src(h), heads)))",
    ),
    (
        c.stable_softmax,
        soft,
        "div(exp(sub(k, read.dst(detach(agg.dst.max(k))))), read.dst(add(agg.dst.sum("
        "exp(sub(k, read.dst(detach(agg.dst.max(k)))))), 1e-16)))",
    ),
    (c.identities, lambda m: m.b.add(m.x, m.b.const(0.0)), "x"),
    (c.identities, lambda m: m.b.sub(m.x, m.b.const(0.0)), "x"),
    (c.identities, lambda m: m.b.mul(m.b.const(1.0), m.x), "x"),
    (c.identities, lambda m: m.b.div(m.x, m.b.const(1.0)), "x"),
    (c.identities, lambda m: m.b.unary(Op.NEG, m.b.unary(Op.NEG, m.x)), "x"),
    (c.hoist, lambda m: m.b.unary(Op.TANH, m.xs), "read.src(tanh(x))"),
    (c.hoist, lambda m: m.b.mul(m.xd, m.sd), "read.dst(mul(x, s))"),
    (c.hoist, lambda m: m.b.sum_width(m.xs), "read.src(sum_width(x))"),
    (
        c.hoist_linear,
        lambda m: m.b.linear(m.xs, m.shared),
        "read.src(linear.all(x, shared))",
    ),
    (
        c.factor_out,
        lambda m: m.b.agg(m.b.mul(m.e, m.sd), DST),
        "mul(agg.dst.sum(e), s)",
    ),
    (
        c.factor_out,
        lambda m: m.b.agg(m.b.mul(m.sd, m.e), DST),
        "mul(agg.dst.sum(e), s)",
    ),
    (
        c.factor_out,
        lambda m: m.b.agg(m.b.div(m.e, m.b.const(3.0)), DST),
        "div(agg.dst.sum(e), 3)",
    ),
    (
        c.factor_out,
        lambda m: m.b.agg(m.b.unary(Op.NEG, m.e), DST),
        "neg(agg.dst.sum(e))",
    ),
    (
        c.factor_out,
        lambda m: m.b.agg(m.b.mul(m.b.mul(m.e, m.sd), m.k), DST),
        "agg.dst.sum(mul(mul(e, k), read.dst(s)))",
    ),
    (
        c.scale_outside_sum,
        lambda m: m.b.sum_width(m.b.mul(m.e, m.k)),
        "mul(sum_width(e), k)",
    ),
    (
        c.scale_outside_sum,
        lambda m: m.b.sum_width(m.b.concat(m.x, m.s)),
        "add(sum_width(x), s)",
    ),
    (
        c.scale_outside_sum,
        lambda m: m.b.sum_width(m.b.expand(m.s, (1, W))),
        "mul(s, 4)",
    ),
    (c.reciprocal, lambda m: m.b.div(m.e, m.k), "mul(e, div(1, k))"),
    (
        c.split_concat,
        lambda m: m.b.unary(Op.TANH, m.b.concat(m.x, m.s)),
        "concat(tanh(slice.0(concat(x, s))), tanh(slice.4(concat(x, s))))",
    ),
    (
        c.move_concat,
        lambda m: m.b.agg(m.b.concat(m.e, m.k), DST),
        "concat(agg.dst.sum(e), agg.dst.sum(k))",
    ),
    (
        c.move_concat,
        lambda m: m.b.read(m.b.concat(m.x, m.s), SRC, EDGE),
        "concat(read.src(x), read.src(s))",
    ),
    (c.sink_slice, lambda m: m.b.slice(m.b.concat(m.x, m.s), W, 1), "s"),
    (
        c.sink_slice,
        lambda m: m.b.slice(m.b.unary(Op.TANH, m.x), 1, 2),
        "tanh(slice.1(x))",
    ),
    (c.sink_slice, lambda m: m.b.slice(m.xs, 1, 2), "read.src(slice.1(x))"),
    (
        o.merge_linears,
        lambda m: m.b.linear(m.b.linear(m.xs, m.w), m.w2),
        "linear.etype(read.src(x), einsum.hkn,hnm->hkm(w, w2))",
    ),
    (
        o.merge_linears,
        lambda m: m.b.linear(m.b.reshape(m.b.linear(m.xs, m.wide), (2, W)), m.heads),
        "reshape(linear.etype(read.src(x), reshape(einsum.khd,hdm->khm(reshape(wide), "
        "heads))))",
    ),
    (
        o.fold_vector,
        lambda m: m.b.sum_width(m.b.mul(m.b.linear(m.xs, m.w), m.on_edges(m.v))),
        "linear.etype(read.src(x), reshape(einsum.hkn,hn->hk(w, v)))",
    ),
    (
        o.fold_vector,
        lambda m: m.b.sum_width(
            m.b.mul(m.b.reshape(m.b.linear(m.xs, m.wide), (2, W)), m.on_edges(m.v2))
        ),
        "reshape(linear.etype(read.src(x), reshape(einsum.khd,hd->kh(reshape(wide), "
        "v2))))",
    ),
    (
        o.swap_sides,
        lambda m: m.b.sum_width(m.b.mul(m.b.linear(m.xs, m.w), m.xd)),
        "sum_width(mul(linear.etype.T(read.dst(x), w), read.src(x)))",
    ),
    (
        o.swap_sides,
        lambda m: m.b.sum_width(m.b.mul(m.xd, m.b.linear(m.xs, m.w, transpose=True))),
        "sum_width(mul(linear.etype(read.dst(x), w), read.src(x)))",
    ),
    (
        o.sum_before_linear,
        lambda m: m.b.agg(m.b.linear(m.xs, m.w), DST),
        "agg.node.sum(linear.etype(agg.dst_pair.sum(read.src(x)), w))",
    ),
    (
        o.sum_before_linear,
        lambda m: m.b.agg(m.b.mul(m.b.linear(m.xs, m.w), m.k), DST),
        "agg.node.sum(linear.etype(agg.dst_pair.sum(mul(read.src(x), k)), w))",
    ),
    (
        o.compact,
        lambda m: m.b.linear(m.xs, m.w),
        "read.src_pair(linear.etype(read.node(x), w))",
    ),
    (
        o.compact,
        lambda m: m.b.mul(m.xd, m.on_edges(m.v)),
        "read.dst_pair(mul(read.node(x), read.etype(v)))",
    ),
    (
        f.bias_epilogue,
        lambda m: m.b.add(m.b.linear(m.xs, m.w), m.on_edges(m.bias)),
        "linear.etype(read.src(x), w, bias)",
    ),
    (
        f.scalar_linear,
        lambda m: m.b.linear(m.ss, m.row),
        "mul(read.src(s), read.etype(reshape(row)))",
    ),
]

LEFT: list[tuple[Rule, Callable[[Made], Node]]] = [
    # What would be infinite, or not a number, on nodes that no edge reaches.
    (c.hoist, lambda m: m.b.unary(Op.LOG, m.xs)),
    (c.hoist, lambda m: m.b.div(m.xs, m.ss)),
    (c.hoist, lambda m: m.b.mul(m.xs, m.xd)),
    (c.factor_out, lambda m: m.b.agg(m.b.div(m.e, m.sd), DST)),
    (c.factor_out, lambda m: m.b.agg(m.b.mul(m.e, m.ss), DST)),
    (c.factor_out, lambda m: m.b.agg(m.b.mul(m.e, m.sd), DST, "max")),
    (c.factor_out, lambda m: m.b.agg(m.b.mul(m.e, m.infinite), DST)),
    (c.identities, lambda m: m.b.sub(m.b.const(0.0), m.x)),
    (c.identities, lambda m: m.b.div(m.b.const(1.0), m.s)),
    (c.identities, lambda m: m.b.mul(m.x, m.b.const(0.0))),
    (c.reciprocal, lambda m: m.b.div(m.k, m.ss)),
    (c.stable_softmax, lambda m: m.b.div(m.b.unary(Op.EXP, m.k), m.sd)),
    (c.sink_slice, lambda m: m.b.slice(m.b.concat(m.x, m.s), 1, W)),
    (o.merge_linears, lambda m: m.b.linear(m.b.linear(m.xs, m.w), m.w2, True)),
    (o.fold_vector, lambda m: m.b.sum_width(m.b.mul(m.b.linear(m.xs, m.w), m.e))),
    (o.swap_sides, lambda m: m.b.sum_width(m.b.mul(m.b.linear(m.xd, m.w), m.xs))),
    (o.swap_sides, lambda m: m.b.sum_width(m.b.mul(m.b.linear(m.xs, m.w), m.e))),
    (o.sum_before_linear, lambda m: m.b.agg(m.b.linear(m.xs, m.w), DST, "max")),
    (o.sum_before_linear, lambda m: m.b.agg(m.b.linear(m.xs, m.shared), DST)),
    # Two heads of scales on one of rows: no one sum that they could scale.
    (o.sum_before_linear, lambda m: m.b.agg(m.b.mul(m.b.linear(m.xs, m.w), m.k2), DST)),
    (o.compact, lambda m: m.b.mul(m.xs, m.xd)),
    (o.compact, lambda m: m.b.linear(m.e, m.w)),
    (f.scalar_linear, lambda m: m.b.linear(m.xs, m.w)),
]  # fmt: skip


def name(value: object) -> str | None:
    return value.name.replace(" ", "_") if isinstance(value, Rule) else None


@pytest.mark.parametrize("rule, before, after", CASES, ids=name)
def test_what_a_rule_makes(
    rule: Rule, before: Callable[[Made], Node], after: str
) -> None:
    made = Made()
    node = before(made)
    assert node.op in rule.ops
    found = rule.apply(made.b, node)
    assert found is not None and found.type == node.type
    assert expression(found) == after
    want, got = values(node, found)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule, before", LEFT, ids=name)
def test_what_a_rule_leaves(rule: Rule, before: Callable[[Made], Node]) -> None:
    made = Made()
    node = before(made)
    assert node.op in rule.ops
    found = rule.apply(made.b, node)
    assert found is None or found is node


def values(*nodes: Node) -> tuple[Tensor, ...]:
    arrays = GraphArrays(G)
    gen = torch.Generator().manual_seed(0)
    inputs = {
        n: torch.randn(
            arrays.rows(n.domain), *n.shape, generator=gen, dtype=torch.float64
        )
        for n in topological(nodes)
        if n.op is Op.INPUT
    }
    found = Reference(arrays, torch.float64).run(nodes, inputs)
    return tuple(found[n] for n in nodes)


def test_every_rule_has_a_case_and_is_in_its_list() -> None:
    lists = (*c.RULES, *o.REORDER, *o.COMPACT, *f.RULES)
    assert {r.name for r in lists} == {r.name for r, _, _ in CASES}
    both = passes(Optimizations(compact=True, reorder=True))
    assert [p.name for p in both] == ["canonicalize", "reorder", "compact"]
    ours = {r.name for p in both for r in p.rules} | {r.name for r in f.RULES}
    assert ours == {r.name for r in lists}
    assert [p.name for p in passes(Optimizations())] == ["canonicalize"]

"""Random programs over random graphs: every setting of the two optimizations gives
the same values, and the generated gradients are autograd's.

The PyTorch reference evaluates the untouched program and differentiates it with
autograd; the optimized program and its gradients come from the passes alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hector.arrays import GraphArrays
from hector.emit.reference import Reference
from hector.graph import HeteroGraph
from hector.ir.builder import Builder
from hector.ir.node import Node, Op, Program
from hector.ir.types import TYPE_DOMAINS, Domain, Index
from hector.passes import canonicalize, finish
from hector.passes.autodiff import differentiate
from hector.passes.pipeline import (
    ALL_SETTINGS,
    inference_plan,
    optimize_program,
    training_plan,
)
from hector.passes.rewrite import rewrite

HEADS, WIDTH = 2, 3
WEIGHTS = {Domain.EDGE: (Domain.ETYPE, Domain.GLOBAL), Domain.NODE: (Domain.NTYPE,)}
SMOOTH = (Op.TANH, Op.SIGMOID, Op.GELU, Op.ELU, Op.NEG, Op.LEAKY_RELU, Op.RELU)


class Maker:
    """Grows a program by drawn steps; every value keeps magnitudes near one."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.b = draw, Builder()
        x = self.b.input("x", Domain.NODE, (HEADS, WIDTH))
        self.pool = {Domain.NODE: [x], Domain.EDGE: []}
        self.num_parameters = 0

    def parameter(self, domain: Domain, shape: tuple[int, ...]) -> Node:
        self.num_parameters += 1
        return self.b.input(f"p{self.num_parameters}", domain, shape)

    def pick(self, domain: Domain) -> Node:
        return self.draw(st.sampled_from(self.pool[domain]))

    def step(self) -> None:
        domain = self.draw(st.sampled_from([d for d, p in self.pool.items() if p]))
        x = self.pick(domain)
        made = self.draw(st.sampled_from(STEPS))(self, domain, x)
        if made is not None:
            self.pool[made.domain].append(made)

    def move(self, domain: Domain, x: Node) -> Node:
        index = self.draw(st.sampled_from([Index.SRC, Index.DST]))
        if domain is Domain.NODE:
            return self.b.read(x, index, Domain.EDGE)
        reduce = self.draw(st.sampled_from(["sum", "sum", "max"]))
        out = self.b.agg(x, index, reduce)
        return out if reduce == "max" else self.b.unary(Op.TANH, out)

    def linear(self, domain: Domain, x: Node) -> Node:
        kind = self.draw(st.sampled_from(WEIGHTS[domain]))
        if self.draw(st.booleans()):
            flat = self.b.reshape(x, (1, x.shape[0] * x.shape[1]))
            x = flat if self.draw(st.booleans()) else x
        width = self.draw(st.sampled_from([WIDTH, 2 * WIDTH]))
        shape = (x.shape[0], x.shape[1], width)
        return self.b.linear(x, self.parameter(kind, shape))

    def vector(self, domain: Domain, x: Node) -> Node:
        kind = self.draw(st.sampled_from(WEIGHTS[domain]))
        v = self.parameter(kind, x.shape)
        if self.draw(st.booleans()):
            return self.b.sum_width(self.b.mul(x, v))
        return self.b.add(x, v)

    def combine(self, domain: Domain, x: Node) -> Node | None:
        y = self.pick(domain)
        if len(x.shape) != 2 or not _fits(x.shape, y.shape):
            return None
        op = self.draw(st.sampled_from([Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MAXIMUM]))
        if op is Op.DIV:
            y = self.b.add(self.b.unary(Op.SIGMOID, y), self.b.const(0.5))
        return self.b.binary(op, x, y)

    def unary(self, domain: Domain, x: Node) -> Node:
        op = self.draw(st.sampled_from(SMOOTH))
        extra = {"slope": 0.2} if op is Op.LEAKY_RELU else {}
        return self.b.unary(op, x, **extra)

    def softmax(self, domain: Domain, x: Node) -> Node | None:
        if domain is not Domain.EDGE:
            return None
        logit = self.b.sum_width(x)
        top = self.b.unary(Op.DETACH, self.b.agg(logit, Index.DST, "max"))
        power = self.b.unary(
            Op.EXP, self.b.sub(logit, self.b.read(top, Index.DST, Domain.EDGE))
        )
        total = self.b.read(self.b.agg(power, Index.DST), Index.DST, Domain.EDGE)
        return self.b.mul(x, self.b.div(power, total))

    def shape(self, domain: Domain, x: Node) -> Node | None:
        heads, width = x.shape
        made = [self.b.sum_heads(x), self.b.concat(x, x)]
        if width > 1:
            start = self.draw(st.integers(0, width - 2))
            made.append(self.b.slice(x, start, width - 1 - start))
        made.append(self.b.reshape(x, (1, heads * width)))
        return self.draw(st.sampled_from(made))


def _fits(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(p == q or 1 in (p, q) for p, q in zip(a, b, strict=True))


STEPS: tuple[Callable[[Maker, Domain, Node], Node | None], ...] = (
    Maker.move,
    Maker.move,
    Maker.linear,
    Maker.linear,
    Maker.vector,
    Maker.combine,
    Maker.combine,
    Maker.unary,
    Maker.softmax,
    Maker.shape,
)


@dataclass(frozen=True, eq=False)
class Made:
    """A drawn program; a failing one is printed node by node."""

    b: Builder
    program: Program

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.program.order()))


@st.composite
def programs(draw: st.DrawFn) -> Made:
    maker = Maker(draw)
    for _ in range(draw(st.integers(3, 14))):
        maker.step()
    domain = draw(st.sampled_from([d for d, p in maker.pool.items() if p]))
    last = maker.pool[domain][-1]
    if domain is Domain.EDGE:
        last = maker.b.agg(last, Index.DST)
    return Made(maker.b, Program(outputs=(("out", last),)))


@st.composite
def graphs(draw: st.DrawFn) -> HeteroGraph:
    num_nodes, num_types = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    node = st.integers(0, num_nodes - 1)
    edge = st.tuples(node, node, st.integers(0, num_types - 1))
    edges = draw(st.lists(edge, min_size=1, max_size=16))
    edges += edges[: draw(st.integers(0, 3))]
    cut = draw(st.integers(1, num_nodes))
    src, dst, kind = (list(c) for c in zip(*edges, strict=True))
    return HeteroGraph.from_arrays(
        src,
        dst,
        kind,
        node_type=[int(n >= cut) for n in range(num_nodes)],
        num_edge_types=num_types,
    )


def tensors(program: Program, arrays: GraphArrays) -> dict[Node, Tensor]:
    gen = torch.Generator().manual_seed(0)
    found = {}
    for node in program.inputs():
        rows = arrays.rows(node.domain)
        scale = 0.5 if node.domain in TYPE_DOMAINS else 1.0
        value = torch.randn(rows, *node.shape, generator=gen, dtype=torch.float64)
        found[node] = (scale * value).requires_grad_()
    return found


@settings(max_examples=120, deadline=None)
@given(programs(), graphs())
def test_settings_and_gradients(made: Made, graph: HeteroGraph) -> None:
    b, program = made.b, made.program
    arrays = GraphArrays(graph)
    reference = Reference(arrays, torch.float64)
    inputs = tensors(program, arrays)
    (out_node,) = program.nodes
    want = reference.run([out_node], inputs)[out_node]
    slope = torch.linspace(-1, 1, max(want.numel(), 1), dtype=torch.float64)
    slope = slope[: want.numel()].view_as(want)
    auto = torch.autograd.grad(
        (want * slope).sum(), list(inputs.values()), allow_unused=True
    )
    wanted = tuple(inputs)
    plain = {n: t.detach() for n, t in inputs.items()}
    for setting in ALL_SETTINGS:
        better = optimize_program(b, program, setting)
        (node,) = better.nodes
        got = reference.run([node], plain)[node]
        torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=1e-10)
        head = b.input("grad:out", node.domain, node.shape)
        grads = differentiate(b, {node: head}, wanted)
        named = Program(outputs=tuple((n.name, g) for n, g in grads.items()))
        back = rewrite(b, rewrite(b, named, canonicalize.RULES), finish.RULES)
        found = reference.run(back.nodes, {**plain, head: slope})
        by_name = {name: found[n] for name, n in back}
        for leaf, expected in zip(wanted, auto, strict=True):
            value = by_name.get(leaf.name)
            if value is None:
                assert expected is None or not expected.any(), leaf.name
                continue
            expected = torch.zeros_like(value) if expected is None else expected
            torch.testing.assert_close(
                value, expected, rtol=1e-7, atol=1e-9, msg=f"{setting} {leaf.name}"
            )


@settings(max_examples=60, deadline=None)
@given(programs())
def test_every_program_lowers_to_legal_plans(made: Made) -> None:
    b, program = made.b, made.program
    for setting in ALL_SETTINGS:
        better = optimize_program(b, program, setting)
        inference_plan(b, better)
        training_plan(b, better, tuple(program.inputs()))


def test_the_generator_makes_what_the_passes_are_for() -> None:
    """Drawn programs do reach the optimizations: a fixed case that they must change."""
    b = Builder()
    x = b.input("x", Domain.NODE, (1, WIDTH))
    w = b.input("w", Domain.ETYPE, (1, WIDTH, WIDTH))
    message = b.linear(b.read(x, Index.SRC, Domain.EDGE), w)
    program = Program(outputs=(("out", b.agg(message, Index.DST)),))
    plain, *others = (optimize_program(b, program, s) for s in ALL_SETTINGS)
    assert all(o.nodes != plain.nodes for o in others)
    with pytest.raises(ValueError):
        b.agg(x, Index.SRC)

"""Random layers over random graphs: what the tests of passes and kernels draw."""

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from hector.graph import HeteroGraph
from hector.ir.builder import Builder
from hector.ir.node import Node, Op, Program
from hector.ir.types import Domain, Index

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

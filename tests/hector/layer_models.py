"""The three layers of Wu written on the IR builder, for kernel checks."""

from collections.abc import Callable, Iterator

from hector.ir.builder import Builder
from hector.ir.kernels import Plan
from hector.ir.node import Node, Op, Program
from hector.ir.types import Domain, Index
from hector.passes.canonicalize import softmax_of_edges
from hector.passes.pipeline import (
    Optimizations,
    inference_plan,
    optimize_program,
    training_plan,
)


def rgcn(b: Builder, width: int) -> Program:
    x = b.input("x", Domain.NODE, (1, width))
    w = b.input("w", Domain.ETYPE, (1, width, width))
    root = b.input("root", Domain.GLOBAL, (1, width, width))
    bias = b.input("bias", Domain.GLOBAL, (1, width))
    message = b.linear(b.read(x, Index.SRC, Domain.EDGE), w)
    count = b.graph("dst_pair_degree", Domain.DST_PAIR)
    mean = b.div(message, b.read(count, Index.DST_PAIR, Domain.EDGE))
    out = b.add(b.agg(mean, Index.DST), b.linear(x, root))
    return Program(outputs=(("out", b.add(out, bias)),))


def rgat(b: Builder, width: int, heads: int = 1) -> Program:
    x = b.input("x", Domain.NODE, (1, width))
    w = b.input("w", Domain.ETYPE, (1, width, heads * width))
    q, k = (b.input(n, Domain.GLOBAL, (1, heads * width, heads)) for n in "qk")
    at_dst = b.linear(b.read(x, Index.DST, Domain.EDGE), w)
    at_src = b.linear(b.read(x, Index.SRC, Domain.EDGE), w)
    score = b.add(b.linear(at_dst, q), b.linear(at_src, k))
    score = b.unary(Op.LEAKY_RELU, score, slope=0.2)
    weight = softmax_of_edges(b, b.reshape(score, (heads, 1)), Index.DST)
    message = b.mul(b.reshape(at_src, (heads, width)), weight)
    return Program(outputs=(("out", b.agg(message, Index.DST)),))


def hgt(b: Builder, width: int, heads: int = 1) -> Program:
    each = width // heads
    x = b.input("x", Domain.NODE, (1, width))

    def typed(name: str, rows: Node) -> Node:
        w = b.input(f"w_{name}", Domain.NTYPE, (1, width, width))
        bias = b.input(f"b_{name}", Domain.NTYPE, (1, width))
        return b.add(b.linear(rows, w), b.spread(bias, Domain.NODE))

    k, q, v = (b.reshape(typed(n, x), (heads, each)) for n in "kqv")
    k_rel, v_rel = (b.input(n, Domain.ETYPE, (heads, each, each)) for n in ("kr", "vr"))
    keys = b.linear(b.read(k, Index.SRC, Domain.EDGE), k_rel)
    values = b.linear(b.read(v, Index.SRC, Domain.EDGE), v_rel)
    score = b.sum_width(b.mul(b.read(q, Index.DST, Domain.EDGE), keys))
    prior = b.mul(b.input("p_rel", Domain.ETYPE, (heads, 1)), b.const(each**-0.5))
    weight = softmax_of_edges(b, b.mul(score, prior), Index.DST)
    out = b.reshape(b.agg(b.mul(values, weight), Index.DST), (1, width))
    out = typed("out", b.unary(Op.GELU, out))
    skip = b.spread(b.input("skip", Domain.NTYPE, (1, 1)), Domain.NODE)
    gate = b.unary(Op.SIGMOID, skip)
    kept = b.mul(x, b.sub(b.const(1.0), gate))
    return Program(outputs=(("out", b.add(b.mul(out, gate), kept)),))


MODELS: dict[str, Callable[[Builder, int], Program]] = {
    "rgcn": rgcn,
    "rgat": rgat,
    "hgt": hgt,
    "rgat_2_heads": lambda b, width: rgat(b, width, 2),
    "hgt_2_heads": lambda b, width: hgt(b, width, 2),
}


def plans(
    model: str, width: int, settings: Optimizations
) -> Iterator[tuple[str, Plan]]:
    """The plans of a model under one setting: inference, forward, backward."""
    b = Builder()
    program = optimize_program(b, MODELS[model](b, width), settings)
    yield f"{settings}/inference", inference_plan(b, program)
    both = training_plan(b, program, tuple(program.inputs()))
    yield f"{settings}/forward", both.forward
    yield f"{settings}/backward", both.backward

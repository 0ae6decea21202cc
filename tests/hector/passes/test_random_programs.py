"""Random programs over random graphs: every setting of the two optimizations gives
the same values, and the generated gradients are autograd's.

The PyTorch reference evaluates the untouched program and differentiates it with
autograd; the optimized program and its gradients come from the passes alone.
"""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hector.arrays import GraphArrays
from hector.graph import HeteroGraph
from hector.ir.builder import Builder
from hector.ir.node import Node, Program
from hector.ir.types import TYPE_DOMAINS, Domain, Index
from hector.passes import finish
from hector.passes.pipeline import (
    ALL_SETTINGS,
    Gradients,
    gradients_of,
    inference_plan,
    optimize_program,
    training_plan,
)
from hector.passes.rewrite import rewrite
from hector.runtime.host import Host
from hector.runtime.reference import Reference

sys.path.insert(0, str(Path(__file__).parents[1]))
from random_programs import WIDTH, Made, graphs, programs


def tensors(program: Program, arrays: GraphArrays) -> dict[Node, Tensor]:
    gen = torch.Generator().manual_seed(0)
    found = {}
    for node in program.inputs():
        rows = arrays.rows(node.domain)
        scale = 0.5 if node.domain in TYPE_DOMAINS else 1.0
        value = torch.randn(rows, *node.shape, generator=gen, dtype=torch.float64)
        found[node] = (scale * value).requires_grad_()
    return found


def derivatives(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(t) for t in leaves]
    found = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
    return [
        torch.zeros_like(t) if g is None else g
        for g, t in zip(found, leaves, strict=True)
    ]


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
    host, leaves = Host(arrays, torch.float64), list(inputs.values())
    firsts = derivatives((want * slope).sum(), leaves)
    seconds = derivatives(sum(g.sin().sum() for g in firsts), leaves)
    wanted = tuple(inputs)
    plain = {n: t.detach() for n, t in inputs.items()}
    for setting in ALL_SETTINGS:
        better = optimize_program(b, program, setting)
        (node,) = better.nodes
        got = host.run([node], plain)[node]
        torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=1e-10)
        first = gradients_of(b, better, wanted, (0,))
        given = {**plain, first.heads[0]: slope}
        found = compared(host, b, first, given, firsts)
        twice = gradients_of(b, first.program, wanted, range(len(first.of)))
        given.update(zip(twice.heads, (g.cos() for g in found), strict=True))
        compared(host, b, twice, given, seconds)


def compared(
    host: Host,
    b: Builder,
    gradients: Gradients,
    given: dict[Node, Tensor],
    want: list[Tensor],
) -> list[Tensor]:
    """The gradients, which are those of autograd; those that are left out are 0."""
    back = rewrite(b, gradients.program, finish.RULES)
    values = host.run(back.nodes, given)
    found = [values[n] for n in back.nodes]
    by_name = dict(zip((n.name for n in gradients.of), found, strict=True))
    leaves = [n for n in given if not n.name.startswith("grad:")]
    for leaf, expected in zip(leaves, want, strict=True):
        value = by_name.get(leaf.name)
        if value is None:
            assert not expected.any(), leaf.name
            continue
        torch.testing.assert_close(
            value, expected.detach(), rtol=1e-7, atol=1e-8, msg=leaf.name
        )
    return found


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

"""A generated kernel against the float64 oracle, on random rows."""

import torch

from hector.arrays import GraphArrays
from hector.emit.schedules import default_schedule
from hector.graph import HeteroGraph
from hector.ir.kernels import Kernel, Plan
from hector.ir.node import Node, Op
from hector.runtime.device import (
    DevicePlan,
    DeviceProgram,
    ValueTypes,
    dot_precision,
)
from hector.runtime.reference import Reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest error over the largest value of the result."""


def operands(
    kernel: Kernel, arrays: GraphArrays, types: ValueTypes
) -> dict[Node, torch.Tensor]:
    """Random values of moderate size; positive where something divides by them."""
    found = {}
    device = arrays.graph.device
    gen = torch.Generator(device=device).manual_seed(1)
    for n in kernel.operands:
        if n.op in (Op.GRAPH, Op.CONST):
            continue
        shape = (arrays.rows(n.domain), *n.shape)
        value = torch.randn(shape, generator=gen, device=device)
        if n.op is Op.AGG and n.type.width <= 16:
            value = value.abs() + 0.5
        found[n] = (value * 0.5).to(types.of(n))
    return found


def random_graph(size: tuple[int, ...], device: str) -> HeteroGraph:
    """Skewed endpoints and relations; two relations have no edges, the last tenth of
    the nodes is isolated."""
    nodes, edges, relations, kinds = size
    gen = torch.Generator().manual_seed(0)

    def skewed(n: int, power: float) -> torch.Tensor:
        return (torch.rand(edges, generator=gen) ** power * n).long().clamp_(max=n - 1)

    used = max(nodes * 9 // 10, 1)
    return HeteroGraph.from_arrays(
        skewed(used, 1.5),
        skewed(used, 1.5),
        1 + skewed(relations, 2.0),
        node_type=torch.arange(nodes) * kinds // nodes,
        num_edge_types=relations + 2,
    ).to(device)


def error_of(
    kernel: Kernel,
    arrays: GraphArrays,
    dtype: torch.dtype,
    given: dict[Node, torch.Tensor] | None = None,
) -> float:
    """Largest relative error of one kernel against the float64 oracle, on `given`
    operands or on random ones.

    Raises RuntimeError if a second run on a GPU gives other bits: kernels have no
    atomics, so that would be a race, which Triton's interpreter cannot have.
    """
    types = ValueTypes(dtype)
    bound = operands(kernel, arrays, types) if given is None else given
    plan = Plan(kernels=(kernel,), outputs=kernel.outputs)
    schedule = default_schedule(kernel, arrays, precision=dot_precision(dtype))
    ready = DevicePlan(DeviceProgram(plan, types, [schedule]), arrays)
    got = ready.run(bound)
    again = ready.run(bound) if arrays.graph.device.type == "cuda" else got
    oracle = Reference(arrays, torch.float64)
    leaves = {n: t.double() for n, t in bound.items()}
    exact = oracle.run(kernel.outputs, leaves)
    worst = 0.0
    for node, want in exact.items():
        if not want.numel():
            continue
        # No tolerance: torch.equal, but for NaN, which is told apart below.
        same = torch.allclose(got[node], again[node], rtol=0, atol=0, equal_nan=True)
        if not same:
            raise RuntimeError(f"a second run gives other bits for {node!r}")
        if not bool(torch.isfinite(got[node]).all()):
            return float("inf")
        gap = float((got[node].double() - want).abs().max())
        worst = max(worst, gap / (scale_of(node, want, oracle, leaves) + 1e-30))
    return worst


def scale_of(
    node: Node, want: torch.Tensor, oracle: Reference, leaves: dict[Node, torch.Tensor]
) -> float:
    """What an error is relative to: the result, and of a sum its terms, of sums among
    them theirs, which may cancel to nothing but their own rounding; of a product with
    a sum that times the other factor."""

    def most(one: Node) -> float:
        values = want if one is node else oracle.run([one], leaves)[one]
        return float(values.abs().max()) if values.numel() else 0.0

    found, sums = [most(node)], [(node, 1.0)]
    while sums:
        one, factor = sums.pop()
        if one in leaves:
            continue
        inputs = [n for n in one.inputs if n.op not in (Op.GRAPH, Op.CONST)]
        if one.op in (Op.ADD, Op.SUB, Op.AGG):
            found += [factor * most(each) for each in inputs]
            sums += [(each, factor) for each in inputs]
        elif one.op is Op.MUL and len(inputs) == 2:
            left, right = inputs
            sums += [(left, factor * most(right)), (right, factor * most(left))]
    return max(found)

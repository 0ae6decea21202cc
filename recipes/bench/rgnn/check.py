"""Checks every generated kernel against the float64 oracle, on this machine's GPU.

    python -m recipes.bench rgnn.check --budget-s 120

Each kernel of Wu's three layers (four settings of the two optimizations; forward,
backward and inference; several widths and dtypes) runs twice on random rows, into
memory that holds NaN before: results must be near the oracle's and repeat to the bit.
Then whole layers, gradients included. The work is shared by processes, since most of it
is compilation.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch

from hector.arrays import GraphArrays
from hector.emit.schedules import default_schedule
from hector.graph import HeteroGraph
from hector.ir.kernels import Kernel, Plan
from hector.ir.node import Node, Op
from hector.passes.pipeline import ALL_SETTINGS, Optimizations
from hector.runtime.device import (
    DevicePlan,
    DeviceProgram,
    ValueTypes,
    dot_precision,
)
from hector.runtime.reference import Reference
from recipes.bench.harness.cli import Bench
from recipes.bench.rgnn.layer_checks import CHECKS, layer_errors
from recipes.bench.rgnn.models import MODELS, plans

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest error over the largest value of the result."""
LAYER_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
"""Errors of kernel after kernel add up."""


class Case(NamedTuple):
    """The kernels of one model."""

    model: str
    width: int
    dtype: torch.dtype
    settings: Optimizations


def cases() -> list[Case]:
    """All kernel checks, the most telling first."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    chosen = [(m, 64, f32) for m in MODELS]
    chosen += [("rgat", 64, bf16), ("hgt_2_heads", 64, bf16), ("rgcn", 64, bf16)]
    chosen += [("rgat", w, f32) for w in (31, 1, 100, 513)]
    chosen += [("rgcn", 513, f32), ("hgt", 100, f16), ("rgat_2_heads", 1, f32)]
    return [Case(m, w, d, s) for m, w, d in chosen for s in ALL_SETTINGS]


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


def error_of(
    kernel: Kernel,
    arrays: GraphArrays,
    dtype: torch.dtype,
    given: dict[Node, torch.Tensor] | None = None,
) -> float:
    """Largest relative error of one kernel against the float64 oracle, on `given`
    operands or on random ones.

    Raises RuntimeError if a second run gives other bits: kernels have no atomics, so
    that would be a race.
    """
    types = ValueTypes(dtype)
    bound = operands(kernel, arrays, types) if given is None else given
    plan = Plan(kernels=(kernel,), outputs=kernel.outputs)
    schedule = default_schedule(kernel, arrays, precision=dot_precision(dtype))
    ready = DevicePlan(DeviceProgram(plan, types, [schedule]), arrays)
    got, again = ready.run(bound), ready.run(bound)
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
    them theirs, which may cancel to nothing but their own rounding."""
    terms, sums = list[Node](), [node]
    while sums:
        one = sums.pop()
        if one.op in (Op.ADD, Op.SUB, Op.AGG) and one not in leaves:
            inputs = [n for n in one.inputs if n.op not in (Op.GRAPH, Op.CONST)]
            terms += inputs
            sums += inputs
    values = [want, *oracle.run(terms, leaves).values()]
    return max(float(value.abs().max()) for value in values if value.numel())


def allowed(limit: float, theirs: float) -> float:
    """Relative error that a tensor may have: `limit`, and up to twice that where the
    same operations in PyTorch, rounded in another order, lose as much."""
    return min(max(limit, 1.25 * theirs), 2 * limit)


def main(
    bench: Bench, *, size: tuple[int, ...] = (300, 4000, 7, 3), jobs: int = 0
) -> int:
    """Check what is missing; an error of a unit is that of its first kernel.

    Args:
        size: nodes, edges, relations, kinds
        jobs: processes
    """
    device, cells = bench.device.type, bench.cells()
    units: dict[str, Case | str] = {name: name for name in CHECKS}
    for case in cases():
        if case.dtype is not torch.bfloat16 or device == "cuda":
            units[" ".join(map(str, case))] = case
    context = multiprocessing.get_context("spawn")
    num = jobs or min(12, len(os.sched_getaffinity(0)))
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(num, context) as pool:
        wanted = [name for name in units if cells.is_wanted(name)]
        found = {n: pool.submit(checked, units[n], size, device) for n in wanted}
        for name, answer in found.items():
            cells.run(name, answer.result, max(0.0, cells.left_s()))
        pool.shutdown(wait=False, cancel_futures=True)
    bad = [n for n, c in cells.data["cells"].items() if "error" in c or c["wrong"]]
    print(f"{len(cells.data['cells'])} units, bad: {bad}")
    return int(bool(bad))


def kernel_errors(case: Case, arrays: GraphArrays) -> dict[str, float]:
    """Of every distinct kernel of a model at one width, dtype and setting."""
    made = plans(case.model, case.width, case.settings)
    found = {str(kernel): kernel for _, plan in made for kernel in plan.kernels}
    return {t: error_of(kernel, arrays, case.dtype) for t, kernel in found.items()}


def layer_check(name: str, graph: HeteroGraph) -> dict[str, Any]:
    """A whole layer under each setting, outputs and gradients: of what is allowed, the
    largest share that was used up."""
    worst = {}
    for dtype, limit in LAYER_TOLERANCE.items():
        if dtype is torch.bfloat16 and graph.device.type == "cpu":
            continue  # Triton's interpreter multiplies the bits of bfloat16.
        for settings in ALL_SETTINGS:
            errors = layer_errors(name, graph, dtype, settings)
            shares = [mine / allowed(limit, theirs) for mine, theirs in errors]
            worst[f"{dtype} {settings}"] = max(shares)
    return {"shares": worst, "wrong": [n for n, s in worst.items() if not s <= 1]}


@cache
def arrays_of(size: tuple[int, ...], device: str) -> GraphArrays:
    """Of the graph that a process checks on."""
    if device == "cuda":
        # Memory that nobody wrote holds NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    return GraphArrays(random_graph(size, device))


def checked(unit: Case | str, size: tuple[int, ...], device: str) -> dict[str, Any]:
    """A layer, or the kernels of a model."""
    arrays = arrays_of(size, device)
    if isinstance(unit, str):
        return layer_check(unit, arrays.graph)
    errors, limit = kernel_errors(unit, arrays), TOLERANCE[unit.dtype]
    wrong = [text[:1500] for text, error in errors.items() if not error <= limit]
    return {"kernels": len(errors), "worst": max(errors.values()), "wrong": wrong}

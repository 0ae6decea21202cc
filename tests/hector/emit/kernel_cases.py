"""Every kind of generated kernel against the float64 oracle.

Run by test_kernels.py in a process of its own: on a GPU as compiled kernels, elsewhere
in Triton's interpreter, which has to be chosen before Triton is imported.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from hector.arrays import GraphArrays
from hector.emit.module import sums_of
from hector.emit.phases import separable_width
from hector.emit.schedules import candidates, default_schedule
from hector.graph import HeteroGraph
from hector.ir.builder import Builder
from hector.ir.kernels import (
    Gemm,
    GemmSchedule,
    Kernel,
    Outer,
    OuterSchedule,
    Parameters,
    Plan,
    Schedule,
    SegmentMapping,
    Traversal,
    TraversalSchedule,
)
from hector.ir.node import Node, Op, Program
from hector.ir.types import Domain, Index
from hector.passes.pipeline import (
    ALL_SETTINGS,
    Optimizations,
    inference_plan,
    optimize_program,
    training_plan,
)
from hector.runtime.device import DevicePlan, DeviceProgram, ValueTypes
from hector.runtime.reference import Reference
from tests.hector.emit.layer_checks import CHECKS, layer_error, second_error
from tests.hector.emit.oracle import TOLERANCE, error_of, operands, random_graph
from tests.hector.layer_models import plans

sys.path.insert(0, str(Path(__file__).parents[1]))
from random_programs import Made, graphs, programs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""The interpreter multiplies the bits of bfloat16."""
BOTH = Optimizations(compact=True, reorder=True)
SMALL = random_graph((10, 16, 3, 2), DEVICE)


def check(
    kernel: Kernel,
    graph: HeteroGraph,
    dtype: torch.dtype,
    given: dict[Node, torch.Tensor] | None = None,
) -> None:
    error = error_of(kernel, GraphArrays(graph), dtype, given)
    assert error <= TOLERANCE[dtype], f"{error}: {kernel}"


@pytest.mark.parametrize(
    ("chosen", "width"),
    [*product([Optimizations()], [1, 100, 513]), *product([BOTH], [31, 64])],
    ids=str,
)
def test_widths(chosen: Optimizations, width: int) -> None:
    """All kernels of RGAT's inference; of 513 columns, one kernel of each kind."""
    (plan,) = (p for n, p in plans("rgat", width, chosen) if "inference" in n)
    kernels = (
        {type(k): k for k in plan.kernels}
        if width > 100
        else dict(enumerate(plan.kernels))
    )
    for kernel in kernels.values():
        check(kernel, SMALL, torch.float32)


@pytest.mark.parametrize("chosen", [ALL_SETTINGS[0], BOTH], ids=str)
@pytest.mark.parametrize("name", CHECKS if DEVICE == "cuda" else ["rgcn", "hgt"])
def test_layers_with_gradients(name: str, chosen: Optimizations) -> None:
    """All on a GPU; in the interpreter each takes seconds."""
    limit = 1e-5 if name in ("rgcn", "hgt") else 2e-4
    assert layer_error(name, SMALL, torch.float32, chosen) <= limit


def test_a_layer_in_low_precision() -> None:
    assert layer_error("rgat", SMALL, LOW, BOTH) <= 3e-2


@pytest.mark.parametrize(
    ("name", "chosen"), [("rgat", BOTH), ("hgt", Optimizations()), ("rgcn", BOTH)]
)
def test_gradients_of_gradients(name: str, chosen: Optimizations) -> None:
    assert second_error(name, SMALL, torch.float32, chosen) <= 1e-4


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), graphs())
def test_random_programs(made: Made, graph: HeteroGraph) -> None:
    """Isolated nodes, empty relations, duplicate edges, self loops."""
    check_program(made, graph)


def test_a_gradient_that_cancels() -> None:
    """x[src] - x[dst] on self loops: what is left of the sum is its terms' rounding."""
    b = Builder()
    x = b.input("x", Domain.NODE, (2, 3))
    ends = [b.read(x, index, Domain.EDGE) for index in (Index.SRC, Index.DST)]
    total = b.agg(b.sub(*ends), Index.SRC)
    program = Program(outputs=(("out", b.unary(Op.TANH, total)),))
    loops = torch.zeros(3, dtype=torch.long)
    graph = HeteroGraph.from_arrays(loops, loops, loops)
    check_program(Made(b, program), graph)


@pytest.mark.parametrize("op", ["add", "mul"])
def test_sums_that_cancel_inside(op: str) -> None:
    """The error is that of the inner sum's terms."""
    b = Builder()
    e = b.input("e", Domain.EDGE, (2, 3))
    total = b.agg(e, Index.SRC)
    program = Program(outputs=(("out", getattr(b, op)(total, total)),))
    loops = torch.zeros(14, dtype=torch.long)
    graph = HeteroGraph.from_arrays(loops, loops, loops).to(DEVICE)
    values = torch.randn(14, 2, 3, generator=torch.Generator().manual_seed(0))
    values[-1] = -values[:-1].double().sum(0).float()
    for kernel in inference_plan(b, program).kernels:
        check(kernel, graph, torch.float32, {e: values.to(DEVICE)})


def check_program(made: Made, graph: HeteroGraph) -> None:
    graph = graph.to(DEVICE)
    program = optimize_program(made.b, made.program, BOTH)
    both = training_plan(made.b, program, tuple(program.inputs()))
    arrays, types = GraphArrays(graph), ValueTypes(torch.float32)
    gen = torch.Generator().manual_seed(0)
    inputs = {}
    for n in (*program.inputs(), *both.output_grads):
        rows = torch.randn(arrays.rows(n.domain), *n.shape, generator=gen)
        inputs[n] = (0.5 * rows).to(DEVICE).double()
    # Operands as the program makes them: random ones need not fit together.
    oracle = Reference(arrays, torch.float64)
    for plan in (inference_plan(made.b, program), both.forward, both.backward):
        for kernel in plan.kernels:
            read = [n for n in kernel.operands if n.op not in (Op.GRAPH, Op.CONST)]
            values = oracle.run(read, inputs)
            given = {n: v.to(types.of(n)).contiguous() for n, v in values.items()}
            check(kernel, graph, torch.float32, given)


@pytest.mark.parametrize(
    ("name", "width"),
    [("rgat", 31), ("rgat", 64), ("rgat_2_heads", 1)],
)
def test_blocks_of_parameters(name: str, width: int) -> None:
    """Contractions within a type, over types, and what is computed element by
    element."""
    arrays, sums = GraphArrays(SMALL), 0
    for _, plan in plans(name, width, BOTH):
        for kernel in plan.kernels:
            if isinstance(kernel, Parameters):
                check(kernel, SMALL, torch.float32)
                check(kernel, SMALL, LOW)
                sums += len(sums_of(kernel, default_schedule(kernel, arrays)))
    assert sums == 2


def run(kernel: Kernel, arrays: GraphArrays, schedule: Schedule) -> list[torch.Tensor]:
    types = ValueTypes(torch.float32)
    bound: dict[Node, torch.Tensor] = operands(kernel, arrays, types)
    plan = Plan(kernels=(kernel,), outputs=kernel.outputs)
    found = DevicePlan(DeviceProgram(plan, types, [schedule]), arrays).run(bound)
    return [found[n] for n in kernel.outputs]


def test_every_schedule_computes_the_same() -> None:
    """Candidates of tuning differ in speed alone: one kernel of each kind."""
    arrays = GraphArrays(SMALL)
    kinds: dict[object, Kernel] = {}
    for _, plan in plans("hgt", 8, Optimizations()):
        for k in plan.kernels:
            kinds.setdefault((type(k), getattr(k, "loop", None)), k)
    tried = 0
    for kernel in kinds.values():
        first = default_schedule(kernel, arrays)
        if first is None:
            continue
        want = run(kernel, arrays, first)
        # The interpreter does not see warps.
        others = {replace(s, num_warps=4) for s in candidates(kernel, first)}
        for schedule in sorted(others, key=repr)[:4]:
            for a, b in zip(run(kernel, arrays, schedule), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            tried += 1
    assert tried > 15


@pytest.mark.parametrize(("width", "num_kinds"), [(72, 3), (130, 2)])
def test_tiles_of_products(width: int, num_kinds: int) -> None:
    """Columns that are one program's or several programs', the last part of them and of
    the inner side nearly empty; weights as they are and transposed."""
    tiny = random_graph((6, 8, 2, 1), DEVICE)
    arrays = GraphArrays(tiny)
    wide = GemmSchedule(block_rows=128, block_cols=128)
    kinds: dict[object, Kernel] = {}
    for _, plan in plans("rgcn", width, Optimizations()):
        for k in plan.kernels:
            if isinstance(k, Gemm) or (isinstance(k, Outer) and width < 100):
                kinds[type(k), getattr(k, "transpose", False)] = k
    assert len(kinds) == num_kinds
    for k in kinds.values():
        check(k, tiny, torch.float32)
        check(k, tiny, LOW)
        if isinstance(k, Gemm):
            others: list[Schedule] = [GemmSchedule(), wide]
        else:
            others = [OuterSchedule(), OuterSchedule(block_left=128, block_right=32)]
        results = [run(k, arrays, schedule) for schedule in others]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_small_groups_share_programs_and_heavy_ones_have_their_own() -> None:
    """Two launches with some heavy groups, with none, and with nothing else."""
    arrays = GraphArrays(random_graph((10, 30, 2, 2), DEVICE))
    split = SegmentMapping.SPLIT
    walks: dict[object, Kernel] = {}
    for name in ("rgat", "hgt"):
        for _, plan in plans(name, 8, BOTH):
            for k in plan.kernels:
                first = default_schedule(k, arrays, split)
                if isinstance(first, TraversalSchedule) and first.mapping is split:
                    walks[name, getattr(k, "loop", None)] = k
    launches = set()
    for k in walks.values():
        first = TraversalSchedule(mapping=split, block=4)
        want = run(k, arrays, replace(first, mapping=SegmentMapping.PROGRAM))
        pairs = product((split, SegmentMapping.TWO_STEPS), ((0, 2), (2, 64), (64, 64)))
        for mapping, (rows, wide) in pairs:
            schedule = replace(
                first, mapping=mapping, heavy_rows=rows, heavy_block=wide
            )
            launches.add(_count_launches(k, arrays, schedule))
            for a, b in zip(run(k, arrays, schedule), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert len(walks) > 5
    assert launches == {1, 2}


@pytest.mark.parametrize("width", [40, 64])
def test_columns_may_be_taken_in_parts(width: int) -> None:
    """Walks of one phase, whatever walks the groups; of 40 columns the last part is
    half empty."""
    arrays = GraphArrays(random_graph((8, 20, 2, 2), DEVICE))
    tried = 0
    for _, plan in plans("rgcn", width, Optimizations()):
        for k in plan.kernels:
            if not isinstance(k, Traversal) or separable_width(k) != width:
                continue
            for mapping in SegmentMapping:
                one = TraversalSchedule(mapping=mapping, block=4, heavy_rows=2)
                want = run(k, arrays, one)
                parts = replace(one, block_columns=16)
                for a, b in zip(run(k, arrays, parts), want, strict=True):
                    assert torch.equal(a, b)
                tried += 1
    assert tried >= 3


def test_edges_of_one_relation_need_no_list() -> None:
    ends = torch.randint(8, (2, 20)).to(DEVICE)
    kinds = torch.zeros_like(ends[0])
    arrays = GraphArrays(HeteroGraph.from_arrays(*ends, kinds, num_nodes=8))
    seen: set[str] = set()
    for _, plan in plans("rgat", 8, Optimizations()):
        for k in plan.kernels:
            first = default_schedule(k, arrays)
            if not isinstance(first, TraversalSchedule):
                continue
            kinds_of_lists = {"in_order": first.in_order, "ends": first.ends_in_order}
            if any(kinds_of_lists.values()):
                found = run(k, arrays, first)
                plain = replace(first, in_order=False, ends_in_order=False)
                assert all(map(torch.equal, found, run(k, arrays, plain)))
                seen |= {name for name, is_so in kinds_of_lists.items() if is_so}
    assert seen == {"in_order", "ends"}


def _count_launches(k: Kernel, arrays: GraphArrays, schedule: Schedule) -> int:
    plan = Plan(kernels=(k,), outputs=k.outputs)
    made = DevicePlan(
        DeviceProgram(plan, ValueTypes(torch.float32), [schedule]), arrays
    )
    return len(made.steps[0].work)


def test_sums_of_many_tiles_into_types_and_into_one_row() -> None:
    """Partial sums have a row a tile, whatever they are summed into."""
    arrays = GraphArrays(random_graph((150, 400, 3, 2), DEVICE))
    found = set()
    for _, plan in plans("rgcn", 4, Optimizations()):
        for k in plan.kernels:
            schedule = default_schedule(k, arrays)
            if isinstance(schedule, OuterSchedule | TraversalSchedule) and all(
                n.domain.value in ("global", "etype") for n in k.outputs
            ):
                parts = run(k, arrays, replace(schedule, chunk_rows=16))
                whole = run(k, arrays, replace(schedule, chunk_rows=4096))
                for a, b in zip(parts, whole, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
                found.add((type(k), k.outputs[0].domain))
    assert len(found) == 3


def test_a_score_is_read_back_after_a_barrier() -> None:
    (plan,) = (p for n, p in plans("hgt", 8, Optimizations()) if "inference" in n)
    walks = [k for k in plan.kernels if isinstance(k, Traversal)]
    types = ValueTypes(torch.float32)
    arrays = GraphArrays(SMALL)
    texts = [
        DeviceProgram(
            Plan(kernels=(k,), outputs=k.outputs), types, [default_schedule(k, arrays)]
        ).source
        for k in walks
    ]
    phased = [t for t in texts if t.count("for at in range") > 1]
    assert phased and all(t.count("tl.debug_barrier()") == 1 for t in phased)
    assert all("debug_barrier" not in t for t in texts if t not in phased)


def test_a_graph_without_edges() -> None:
    empty = HeteroGraph.from_arrays(
        [], [], [], node_type=[0, 0, 1], num_edge_types=2
    ).to(DEVICE)
    for name in ("rgcn", "hgt"):
        assert layer_error(name, empty, torch.float32, BOTH) <= 1e-5

"""Executables: back ends, settings, gradients on demand, caching; the cost model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hector import Backend, HeteroGraph, Optimizations
from hector.arrays import GraphArrays
from hector.cost import EXPOSED, INDEX_BYTES, CostModel, DeviceModel, Work
from hector.datasets.generate import GraphSpec, generate
from hector.emit.phases import phases_of
from hector.emit.schedules import HEAVY_TILE, default_schedule, walk_steps
from hector.ir.kernels import (
    Gemm,
    Loop,
    SegmentMapping,
    Traversal,
    TraversalSchedule,
)
from hector.ir.types import Domain, Index, RowType
from hector.passes.pipeline import ALL_SETTINGS
from hector.runtime import executables, uses_triton
from hector.statistics import statistics
from recipes.hector_layers import comp_gcn, gat, relational_gatv2
from tests.hector.layer_models import MODELS, plans


def small(seed: int = 0, ratio: float = 0.5, edges: int = 120) -> HeteroGraph:
    spec = GraphSpec(
        num_nodes=40,
        num_node_types=2,
        num_edges=edges,
        num_edge_types=6,
        compaction_ratio=ratio,
    )
    return generate(spec, seed=seed)


def arguments(graph: HeteroGraph, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    r = graph.num_edge_types
    shapes = [(graph.num_nodes, 4), (r, 4), (r, 4, 4), (4, 4)]
    return [torch.randn(s, generator=gen, dtype=dtype) for s in shapes]


def test_gradients_only_of_what_wants_them() -> None:
    g = small()
    x, relation, weight, loop = arguments(g)
    weight.requires_grad_()
    out = comp_gcn(g, x, relation, weight, loop)
    assert out.requires_grad
    out.sum().backward()
    assert weight.grad is not None
    assert x.grad is None
    one = executables(g)[-1].report
    for t in (x, relation, loop):
        t.requires_grad_()
    comp_gcn(g, x, relation, weight, loop).sum().backward()
    every = executables(g)[-1].report
    # Dead gradients are removed: fewer kernels when fewer are wanted.
    assert one.backward is not None and every.backward is not None
    assert len(one.backward.kernels) < len(every.backward.kernels)
    with torch.no_grad():
        assert not comp_gcn(g, x, relation, weight, loop).requires_grad
    assert executables(g)[-1].report.backward is None


def test_an_executable_is_made_once() -> None:
    g = small()
    values = arguments(g)
    before = len(executables(g))
    for _ in range(3):
        comp_gcn(g, *values)
    assert len(executables(g)) == before + 1
    comp_gcn(g, *(v.float() for v in values))
    assert len(executables(g)) == before + 2


def test_calls_repeat_to_the_bit_and_do_not_change_their_inputs() -> None:
    g = small()
    values = [v.requires_grad_() for v in arguments(g, torch.float32)]
    copies = [v.detach().clone() for v in values]
    runs = []
    for _ in range(2):
        out = comp_gcn(g, *values)
        runs.append([out.detach(), *torch.autograd.grad(out.sum(), values)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values, copies, strict=True))


def test_transposed_arguments() -> None:
    g = small()
    x, relation, weight, loop = arguments(g)
    want = comp_gcn(g, x, relation, weight, loop)
    got = comp_gcn(g, x.t().contiguous().t(), relation, weight, loop.t().clone().t())
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_backends() -> None:
    g = small()
    arrays = GraphArrays(g)
    f32, f64 = torch.float32, torch.float64
    assert not uses_triton(Backend.AUTO, arrays.graph, f32)
    assert not uses_triton(Backend.REFERENCE, arrays.graph, f32)
    assert uses_triton(Backend.TRITON, arrays.graph, f32)
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16"):
        uses_triton(Backend.TRITON, arrays.graph, f64)
    layer = comp_gcn.with_options(backend=Backend.TRITON)
    with pytest.raises(ValueError, match="set backend to auto or reference"):
        layer(g, *arguments(g))
    auto = comp_gcn.executable(g, *arguments(g)).report
    assert auto.backend is Backend.REFERENCE
    assert auto.generated_lines == 0


def test_another_shape_is_another_program() -> None:
    g = small()
    x, relation, weight, loop = arguments(g)
    assert comp_gcn(g, x, relation, weight, loop).shape == (40, 4)
    wide = comp_gcn(g, x, relation, weight.repeat(1, 1, 2), loop.repeat(1, 2))
    assert wide.shape == (40, 8)
    with pytest.raises(ValueError, match="expected rows of equal or broadcastable"):
        comp_gcn(g, x, relation, weight, loop.repeat(1, 2))


def test_plans_print_and_do_not_differ_from_run_to_run() -> None:
    """Tensors of one run must not find another run's kernels missing from the cache."""
    for model in MODELS:
        for s in ALL_SETTINGS:
            first = [(label, str(p)) for label, p in plans(model, 8, s)]
            assert first == [(label, str(p)) for label, p in plans(model, 8, s)]
    text = dict(first)["compact+reorder/inference"]
    kinds = {line.split()[0] for line in text.splitlines()}
    assert {"gemm", "traversal", "parameter"} <= kinds
    assert "for g in dst: for i in edge(g)" in text


# The cost model.

_BY_PAIR = Loop(domain=Domain.EDGE, group=Index.DST_PAIR)


def test_the_work_of_a_gemm_and_a_traversal() -> None:
    """Counted by hand: 40 nodes, 120 edges, rows of 64 floats."""
    g = small()
    arrays = GraphArrays(g)
    device = DeviceModel(cache_bytes=0)
    model = CostModel(arrays, device)
    (plan,) = (p for n, p in plans("rgat", 64, Optimizations()) if "infer" in n)
    gemm = next(k for k in plan.kernels if isinstance(k, Gemm))
    assert gemm.rows.gather is not None
    row, edges = 64 * 4, g.num_edges
    assert model.work(gemm) == Work(
        streamed_bytes=edges * row,
        run_bytes=edges * row,
        operations=2.0 * edges * 64 * 64,
    )
    half = CostModel(arrays, device, value_bytes=2).work(gemm)
    assert half.run_bytes == edges * row / 2
    # By destination, edges come in another order than the one they are stored in:
    # their own rows are gathered, and a score of 4 bytes costs a sector.
    walk = next(k for k in plan.kernels if isinstance(k, Traversal))
    assert sorted(n.type.width for n in walk.loads) == [1, 1, 64]
    assert [n.type for n in walk.stores] == [RowType(Domain.NODE, (1, 64))]
    anywhere = edges * (row + 2 * device.sector_bytes)
    assert model.work(walk) == Work(
        streamed_bytes=g.num_nodes * row + 2 * edges * INDEX_BYTES,
        gathered_bytes=anywhere,
    )
    cached = CostModel(arrays, DeviceModel()).work(walk)
    assert (cached.gathered_bytes, cached.cached_bytes) == (0, anywhere)
    # Edges of one destination in a relation lie together.
    pairs = next(
        k
        for n, p in plans("rgcn", 64, Optimizations(reorder=True))
        for k in p.kernels
        if "infer" in n and getattr(k, "loop", None) == _BY_PAIR
    )
    assert model.work(pairs) == Work(
        streamed_bytes=arrays.rows(Domain.DST_PAIR) * row + 3 * edges * INDEX_BYTES,
        run_bytes=edges * row,
    )
    assert model.kernel_seconds(walk) > device.kernel_seconds
    # The host starts kernels while the device runs them: the larger one counts, and a
    # share of the other.
    host = device.inference_seconds + sum(model.host_seconds(k) for k in plan.kernels)
    busy = sum(model.kernel_seconds(k) for k in plan.kernels)
    assert busy < host
    assert model.step_seconds([plan]) == host + EXPOSED * busy
    # Training is one step of two plans.
    both = model.step_seconds([plan, plan])
    host = device.training_seconds + 2 * (host - device.inference_seconds)
    assert both == pytest.approx(host + EXPOSED * 2 * busy)


def test_small_groups_share_programs_and_that_is_reckoned_with() -> None:
    """Millions of groups of three rows: program starts bound one program a group."""
    (plan,) = (p for n, p in plans("rgat", 8, Optimizations()) if "infer" in n)
    by_dst = Loop(domain=Domain.EDGE, group=Index.DST)
    (walk,) = (k for k in plan.kernels if getattr(k, "loop", None) == by_dst)

    class Many:
        def rows(self, domain: Domain) -> int:
            return 6_000_000 if domain is Domain.EDGE else 2_000_000

        def longest(self, domain: Domain, index: Index) -> int:
            return 1000

    chosen = default_schedule(walk, Many())
    assert isinstance(chosen, TraversalSchedule)
    assert chosen.mapping is SegmentMapping.SPLIT
    few = default_schedule(walk, GraphArrays(small()))
    assert isinstance(few, TraversalSchedule)
    assert few.mapping is SegmentMapping.PROGRAM
    device = DeviceModel(program_seconds=1.0, kernel_seconds=0.0, walk_step_seconds=0.0)
    program = CostModel(Many(), device, mapping=SegmentMapping.PROGRAM)
    assert program.kernel_seconds(walk) == 2e6
    shared = CostModel(Many(), device).kernel_seconds(walk)
    assert shared == -(-2_000_000 // chosen.block)


def test_the_longest_group_is_walked_in_wide_steps_and_counted() -> None:
    """A thousand groups of three rows, and one of ten thousand."""
    (plan,) = (p for n, p in plans("rgat", 64, Optimizations()) if "infer" in n)
    by_dst = Loop(domain=Domain.EDGE, group=Index.DST)
    (walk,) = (k for k in plan.kernels if getattr(k, "loop", None) == by_dst)

    class Skewed:
        def __init__(self, longest: int) -> None:
            self.most = longest

        def rows(self, domain: Domain) -> int:
            return 3000 if domain is Domain.EDGE else 1000

        def longest(self, domain: Domain, index: Index) -> int:
            return self.most

    even = default_schedule(walk, Skewed(4))
    assert isinstance(even, TraversalSchedule)
    assert even.mapping is SegmentMapping.PROGRAM
    assert walk_steps(walk, even, Skewed(4)) == len(phases_of(walk))
    skewed = Skewed(10_000)
    one = default_schedule(walk, skewed, SegmentMapping.PROGRAM)
    split = default_schedule(walk, skewed)
    assert isinstance(one, TraversalSchedule) and isinstance(split, TraversalSchedule)
    assert split.mapping is SegmentMapping.SPLIT
    # Lanes walk up to heavy_rows; then ten thousand rows, heavy_block at a time.
    steps = split.heavy_rows + -(-10_000 // split.heavy_block)
    assert walk_steps(walk, split, skewed) == steps * len(phases_of(walk))
    assert 10 * steps * len(phases_of(walk)) < walk_steps(walk, one, skewed)
    assert split.heavy_block * 64 <= HEAVY_TILE
    device = DeviceModel(kernel_seconds=0.0, walk_step_seconds=1.0)
    seconds = CostModel(skewed, device).kernel_seconds(walk)
    assert int(seconds) == steps * len(phases_of(walk))


def test_the_longest_group_of_a_graph() -> None:
    g = small(ratio=0.3, edges=500)
    arrays = GraphArrays(g)
    assert arrays.longest(Domain.EDGE, Index.SRC) == int(g.src.bincount().max())
    for pairs, index in (
        (g.unique_src(), Index.SRC_PAIR),
        (g.unique_dst(), Index.DST_PAIR),
    ):
        most = int(pairs.edges().ptr.diff().max())
        assert arrays.longest(Domain.EDGE, index) == most
        about = statistics(g)
        name = "source" if index is Index.SRC_PAIR else "destination"
        assert getattr(about, f"max_{name}_pair_degree") == most


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.sampled_from(sorted(MODELS)))
def test_more_edges_cost_more(scale: int, model: str) -> None:
    def seconds(edges: int) -> float:
        arrays = GraphArrays(small(ratio=0.1, edges=edges))
        # Without launches: while the host is slower than the device, edges are free.
        # Without walks: of larger groups more rows are taken at once.
        device = DeviceModel(
            launch_seconds=0,
            parameter_launch_seconds=0,
            inference_seconds=0,
            training_seconds=0,
            walk_step_seconds=0,
        )
        cost = CostModel(arrays, device)
        found = (p for _, p in plans(model, 8, Optimizations()))
        return sum(cost.step_seconds([p]) for p in found)

    assert seconds(150 * scale) < seconds(150 * (scale + 1))


def chosen(ratio: float, device: DeviceModel) -> Optimizations:
    g = small(ratio=ratio, edges=1000)
    gen = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 64, 64, generator=gen) for _ in range(2)]
    att = torch.randn(6, 1, 64, generator=gen)
    layer = relational_gatv2.with_options(device_model=device)
    x = torch.randn(40, 64, generator=gen)
    return layer.executable(g, x, *weights, att, 1).report.optimizations


def test_compaction_is_chosen_where_it_saves_rows() -> None:
    """With free launches: rows decide, and few pairs an edge ask for compaction."""
    rows_only = DeviceModel(
        launch_seconds=0, parameter_launch_seconds=0, kernel_seconds=0
    )
    assert chosen(0.05, rows_only).compact
    # Where launches cost everything, the fewest kernels win.
    slow = DeviceModel(launch_seconds=1.0, parameter_launch_seconds=1.0)
    g = small(ratio=0.1, edges=1000)
    x, w, a = torch.randn(40, 8), torch.randn(8, 8), torch.randn(2, 4)
    layer = gat.with_options(device_model=slow)
    report = layer.executable(g, x, w, a, a, 2).report
    counts = {
        s: len(
            gat.with_options(optimizations=s)
            .executable(g, x, w, a, a, 2)
            .report.forward.kernels
        )
        for s in ALL_SETTINGS
    }
    assert counts[report.optimizations] == min(counts.values())


def test_the_choice_can_be_overridden() -> None:
    g = small()
    for s in ALL_SETTINGS:
        layer = comp_gcn.with_options(optimizations=s)
        assert layer.executable(g, *arguments(g)).report.optimizations == s
    compiled = comp_gcn.program(g, *arguments(g))
    costs = compiled.predicted_seconds(GraphArrays(g), training=True)
    assert set(costs) == set(ALL_SETTINGS)
    best = compiled.settings_for(g, True, torch.float32)
    assert costs[best] == min(costs.values())

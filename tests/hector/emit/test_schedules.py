"""First choices of schedules, from sizes alone."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hector.emit.gemm import EXACT, DotPrecision, emit_gemm, emit_outer
from hector.emit.phases import separable_width
from hector.emit.schedules import Sizes, candidates, default_schedule
from hector.ir.kernels import (
    Gemm,
    GemmSchedule,
    Outer,
    OuterSchedule,
    SegmentMapping,
    Traversal,
    TraversalSchedule,
)
from hector.ir.types import Domain, Index
from hector.passes.pipeline import Optimizations
from hector.runtime.tune import schedules_for
from tests.hector.layer_models import plans

TF32 = DotPrecision(dtype="tl.float32", input_precision="tf32")
HALF = DotPrecision(dtype="tl.bfloat16", input_precision="")


class Graph:
    """Edges of fifty types, as biokg's."""

    def __init__(self, num_edges: int = 5_000_000, num_types: int = 50) -> None:
        self.num_edges, self.num_types = num_edges, num_types

    def rows(self, domain: Domain) -> int:
        types = domain in (Domain.ETYPE, Domain.NTYPE)
        return self.num_types if types else self.num_edges

    def longest(self, domain: Domain, index: Index) -> int:
        return 1000


def products(width: int) -> list[Gemm | Outer]:
    """Of a training step of RGCN."""
    found = (k for _, p in plans("rgcn", width, Optimizations()) for k in p.kernels)
    return [k for k in found if isinstance(k, Gemm | Outer)]


def read(k: Gemm | Outer, sizes: Sizes, precision: DotPrecision) -> float:
    """Elements that all programs of a product load."""
    chosen = default_schedule(k, sizes, precision=precision)
    rows = sizes.rows(k.domain if isinstance(k, Outer) else k.out.domain)
    if isinstance(k, Gemm):
        assert isinstance(chosen, GemmSchedule)
        inner, cols = k.weight.shape[1:]
        across = -(-cols // chosen.block_cols)
        return rows * inner * across + rows / chosen.block_rows * inner * cols
    assert isinstance(chosen, OuterSchedule)
    left, right = k.out.shape[1:]
    parts = -(-left // chosen.block_left), -(-right // chosen.block_right)
    return rows * (left * parts[1] + right * parts[0])


@pytest.mark.parametrize("precision", [TF32, HALF], ids=["tf32", "half"])
def test_twice_the_width_reads_twice_as_much(precision: DotPrecision) -> None:
    """See [Note: wide tiles]; with tiles of 64 columns it was four times."""
    sizes = Graph()
    for narrow, wide in zip(products(64), products(128), strict=True):
        ratio = read(wide, sizes, precision) / read(narrow, sizes, precision)
        assert ratio == pytest.approx(2.0)
        assert read(wide, sizes, EXACT) == pytest.approx(
            4 * read(narrow, sizes, precision)
        )


def test_short_types_keep_short_tiles() -> None:
    """A hundred edges a type would fill less than half of 128 rows."""
    sizes = Graph(num_edges=5_000)
    for k in products(128):
        chosen = default_schedule(k, sizes, precision=TF32)
        if isinstance(k, Gemm) and k.out.domain is Domain.EDGE:
            assert chosen == GemmSchedule(block_cols=128)


def test_few_rows_are_given_to_many_programs() -> None:
    """Seven thousand, of one type: AIFB's nodes."""
    for k in products(128):
        chosen = default_schedule(k, Graph(7_000, 1), precision=TF32)
        if isinstance(k, Gemm):
            assert chosen == GemmSchedule(block_cols=128)
        else:
            assert chosen == OuterSchedule(chunk_rows=128)


def test_programs_of_one_tile_are_neighbours() -> None:
    """See [Note: programs of one tile]."""
    for k in products(130):
        emitted = (
            emit_gemm(k, "k", GemmSchedule(), EXACT)
            if isinstance(k, Gemm)
            else emit_outer(k, "k", OuterSchedule(), EXACT)
        )
        kind, times, (what, *_) = emitted.grid[0]  # type: ignore[misc]
        assert (kind, what, emitted.grid[1]) == ("times", "tiles", 1)
        assert times == (3 if isinstance(k, Gemm) else 9)
        assert f"tile = tl.program_id(0) // {times}" in emitted.source.text("")


def test_the_last_inner_block_is_no_wider_than_it_must_be() -> None:
    (k, *_) = (k for k in products(72) if isinstance(k, Gemm))
    text = emit_gemm(k, "k", GemmSchedule(), EXACT).source.text("")
    assert "inner = 0 + tl.arange(0, 64)" in text
    assert "inner = 64 + tl.arange(0, 16)" in text


def test_candidates_hold_the_first_choice_and_others() -> None:
    for k in products(128):
        first = default_schedule(k, Graph(), precision=TF32)
        assert first is not None
        found = list(dict.fromkeys(candidates(k, first)))
        assert found[0] == first and len(found) > 10
        assert len({repr(s) for s in found}) == len(found)
        widths = {getattr(s, "block_cols", getattr(s, "block_left", 0)) for s in found}
        assert widths == {64, 128}


def test_schedules_follow_the_precision_that_pytorch_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HECTOR_CACHE", str(tmp_path))
    pytest.importorskip("triton")
    from hector.runtime.device import ValueTypes

    (plan,) = (p for n, p in plans("rgcn", 128, Optimizations()) if "infer" in n)
    graph = SimpleNamespace(
        device=torch.device("cpu"), num_nodes=9, num_edges=9, num_node_types=1
    )
    graph.num_edge_types = 1
    arrays = Graph()
    arrays.graph = graph  # type: ignore[attr-defined]
    wide = []
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            chosen = schedules_for(plan, arrays, ValueTypes(torch.float32), False)  # type: ignore[arg-type]
            wide.append([s.block_cols for s in chosen if isinstance(s, GemmSchedule)])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert set(wide[0]) == {64} and set(wide[1]) == {128}


class Friends:
    """Nodes of one kind, edges of one relation, ends of a power law: Reddit's sizes."""

    def rows(self, domain: Domain) -> int:
        found = {Domain.NODE: 232_965, Domain.EDGE: 22_923_183}
        return found.get(domain, 1)

    def longest(self, domain: Domain, index: Index) -> int:
        return 47_406


def test_groups_near_the_mean_do_not_start_the_steps_of_the_largest() -> None:
    """With heavy groups from 64 rows on, most of those with 98 in the mean were."""
    found = []
    for _, plan in plans("rgcn", 128, Optimizations()):
        for k in plan.kernels:
            chosen = default_schedule(k, Friends())
            if isinstance(k, Traversal) and isinstance(chosen, TraversalSchedule):
                if k.loop.domain is Domain.EDGE and separable_width(k) is not None:
                    found.append((k.loop.group, chosen))
    groups = {group for group, _ in found}
    assert {Index.DST, Index.SRC} <= groups
    for group, chosen in found:
        if group not in (Index.DST, Index.SRC):
            continue
        assert chosen.mapping is SegmentMapping.TWO_STEPS
        assert chosen.block_columns * chosen.block == 512 and chosen.num_warps == 4
        assert chosen.heavy_rows == 2048 < 47_406
        # Edges lie in the order of their destinations; their other ends are kept so.
        assert chosen.in_order is (group is Index.DST)
        assert chosen.ends_in_order is (group is Index.SRC)


def test_a_sampled_graph_keeps_no_ends_in_order() -> None:
    """Its mapping is given; the array would be made in every step."""
    for _, plan in plans("rgcn", 128, Optimizations()):
        for k in plan.kernels:
            chosen = default_schedule(k, Friends(), SegmentMapping.PROGRAM)
            if isinstance(chosen, TraversalSchedule):
                assert not chosen.ends_in_order

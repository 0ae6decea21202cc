"""Sampled graphs through generated kernels: bounds instead of counts, one program.

Run by test_kernels.py in a process of its own, with Triton's interpreter or a GPU.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hector.arrays import BoundedArrays, GraphArrays
from hector.graph import HeteroGraph
from hector.ir.types import Domain, Index
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.nn.common import CompiledConv
from hector.passes.pipeline import Optimizations
from hector.runtime import Backend, executables
from hector.tile_kernels import tiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES, WIDTH = ("a", "b"), 4
TYPES = (("a", "r0", "b"), ("b", "r1", "a"), ("a", "r2", "a"))
SETTINGS = [Optimizations(), Optimizations(compact=True, reorder=True)]


def batch(seed: int, sampled: bool) -> HeteroGraph:
    """Duplicate pairs, an empty relation in some, an absent node type in one."""
    gen = torch.Generator().manual_seed(seed)
    sizes = {"a": 3 + seed} if seed == 2 else {"a": 3 + seed, "b": 2 + seed}
    edges = {}
    for i, (start, _, end) in enumerate(TYPES):
        if i == seed % 4 or start not in sizes or end not in sizes:
            continue
        num = 5 + 3 * seed
        s = torch.randint(sizes[start], (num,), generator=gen)
        d = torch.randint(sizes[end], (num,), generator=gen)
        edges[TYPES[i]] = torch.stack((s, d)).to(DEVICE)
    return HeteroGraph.from_dicts(
        sizes, edges, (NAMES, TYPES), sampled=sampled, device=DEVICE
    )


def layers() -> list[CompiledConv]:
    torch.manual_seed(0)
    made = [
        RGCNConv(WIDTH, WIDTH, len(TYPES)),
        RGATConv(WIDTH, WIDTH, len(TYPES), heads=2),
        HGTConv(WIDTH, WIDTH, (list(NAMES), list(TYPES)), heads=2),
    ]
    return [m.to(DEVICE) for m in made]


def gradients(layer: Any, graph: HeteroGraph, dtype: torch.dtype) -> list[Tensor]:
    gen = torch.Generator().manual_seed(graph.num_nodes)
    x = torch.randn(graph.num_nodes, WIDTH, generator=gen).to(DEVICE, dtype)
    x.requires_grad_()
    out = layer(x, graph)
    slope = torch.linspace(-1, 1, out.numel(), device=DEVICE, dtype=dtype)
    leaves = [x, *layer.parameters()]
    loss = (out.flatten() * slope).sum()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    zeros = (
        torch.zeros_like(t) if g is None else g
        for t, g in zip(leaves, found, strict=True)
    )
    return [out.detach(), *zeros]


@pytest.mark.parametrize(
    ("which", "settings"),
    [(0, SETTINGS[0]), (1, SETTINGS[1]), (2, SETTINGS[0]), (2, SETTINGS[1])],
    ids=["rgcn", "rgat, both", "hgt", "hgt, both"],
)
def test_batches_one_after_another(which: int, settings: Optimizations) -> None:
    layer = layers()[which].set_options(optimizations=settings, backend=Backend.TRITON)
    oracle = copy.deepcopy(layers()[which]).double()
    programs = set()
    for seed in (0, 1, 2):
        graph = batch(seed, sampled=True)
        got = gradients(layer, graph, torch.float32)
        want = gradients(oracle, batch(seed, sampled=False), torch.float64)
        for mine, expected in zip(got, want, strict=True):
            error = (mine.double() - expected).abs().max()
            assert float(error) <= 1e-4 * max(float(expected.abs().max()), 1.0)
        (exe,) = executables(graph)
        assert type(exe.arrays) is BoundedArrays
        runners = (exe._forward, exe._backward.runner)
        programs.add(tuple(id(r._device.program) for r in runners))
    assert len(programs) == 1, "later batches take the first one's kernels"


@pytest.mark.parametrize("seed", range(6))
def test_bounded_arrays_are_exact_ones_and_empty_rest(seed: int) -> None:
    graph = batch(seed, sampled=True)
    exact, bound = GraphArrays(graph), BoundedArrays(graph)
    for domain in (Domain.SRC_PAIR, Domain.DST_PAIR):
        few, many = exact.rows(domain), bound.rows(domain)
        assert few <= many == graph.num_edges
        for index in (Index.PAIR_NODE, Index.ETYPE):
            a, b = exact.index(domain, index), bound.index(domain, index)
            assert torch.equal(b[:few], a)
            assert bool(((b >= 0) & (b < max(graph.num_nodes, 3))).all())
            s, t = exact.segments(domain, index), bound.segments(domain, index)
            assert torch.equal(s.ptr, t.ptr)
            if s.items is not None and t.items is not None:
                assert torch.equal(s.items, t.items[:few])
        pair = Index.SRC_PAIR if domain is Domain.SRC_PAIR else Index.DST_PAIR
        assert torch.equal(
            exact.index(Domain.EDGE, pair), bound.index(Domain.EDGE, pair)
        )
        s, t = exact.segments(Domain.EDGE, pair), bound.segments(Domain.EDGE, pair)
        assert torch.equal(s.ptr, t.ptr[: few + 1])
        assert bool((t.ptr[few:] == graph.num_edges).all())
        ptr = exact.type_ptr(domain, Index.ALL)
        assert torch.equal(ptr, bound.type_ptr(domain, Index.ALL))
    kinds = ((Domain.EDGE, Index.ETYPE), (Domain.NODE, Index.NTYPE),
             (Domain.SRC_PAIR, Index.ETYPE), (Domain.EDGE, Index.ALL))  # fmt: skip
    for domain, index in kinds:
        for block in (1, 4, 64):
            a, b = exact.tiles(domain, index, block), bound.tiles(domain, index, block)
            n = a.num_tiles
            assert n <= b.num_tiles
            for x, y in zip(a[:3], b[:3], strict=True):
                assert torch.equal(x, y[:n])
            assert torch.equal(a.segment_ptr, b.segment_ptr)
            assert torch.equal(b.start[n:], b.end[n:])


def test_kernels_belong_to_the_dtypes_that_they_read() -> None:
    """Compiled for float32 weights, a kernel would read others as such.

    Asked of the compiled program: on a CPU its layer widens half precision before.
    """
    conv = layers()[0].set_options(backend=Backend.TRITON)
    graphs = [batch(1, sampled=True) for _ in range(3)]
    x = torch.ones(graphs[0].num_nodes, WIDTH, device=DEVICE)
    with torch.no_grad():
        conv(x, graphs[0])
        ((compiled, key),) = graphs[0].state.executables
        found = []
        for graph, dtype in zip(
            graphs, (torch.float32, torch.bfloat16, torch.float32), strict=True
        ):
            tensors = [
                torch.zeros(
                    shape, dtype=dtype if n.name == "weight" else d, device=DEVICE
                )
                for n, d, shape in zip(
                    compiled.inputs, key.dtypes, key.shapes, strict=True
                )
            ]
            exe = compiled.executable(graph, tensors)
            found.append(exe._forward._device.program)
    assert found[0] is not found[1]
    assert found[0] is found[2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "sizes", [(5, 0, 33, 0, 0, 16), (0, 0), (0, 7), (40,), (0, 0, 9, 0)]
)
def test_tiles_of_a_kernel_are_those_of_operators(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Empty types first, last and in a row, none but empty ones, more places than
    tiles, and more than one program's."""
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    for rows in (1, 4, 16):
        num = int(ptr[-1]) // rows + len(sizes) + (300 if rows == 4 else 0)
        counts = (ptr.diff() + rows - 1) // rows
        first = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        segment = torch.searchsorted(first[1:], torch.arange(num), right=True)
        segment = segment.clamp(max=len(sizes) - 1)
        places = torch.arange(num) - first[segment]
        start = torch.minimum(ptr[segment] + places * rows, ptr[segment + 1])
        end = torch.minimum(start + rows, ptr[segment + 1])
        found = tiled(ptr.to(DEVICE), num, rows, dtype)
        for one, want in zip(found, (segment, start, end, first), strict=True):
            assert one.dtype is dtype and torch.equal(one.cpu().long(), want)

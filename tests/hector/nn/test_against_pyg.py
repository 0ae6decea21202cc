"""hector.nn against PyG and the sorted baselines: outputs and every gradient.

Random graphs have empty relations, isolated nodes, one-edge relations, duplicate
edges, self loops and empty node types; all in float64, so that differences are bugs.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hector.graph import HeteroGraph
from hector.nn import HGTConv, RGATConv, RGCNConv
from hector.train import LayerKind, LayerSpec
from hector.train.model import compiled_layer

pytest.importorskip("torch_geometric")

from recipes.bench.rgnn.pyg import IN_PYG, pyg_conv, wrap
from recipes.bench.rgnn.sorted_product import reached

WIDTHS = (1, 31, 64, 100, 513)


@st.composite
def typed_graphs(draw: st.DrawFn) -> HeteroGraph:
    """Graphs whose relations go from one node type to one node type."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    kind = st.integers(0, len(sizes) - 1)
    relations = draw(st.lists(st.tuples(kind, kind), min_size=1, max_size=5))
    first = [sum(sizes[:t]) for t in range(len(sizes))]
    rows: list[tuple[int, int, int]] = []
    for index, (a, b) in enumerate(relations):
        edge = st.tuples(st.integers(0, sizes[a] - 1), st.integers(0, sizes[b] - 1))
        edges = draw(st.lists(edge, max_size=12))
        edges += edges[: draw(st.integers(0, 2))]
        rows += [(first[a] + s, first[b] + d, index) for s, d in edges]
    rows = rows or [(first[relations[0][0]], first[relations[0][1]], 0)]
    src, dst, edge_type = (list(c) for c in zip(*rows, strict=True))
    graph = HeteroGraph.from_arrays(
        src,
        dst,
        edge_type,
        node_type=[t for t, n in enumerate(sizes) for _ in range(n)],
        num_edge_types=len(relations),
    )
    names = tuple((f"n{a}", f"r{i}", f"n{b}") for i, (a, b) in enumerate(relations))
    return graph.replace(edge_type_names=names)


def run(layer: nn.Module, x: Tensor, graph: HeteroGraph) -> dict[str, Tensor]:
    """Output and gradients of everything under one fixed output gradient."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    # PyG leaves out the types that no relation leads to.
    out = layer(x, graph)[reached(graph)]
    slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    (out * slope.view_as(out)).sum().backward()
    found = {"out": out.detach(), "x": x.grad}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            found[name.removeprefix("conv.")] = parameter.grad.clone()
    return found


def check(spec: LayerSpec, graph: HeteroGraph, seed: int = 0) -> None:
    torch.manual_seed(seed)
    reference = pyg_conv(spec, graph).double()
    with torch.no_grad():
        for p in reference.parameters():
            p.uniform_(-0.5, 0.5)
    ours = compiled_layer(spec, graph).double()
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(graph.num_nodes, spec.in_channels, dtype=torch.float64)
    want, got = run(wrap(reference, graph), x, graph), run(ours, x, graph)
    assert got.keys() >= {"out", "x"}
    for name in want.keys() | got.keys():
        # A gradient that one side does not compute must be zero on the other.
        value = got.get(name)
        expected = want.get(name)
        value = torch.zeros_like(expected) if value is None else value
        expected = torch.zeros_like(value) if expected is None else expected
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-9, msg=name)


@settings(max_examples=12, deadline=None)
@given(typed_graphs(), st.sampled_from([(4, 4), (3, 6)]), st.sampled_from([1, 2]))
@pytest.mark.parametrize("kind", IN_PYG)
def test_random_graphs(
    kind: LayerKind, graph: HeteroGraph, widths: tuple[int, int], heads: int
) -> None:
    check(
        LayerSpec(
            kind=kind,
            in_channels=widths[0],
            out_channels=widths[1],
            heads=heads,
            num_bases=None,
        ),
        graph,
    )


@pytest.mark.parametrize("kind", IN_PYG)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(kind: LayerKind, width: int) -> None:
    gen = torch.Generator().manual_seed(width)
    src, dst = torch.randint(0, 20, (2, 80), generator=gen)
    kinds = torch.randint(0, 4, (80,), generator=gen)
    graph = HeteroGraph.from_arrays(src, dst, kinds, num_nodes=22, num_edge_types=5)
    other = 7 if kind is LayerKind.RGCN else width
    for shape in {(width, width), (other, width), (width, other)}:
        spec = LayerSpec(
            kind=kind,
            in_channels=shape[0],
            out_channels=shape[1],
            heads=1,
            num_bases=None,
        )
        check(spec, graph)


@pytest.mark.parametrize("kind", [LayerKind.RGCN, LayerKind.RGAT])
def test_basis_decomposition(kind: LayerKind) -> None:
    gen = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, 12, (2, 60), generator=gen)
    kinds = torch.randint(0, 6, (60,), generator=gen)
    graph = HeteroGraph.from_arrays(src, dst, kinds, num_nodes=12, num_edge_types=6)
    check(
        LayerSpec(kind=kind, in_channels=5, out_channels=4, heads=1, num_bases=3),
        graph,
    )


def test_layers_print_as_one_line() -> None:
    kinds = (["a"], [("a", "r", "a")])
    assert str(RGCNConv((4, 6), 8, 2)) == "RGCNConv((4, 6), 8, num_relations=2)"
    assert str(RGATConv(4, 8, 2, heads=2, edge_dim=3)) == "RGATConv(4, 8, heads=2)"
    assert str(HGTConv({"a": 4}, 8, kinds, heads=2)) == "HGTConv(-1, 8, heads=2)"


def test_values_of_adj_t_beside_edge_types_are_features() -> None:
    edges = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
    kinds, features = torch.tensor([0, 1, 1, 0]), torch.randn(4, 3)
    adj_t = torch.sparse_coo_tensor(
        edges.flip(0), features, (4, 4, 3), check_invariants=True
    )
    conv, x = RGATConv(4, 8, 2, edge_dim=3), torch.randn(4, 4)
    torch.testing.assert_close(conv(x, adj_t, kinds), conv(x, edges, kinds, features))


@pytest.mark.parametrize("aggr", ["median", "mul", "softmax", "std", "max", "min"])
@pytest.mark.parametrize("case", ["features", "ids", "pair", "bases", "blocks"])
def test_reducers_that_see_all_messages(aggr: str, case: str) -> None:
    """PyG's values and gradients; one relation is empty, some nodes have no edges."""
    from torch_geometric import nn as pyg

    torch.manual_seed(0)
    options = {"bases": {"num_bases": 2}, "blocks": {"num_blocks": 2}}.get(case, {})
    widths = (4, 6) if case == "pair" else 4
    theirs = pyg.RGCNConv(widths, 8, 3, aggr=aggr, **options).double()
    mine = RGCNConv(widths, 8, 3, aggr=aggr, **options).double()
    mine.load_state_dict(theirs.state_dict())
    ends, kinds = torch.randint(4, (2, 30)), torch.randint(2, (30,)) * 2
    if aggr == "median":
        # PyG's fails on an empty relation, and where node 0 has no neighbours in one.
        kinds, ends[1] = torch.arange(30) % 3, torch.arange(30) // 3 % 4
    x: object = torch.randn(6, 4, dtype=torch.float64)
    if case == "ids":
        x, ends = None, ends % 4
    if case == "pair":
        x = (x, torch.randn(5, 6, dtype=torch.float64))
    found, wanted = (conv(x, ends, kinds) for conv in (mine, theirs))
    torch.testing.assert_close(found, wanted)
    seed = torch.randn_like(wanted)
    grads = [
        torch.autograd.grad((v * seed).sum(), list(conv.parameters()))
        for v, conv in ((found, mine), (wanted, theirs))
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)

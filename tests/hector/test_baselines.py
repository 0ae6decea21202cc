"""The benchmark's baselines compute what PyG's layers compute."""

import pytest
import torch
from torch import Tensor, nn

from hector.datasets.generate import GraphSpec, generate
from hector.graph import HeteroGraph
from hector.train import LayerKind, LayerSpec

pytest.importorskip("torch_geometric")

from recipes.bench.rgnn.cells import KINDS
from recipes.bench.rgnn.contenders import SORTED
from recipes.bench.rgnn.pyg import pyg_layer
from recipes.bench.rgnn.sorted_product import (
    loop_linear,
    reached,
)

GRAPH = generate(
    GraphSpec(
        num_nodes=60,
        num_node_types=4,
        num_edges=300,
        num_edge_types=9,
        compaction_ratio=0.4,
    )
)


def outputs(layer: nn.Module, x: Tensor, graph: HeteroGraph) -> dict[str, Tensor]:
    """The output and the gradient of everything, from the same output gradient."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    # PyG leaves out the types that no relation leads to.
    out = layer(x, graph)[reached(graph)]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    grads = {n.removeprefix("conv."): p.grad for n, p in layer.named_parameters()}
    known = {n: g.clone() for n, g in grads.items() if g is not None}
    return {"out": out.detach(), "x": x.grad, **known}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("width", [8, 6])
def test_sorted_layer_is_pygs(kind: LayerKind, heads: int, width: int) -> None:
    torch.manual_seed(0)
    spec = LayerSpec(
        kind=kind, in_channels=8, out_channels=width, heads=heads, num_bases=None
    )
    reference = pyg_layer(spec, GRAPH).double()
    for p in reference.parameters():
        nn.init.uniform_(p, -0.5, 0.5)
    ours = SORTED[kind](reference.conv, GRAPH, loop_linear)
    x = torch.randn(GRAPH.num_nodes, 8, dtype=torch.float64)
    want, got = outputs(reference, x, GRAPH), outputs(ours, x, GRAPH)
    assert got.keys() >= want.keys() > {"out", "x"}
    for name, value in got.items():
        # What nothing reads has no gradient on one side, a zero one on the other.
        expected = want.get(name, torch.zeros_like(value))
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10, msg=name)

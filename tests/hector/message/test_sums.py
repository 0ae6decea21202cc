"""Sums without a program are those of the program, in every order of derivatives."""

import pytest
import torch
from torch import Tensor

from hector.message import (
    GINConv,
    Graph,
    GraphConv,
    HeteroGraph,
    SAGEConv,
    layers,
    relation,
    sums,
)
from hector.message import functions as fn


def derivatives(g: Graph, x: Tensor, how: str) -> list[Tensor]:
    g.ndata["h"] = x
    g.update_all(fn.copy_u("h", "m"), getattr(fn, how)("m", "o"))
    out = g.ndata["o"]
    (first,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    return [out.detach(), first.detach(), second]


@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_those_of_programs(
    how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = torch.randint(40, (2, 900))
    dst[:300] = 5  # a group of many, which is added up in parts
    g = Graph(src, dst, num_nodes=42)
    x = torch.randn(42, 6, dtype=dtype, requires_grad=True)
    made = []
    real = relation.plain_sum
    monkeypatch.setattr(
        relation, "plain_sum", lambda *a: made.append(real(*a)) or made[-1]
    )
    mine = derivatives(g, x, how)
    assert len(made) == 1 and isinstance(made[0], Tensor)
    assert g.counts["compiled"] == 1
    monkeypatch.setattr(relation, "plain_sum", lambda *_: None)
    for one, other in zip(mine, derivatives(g, x, how), strict=True):
        if how == "sum":
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other)  # a program divides edge by edge


LAYERS = {
    "gcn": lambda: GraphConv(6, 5),
    "sage": lambda: SAGEConv(6, 5),
    "narrow": lambda: SAGEConv(5, 6, "sum"),
    "gin": lambda: GINConv(torch.nn.Linear(6, 5), 0.25),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layers_without_a_program_are_those_with_one(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = torch.randint(40, (2, 900))
    dst[:600] = 5
    g, layer = Graph(src, dst, num_nodes=42), LAYERS[name]().to(dtype)
    width = 5 if name == "narrow" else 6
    x = torch.randn(42, width, dtype=dtype, requires_grad=True)
    wanted = (x, *layer.parameters())

    def found() -> list[Tensor]:
        out = layer(g, x)
        first = torch.autograd.grad(out.pow(2).mean(), wanted, create_graph=True)
        total = sum(t.pow(2).sum() for t in first)
        return [out, *first, *torch.autograd.grad(total, wanted)]

    mine = found()
    assert g.counts == {"compiled": 1} and not g.ndata and not g.edata
    for module in (layers, sums):
        monkeypatch.setattr(module, "sum_rows", lambda *_: None)
    for one, other in zip(mine, found(), strict=True):
        bound = {"rtol": 0.05, "atol": 0.05} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(one, other, **bound)


def test_edges_that_were_written_to_are_summed_as_they_are() -> None:
    src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
    g = Graph(src, dst, num_nodes=3)
    g.ndata["h"] = torch.tensor([[1.0], [2.0], [4.0]])
    for wanted in ([4, 1, 2], [5, 0, 2]):
        g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
        assert g.ndata["o"].flatten().tolist() == wanted
        dst[0] = 0


def test_gcn_of_a_cpu_is_masked_and_keeps_its_own_row() -> None:
    g, layer = Graph([0, 1, 1], [1, 0, 2], num_nodes=3), GraphConv(2, 3)
    x = torch.randn(3, 2, requires_grad=True)
    degree = torch.tensor([2.0, 2, 2])[:, None].rsqrt()
    rows = layer.lin(x) * degree
    for mask in (torch.ones(3), torch.tensor([1.0, 0.0, 0.5])):
        near = torch.stack((rows[1] * mask[1], rows[0] * mask[0], rows[1] * mask[2]))
        with g.masked(mask):
            found = layer(g, x)
        torch.testing.assert_close(found, (near + rows) * degree + layer.bias)


def test_layers_leave_features_alone() -> None:
    """Those of a part are gathered when they are read first."""
    part = Graph([0, 1, 1], [1, 0, 2], num_nodes=3).subgraph([0, 1])
    read = []

    def fill(name: str) -> Tensor:
        read.append(name)
        return part.nodes()

    part.ndata.fill = part.edata.fill = fill
    part.ndata.names = part.edata.names = ["h"]
    for name, layer in LAYERS.items():
        layer()(part, torch.randn(2, 5 if name == "narrow" else 6))
        assert not read, name


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_a_typed_graphs_relation(name: str) -> None:
    src, dst = torch.randint(9, (2, 30))
    layer, x = LAYERS[name](), torch.randn(9, 5 if name == "narrow" else 6)
    typed = HeteroGraph({("a", "to", "a"): (src, dst)}, {"a": 9})
    wanted = layer(Graph(src, dst, num_nodes=9), x)
    torch.testing.assert_close(layer(typed["to"], x), wanted)
    torch.testing.assert_close(layer(typed, x), wanted)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("wrong", [-4, 9])
def test_ids_of_a_sampled_graph_are_checked_without_a_program(
    name: str, wrong: int
) -> None:
    src, dst = torch.randint(9, (2, 30))
    dst[7] = wrong
    g = Graph(src, dst, num_nodes=9, sampled=True)
    with pytest.raises(ValueError, match=r"dst in \[0, 9\)"):
        LAYERS[name]()(g, torch.randn(9, 5 if name == "narrow" else 6))

"""PyG's arguments beyond the common ones, masks of edges, and PyG's explainers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hector.nn import HGTConv, RGATConv, RGCNConv, explainable, masked

tg = pytest.importorskip("torch_geometric.nn")
NODES, RELATIONS, EDGES = 8, 3, 40


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn() -> tuple[Tensor, Tensor]:
    ends = torch.randint(NODES, (2, EDGES))
    # PyG's LSTM wants edges in the order of their destinations.
    return ends[:, ends[1].argsort()], torch.randint(RELATIONS, (EDGES,))


def same(ours: nn.Module, theirs: nn.Module, args: tuple[Any, ...]) -> None:
    ours.load_state_dict(theirs.state_dict())
    x = args[0].clone().requires_grad_()
    got, want = ours(x, *args[1:]), theirs(x, *args[1:])
    torch.testing.assert_close(got, want)
    weights = torch.linspace(-1, 1, want.numel()).view_as(want)
    mine = torch.autograd.grad(got, [x, *ours.parameters()], weights, allow_unused=True)
    others = [x, *theirs.parameters()]
    found = torch.autograd.grad(want, others, weights, allow_unused=True)
    for a, b in zip(mine, found, strict=True):
        if a is None or b is None:
            assert all(t is None or not t.any() for t in (a, b))
        else:
            torch.testing.assert_close(a, b)


def aggregations() -> dict[str, Callable[[], dict[str, Any]]]:
    from torch_geometric.nn import aggr

    return {
        "mean": lambda: {"aggr": aggr.MeanAggregation()},
        "mul": lambda: {"aggr": aggr.MulAggregation()},
        "median": lambda: {"aggr": aggr.MedianAggregation()},
        "var": lambda: {"aggr": "var"},
        "quantile": lambda: {"aggr": aggr.QuantileAggregation(0.3)},
        "softmax": lambda: {"aggr": "softmax", "aggr_kwargs": {"learn": True}},
        "powermean": lambda: {"aggr": aggr.PowerMeanAggregation(learn=True)},
        "lstm": lambda: {"aggr": aggr.LSTMAggregation(6, 6)},
        "deep sets": lambda: {"aggr": aggr.DeepSetsAggregation(nn.Linear(6, 6))},
        "two": lambda: {"aggr": ["mean", "max"], "aggr_kwargs": {"mode": "sum"}},
        "objects": lambda: {
            "aggr": [aggr.SumAggregation(), aggr.StdAggregation()],
            "aggr_kwargs": {"mode": "mean"},
        },
    }


@pytest.mark.parametrize("name", list(aggregations()))
@pytest.mark.parametrize("blocks", [None, 2])
def test_aggregations(name: str, blocks: int | None) -> None:
    make = aggregations()[name]
    shape = (6, 4, RELATIONS, None, blocks)
    ours, theirs = RGCNConv(*shape, **make()), tg.RGCNConv(*shape, **make())
    x = torch.rand(NODES, 6) + 0.5
    same(ours, theirs, (x, *drawn()))


def test_aggregations_of_node_ids_and_of_two_sides() -> None:
    ends, kinds = drawn()
    pair = torch.rand(NODES, 6), torch.rand(NODES, 5)
    for shape, x in ((NODES, None), ((6, 5), pair)):
        ours = RGCNConv(shape, 4, RELATIONS, aggr="var")
        theirs = tg.RGCNConv(shape, 4, RELATIONS, aggr="var")
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(x, ends, kinds), theirs(x, ends, kinds))


def test_positional_arguments() -> None:
    ends, kinds = drawn()
    x = torch.randn(NODES, 6)
    args: Any = (6, 4, RELATIONS, 2, None, "add", False, False, False)
    same(RGCNConv(*args), tg.RGCNConv(*args), (x, ends, kinds))
    args = (6, 4, RELATIONS, None, 2, None, "within-relation")
    args += ("multiplicative-self-attention", 2, 2, False, 0.1, 0.0, None, False)
    same(RGATConv(*args), tg.RGATConv(*args), (x, ends, kinds))


def test_a_layer_s_aggregation_may_be_changed() -> None:
    x, (ends, kinds) = torch.rand(NODES, 6), drawn()
    conv = RGCNConv(6, 4, RELATIONS, aggr="median")
    for aggr in ("mean", "median", "std", "sum"):
        conv.aggr = aggr
        fresh = RGCNConv(6, 4, RELATIONS, aggr=aggr)
        fresh.load_state_dict(conv.state_dict(), strict=False)
        assert torch.equal(conv(x, ends, kinds), fresh(x, ends, kinds))


def test_unknown_aggregations_are_refused() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        RGCNConv(6, 4, RELATIONS, aggr="nonsense")


def test_adj_t_alone() -> None:
    ends, kinds = drawn()
    keep = (ends[1] * NODES + ends[0]).unique(return_inverse=True)[1]
    first = torch.full((int(keep.max()) + 1,), EDGES)
    first.scatter_reduce_(0, keep, torch.arange(EDGES), "amin")
    ends, kinds = ends[:, first], kinds[first]
    shape = (NODES, NODES)
    adj = torch.sparse_coo_tensor(ends.flip(0), kinds, shape, check_invariants=True)
    conv, x = RGCNConv(6, 4, RELATIONS), torch.randn(NODES, 6)
    torch.testing.assert_close(conv(x, adj), conv(x, ends, kinds))


@pytest.mark.parametrize(
    "options",
    [{}, {"aggr": "max"}, {"aggr": "std"}, {"aggr": "var"}, {"num_blocks": 2}],
)
def test_a_masked_rgcn_has_scaled_messages(options: dict[str, Any]) -> None:
    ends, kinds = drawn()
    conv, x = RGCNConv(6, 4, RELATIONS, bias=False, **options), torch.randn(NODES, 6)
    mask = torch.rand(EDGES, requires_grad=True)
    with masked(conv, mask):
        got = conv(x, ends, kinds)
    # One source an edge: features are scaled instead of messages.
    spread = torch.stack((NODES + torch.arange(EDGES), ends[1]))
    rows = torch.cat((x, x[ends[0]] * mask[:, None]))
    torch.testing.assert_close(got, conv(rows, spread, kinds)[:NODES])
    (grad,) = torch.autograd.grad(got.sum(), [mask])
    (want,) = torch.autograd.grad(conv(rows, spread, kinds)[:NODES].sum(), [mask])
    torch.testing.assert_close(grad, want)
    assert "edge_mask" not in dict(conv.named_parameters())


@pytest.mark.parametrize(
    "options", [{}, {"mod": "additive"}, {"heads": 2}, {"edge_dim": 3}]
)
def test_a_masked_rgat_is_pyg_s(options: dict[str, Any]) -> None:
    from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

    ends, kinds = drawn()
    x, attr = torch.randn(NODES, 6), None
    if "edge_dim" in options:
        attr = torch.randn(EDGES, 3)
    ours, theirs = (c(6, 4, RELATIONS, **options) for c in (RGATConv, tg.RGATConv))
    ours.load_state_dict(theirs.state_dict())
    explainable(ours).load_state_dict(theirs.state_dict())
    plain, mask = ours(x, ends, kinds, attr), nn.Parameter(torch.randn(EDGES))
    for conv in (ours, theirs):
        set_masks(conv, mask, ends, apply_sigmoid=True)
    got, want = ours(x, ends, kinds, attr), theirs(x, ends, kinds, attr)
    torch.testing.assert_close(got, want)
    (mine,), (other,) = (torch.autograd.grad(o.sum(), [mask]) for o in (got, want))
    torch.testing.assert_close(mine, other)
    clear_masks(ours)
    assert torch.equal(ours(x, ends, kinds, attr), plain)
    seen: list[Tensor] = []
    with ours.pyg_mask.register_forward_hook(lambda *a: seen.append(a[2])):
        again = ours(x, ends, kinds, attr)
    assert seen[0] is again, "PyG's explainers read results by hooks"
    with masked(ours, mask.sigmoid()):
        torch.testing.assert_close(ours(x, ends, kinds, attr), want)


class _Model(nn.Module):
    def __init__(self, conv: type) -> None:
        super().__init__()
        self.first, self.last = conv(6, 8, RELATIONS), conv(8, 3, RELATIONS)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        h = self.first(x, edge_index, edge_type).relu()
        out: Tensor = self.last(h, edge_index, edge_type)
        return out


def test_pyg_s_gnn_explainer() -> None:
    from torch_geometric.explain import Explainer, GNNExplainer

    ends, kinds = drawn()
    theirs, ours = _Model(tg.RGATConv), explainable(_Model(RGATConv))
    ours.load_state_dict(theirs.state_dict())
    x, found = torch.randn(NODES, 6), []
    for model in (ours, theirs):
        torch.manual_seed(5)
        explainer = Explainer(
            model,
            algorithm=GNNExplainer(epochs=8),
            explanation_type="model",
            node_mask_type="attributes",
            edge_mask_type="object",
            model_config={
                "mode": "multiclass_classification",
                "task_level": "node",
                "return_type": "raw",
            },
        )
        found.append(explainer(x, ends, index=2, edge_type=kinds))
    torch.testing.assert_close(found[0].edge_mask, found[1].edge_mask)
    torch.testing.assert_close(found[0].node_mask, found[1].node_mask)


def test_attention_and_masks_of_hgt() -> None:
    kinds = [("a", "to", "b"), ("b", "to", "a"), ("a", "same", "a")]
    edges = {k: torch.randint(5, (2, 12)) for k in kinds}
    x = {"a": torch.randn(5, 6), "b": torch.randn(5, 6)}
    conv = HGTConv(6, 4, (["a", "b"], kinds), heads=2)
    want = conv(x, edges)
    got, att = conv(x, edges, return_attention_weights=True)
    for n in x:
        torch.testing.assert_close(got[n], want[n])
    total = torch.zeros(5, 2)
    for kind in (kinds[1], kinds[2]):
        total.index_add_(0, edges[kind][1], att[kind])
    there = torch.cat((edges[kinds[1]][1], edges[kinds[2]][1])).unique()
    torch.testing.assert_close(total[there], torch.ones(len(there), 2))
    ones = {k: torch.ones(12, requires_grad=True) for k in kinds}
    with masked(conv, ones):
        unchanged = conv(x, edges)
        torch.testing.assert_close(unchanged["a"], want["a"])
    assert torch.autograd.grad(unchanged["a"].sum(), [ones[kinds[1]]])[0].any()
    gone = {k: torch.zeros(12) for k in kinds}
    with masked(conv, gone):
        none = conv(x, edges)["b"]
    nothing = conv({**x, "a": torch.randn(5, 6)}, {kinds[2]: edges[kinds[2]]})["b"]
    torch.testing.assert_close(none, nothing)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a model with layers"):
        explainable(nn.Linear(2, 2))

"""The front end: what it reads, and what it says of what it does not."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hector
from hector import (
    HeteroGraph,
    UnsupportedPythonError,
    concat,
    dot_prd,
    edge_softmax,
    exp,
    leakyrelu,
    scatter,
)

NODES, RELATIONS = 9, 3


def edges() -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(1)
    ends = torch.randint(0, NODES - 1, (2, 30), generator=gen)
    return ends, torch.randint(0, RELATIONS, (30,), generator=gen)


ENDS, KIND = edges()
G = HeteroGraph.from_pyg(ENDS, KIND, num_nodes=NODES, num_relations=RELATIONS)


def rand(*shape: int) -> Tensor:
    gen = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, generator=gen, dtype=torch.float64).requires_grad_()


def same(got: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    ones = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view_as(want)
    mine = torch.autograd.grad(got, inputs, ones)
    theirs = torch.autograd.grad(want, inputs, ones)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def attention(x: Tensor, w: Tensor, w_s: Tensor, w_t: Tensor) -> Tensor:
    """Listing 3.1 in PyTorch: attention of each edge, in the caller's edge order."""
    hs = torch.einsum("ek,ekn->en", x[ENDS[0]], w[KIND])
    ht = torch.einsum("ek,ekn->en", x[ENDS[1]], w[KIND])
    score = F.leaky_relu((hs * w_s[KIND]).sum(1) + (ht * w_t[KIND]).sum(1), 0.01)
    power = score.exp()
    total = power.new_zeros(NODES).index_add(0, ENDS[1], power)
    return (power / total[ENDS[1]])[:, None]


def own_softmax(g: Any) -> None:
    for e in g.edges():
        e["att"] = exp(e["att"])
    for n in g.dst_nodes():
        n["att_sum"] = 0.0
        for e in n.incoming_edges():
            n["att_sum"] += e["att"]
    for e in g.edges():
        e["att"] /= e.dst["att_sum"]


@hector.compile
def listing(g: Any, feature: Any, W: Any, w_s: Any, w_t: Any) -> Any:
    for e in g.edges():
        hs = e.src.feature * W[e.etype]
        atts = dot_prd(hs, w_s[e.etype])
        ht = e.dst.feature * W[e.etype]
        attt = dot_prd(ht, w_t[e.etype])
        e["att"] = leakyrelu(atts + attt)
    own_softmax(g)
    return g.edata["att"]


@hector.compile
def listing_built_in(g: Any, feature: Any, W: Any, w_s: Any, w_t: Any) -> Any:
    for e in g.edges():
        e["att"] = leakyrelu(
            dot_prd(e.src.feature * W[e.etype], w_s[e.etype])
            + dot_prd(e.dst.feature * W[e.etype], w_t[e.etype])
        )
    edge_softmax(g)
    return g.edata["att"]


@pytest.mark.parametrize("layer", [listing, listing_built_in])
def test_listing_3_1(layer: Callable[..., Tensor]) -> None:
    x, w, s, t = rand(NODES, 4), rand(RELATIONS, 4, 6), rand(RELATIONS, 6), rand(3, 6)
    same(layer(G, x, w, s, t), attention(x, w, s, t), [x, w, s, t])


def test_a_large_score_does_not_overflow() -> None:
    """A softmax written without a shift gets one."""
    x, w, s = rand(NODES, 4) * 1e3, rand(RELATIONS, 4, 6), rand(RELATIONS, 6)
    out = listing(G, x, w, s, s)
    assert bool(torch.isfinite(out).all())
    total = out.new_zeros(NODES, 1).index_add(0, ENDS[1], out)
    assert torch.allclose(total[ENDS[1]], torch.ones_like(out))


@hector.compile
def pyg_style(x: Any, edge_index: Any, edge_type: Any, weight: Any, bias: Any) -> Any:
    src, dst = edge_index
    message = torch.bmm(x[src].unsqueeze(1), weight[edge_type]).squeeze(1)
    out = scatter(message, dst, dim=0, reduce="mean")
    return F.relu(out + bias)


def test_pyg_style_code() -> None:
    x, w, bias = rand(NODES, 4), rand(RELATIONS, 4, 6), rand(6)
    message = torch.bmm(x[ENDS[0]].unsqueeze(1), w[KIND]).squeeze(1)
    total = message.new_zeros(NODES, 6).index_add(0, ENDS[1], message)
    count = torch.bincount(ENDS[1], minlength=NODES).clamp(min=1)[:, None]
    want = F.relu(total / count + bias)
    same(pyg_style(x, ENDS, KIND, w, bias), want, [x, w, bias])


@hector.compile
def by_type(g: Any, feature: Any, weight: Any, w_node: Any) -> Any:
    for n in g.nodes():
        n["h"] = n.feature @ w_node[n.ntype]
    for e in g.edges():
        e["msg"] = e.src["h"] @ weight[e.etype]
    for n in g.dst_nodes():
        n["out"] = 0.0
        for e in n.incoming_edges():
            n["out"] += e["msg"]
    return g.ndata["out"]


def test_dicts_by_node_type_and_by_relation() -> None:
    relations = (("a", "to", "b"), ("b", "to", "b"))
    g = HeteroGraph.from_arrays(
        [0, 1, 2, 3], [3, 4, 4, 2], [0, 0, 1, 1], node_type=[0, 0, 1, 1, 1]
    )
    g = g.replace(node_type_names=("a", "b"), edge_type_names=relations)
    x = {"b": rand(3, 2), "a": rand(2, 2)}
    w = {"a__to__b": rand(2, 4), ("b", "to", "b"): rand(2, 4) * 2}
    w_node = rand(2, 2, 2)
    got = by_type(g, x, w, w_node)
    rows = torch.cat([x["a"] @ w_node[0], x["b"] @ w_node[1]])
    want = torch.zeros(5, 4, dtype=torch.float64)
    for i, (s, d) in enumerate(zip(g.src.tolist(), g.dst.tolist(), strict=True)):
        kind = list(w.values())[int(g.edge_type[i])]
        want = want.index_add(0, torch.tensor([d]), rows[s : s + 1] @ kind)
    same(got, want, [*x.values(), *w.values(), w_node])
    with pytest.raises(hector.frontend.FrontendError, match="one tensor a node type"):
        by_type(g, {"c": rand(5, 2)}, w, w_node)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 6)
        self.weight = nn.Parameter(rand(RELATIONS, 6, 2).detach())

    @hector.compile
    def forward(self, g: Any, feature: Any) -> Any:
        for n in g.nodes():
            n["h"] = self.lin(n.feature)
        for e in g.edges():
            e["msg"] = concat(e.src["h"], e.dst["h"]) @ self.both(e)
        for n in g.dst_nodes():
            n["out"] = 0.0
            for e in n.incoming_edges():
                n["out"] += e["msg"]
        return g.ndata["out"]

    def both(self, e: Any) -> Any:
        return self.joined[e.etype]


def test_a_module_with_parameters_and_methods() -> None:
    layer = Layer().double()
    layer.joined = nn.Parameter(rand(RELATIONS, 12, 2).detach())
    x = rand(NODES, 4)
    h = layer.lin(x)
    ends = torch.cat([h[ENDS[0]], h[ENDS[1]]], 1)
    message = torch.einsum("ek,ekn->en", ends, layer.joined[KIND])
    want = message.new_zeros(NODES, 2).index_add(0, ENDS[1], message)
    inputs = [x, layer.lin.weight, layer.lin.bias, layer.joined]
    same(layer.forward(G, x), want, inputs)


def test_rows_of_edges_keep_the_callers_order() -> None:
    @hector.compile
    def scaled(g: Any, feature: Any, edge_scale: Any) -> Any:
        for e in g.edges():
            e["out"] = e.src.feature * e.edge_scale
        return g.edata["out"]

    x, scale = rand(NODES, 4), rand(30)
    same(scaled(G, x, scale), x[ENDS[0]] * scale[:, None], [x, scale])


# Errors. Each layer fails at the line that ends in "# here".


def while_loop(g: Any, feature: Any) -> Any:
    while True:  # here
        return feature


def on_values(g: Any, feature: Any) -> Any:
    for n in g.nodes():
        if n.feature > 0:  # here
            n["out"] = n.feature
    return g.ndata["out"]


def unknown_name(g: Any, feature: Any) -> Any:
    for n in g.nodes():
        n["out"] = featrue * 2  # here # noqa: F821
    return g.ndata["out"]


def never_set(g: Any, feature: Any) -> Any:
    for e in g.edges():
        e["out"] = e.src["h"]  # here
    return g.edata["out"]


def widths_differ(g: Any, feature: Any) -> Any:
    for e in g.edges():
        e["out"] = concat(e.src.feature, e.dst.feature) + e.src.feature  # here
    return g.edata["out"]


def unknown_function(g: Any, feature: Any) -> Any:
    for n in g.nodes():
        n["out"] = torch.cumsum(n.feature, 0)  # here
    return g.ndata["out"]


def accumulate_outside(g: Any, feature: Any) -> Any:
    for n in g.dst_nodes():
        n["out"] = 0.0
        for e in n.incoming_edges():
            n["out"] -= e.src.feature  # here
    return g.ndata["out"]


def wrong_loop(g: Any, feature: Any) -> Any:
    for n in [1, 2]:  # here
        n["out"] = n.feature
    return g.ndata["out"]


def too_long(g: Any, feature: Any) -> Any:
    for i in range(1000):  # here
        feature = feature + i
    return feature


def node_data_on_edges(g: Any, feature: Any) -> Any:
    for e in g.edges():
        e["out"] = e.src.feature
    for n in g.nodes():
        n["out"] = g.edata["out"]  # here
    return g.ndata["out"]


def stars(g: Any, feature: Any) -> Any:
    return hector.relu(**{"x": feature})  # here


def bad_power(g: Any, feature: Any) -> Any:
    for n in g.nodes():
        n["out"] = n.feature**3  # here
    return g.ndata["out"]


ERRORS = {
    while_loop: "While is not supported",
    on_values: "a comparison of tensor values is not supported",
    unknown_name: "featrue is not defined",
    never_set: "data 'h' was never set",
    widths_differ: "expected rows of equal or broadcastable shape",
    unknown_function: "'cumsum' is not supported",
    accumulate_outside: "expected += on node data inside an edge loop",
    wrong_loop: "expected a loop over g.edges",
    too_long: "a loop of 1000 steps is too long",
    node_data_on_edges: "node data cannot hold edge values",
    stars: "arguments are not supported",
    bad_power: "expected power 2, 0.5, -0.5 or -1, got 3",
}


@pytest.mark.parametrize("function", list(ERRORS), ids=lambda f: f.__name__)
def test_errors_show_the_line(function: Callable[..., Any]) -> None:
    lines, first = inspect.getsourcelines(function)
    at = first + next(i for i, line in enumerate(lines) if "# here" in line)
    with pytest.raises(UnsupportedPythonError) as caught:
        hector.compile(function)(G, rand(NODES, 4))
    text = str(caught.value)
    assert text.startswith(f"{Path(__file__)}:{at}: ")
    assert ERRORS[function] in text
    assert text.splitlines()[1].strip() in "".join(lines)


def test_other_errors() -> None:
    with pytest.raises(UnsupportedPythonError, match="expected a function"):
        hector.compile(lambda g, feature: feature)(G, rand(NODES, 4))
    scope: dict[str, Any] = {}
    exec("def nowhere(g, feature):\n    return feature", scope)
    with pytest.raises(UnsupportedPythonError, match="define it in a file"):
        hector.compile(scope["nowhere"])(G, rand(NODES, 4))
    with pytest.raises(RuntimeError, match="only inside a function decorated"):
        hector.dot_prd(1, 2)
    with pytest.raises(hector.frontend.FrontendError, match="expected a HeteroGraph"):
        hector.compile(too_long)(None, rand(NODES, 4))
    with pytest.raises(TypeError):
        listing(G)

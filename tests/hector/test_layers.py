"""Layers that the compiler was not made for against plain PyTorch, in float64: outputs
and gradients, under each setting, without one operation left to PyTorch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu, leaky_relu

from hector.graph import HeteroGraph
from hector.passes.pipeline import ALL_SETTINGS, Optimizations
from recipes import hector_layers

NODES, RELATIONS, IN, HEADS, WIDTH = 14, 5, 5, 2, 3
OUT = HEADS * WIDTH


def graph() -> HeteroGraph:
    """Duplicate edges, self loops, isolated nodes, an empty relation, one of one
    edge."""
    gen = torch.Generator().manual_seed(3)
    src, dst = torch.randint(0, NODES - 3, (2, 50), generator=gen)
    kind = torch.randint(0, RELATIONS - 2, (50,), generator=gen)
    src[:4], dst[:4], kind[:4] = 2, 2, 1
    kind[49] = RELATIONS - 2
    return HeteroGraph.from_arrays(
        src, dst, kind, num_nodes=NODES, num_edge_types=RELATIONS
    )


G = graph()


def parameters(seed: int = 0) -> Callable[..., Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        value = torch.randn(*shape, generator=gen, dtype=torch.float64)
        return value.requires_grad_()

    return make


def summed(rows: Tensor) -> Tensor:
    return rows.new_zeros(NODES, *rows.shape[1:]).index_add(0, G.dst, rows)


def softmax(score: Tensor) -> Tensor:
    """Over the in-edges of each node, the plain way."""
    power = (score - score.max()).exp()
    return power / summed(power)[G.dst]


def typed(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("ek,ekn->en", x, w[G.edge_type])


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], HEADS, WIDTH)


def gcn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    degree = torch.bincount(G.dst, minlength=NODES).double() + 1
    scale = degree.rsqrt()[:, None]
    h = scale * (x @ weight)
    return scale * (h + summed(h[G.src])) + bias


def gat(x: Tensor, weight: Tensor, left: Tensor, right: Tensor, n: int) -> Tensor:
    h = heads(x @ weight)
    score = (h * left).sum(-1)[G.src] + (h * right).sum(-1)[G.dst]
    att = softmax(leaky_relu(score, 0.2))[:, :, None]
    return elu(summed(att * h[G.src]).flatten(1))


def gatv2(x: Tensor, w_src: Tensor, w_dst: Tensor, att: Tensor, n: int) -> Tensor:
    left, right = heads(typed(x[G.src], w_src)), heads(typed(x[G.dst], w_dst))
    score = (leaky_relu(left + right, 0.2) * att[G.edge_type]).sum(-1)
    return summed(softmax(score)[:, :, None] * left).flatten(1)


def comp_gcn(x: Tensor, relation: Tensor, weight: Tensor, loop: Tensor) -> Tensor:
    message = typed(x[G.src] - relation[G.edge_type], weight)
    pair = G.edge_type * NODES + G.dst
    count = torch.bincount(pair, minlength=RELATIONS * NODES)[pair]
    return torch.tanh(x @ loop + summed(message / count[:, None]))


def simple_hgn(x: Tensor, p: Any, n: int) -> Tensor:
    h = heads(x @ p.weight)
    kind = (p.edge @ p.w_edge).view(RELATIONS, HEADS, WIDTH)[G.edge_type]
    score = (h[G.src] * p.att_src).sum(-1) + (h[G.dst] * p.att_dst).sum(-1)
    score = leaky_relu(score + (kind * p.att_edge).sum(-1), 0.2)
    out = summed(softmax(score)[:, :, None] * h[G.src]).flatten(1)
    return elu(out + x @ p.residual)


def edge_mlp(x: Tensor, weight: Tensor, hidden: Tensor) -> Tensor:
    ends = torch.cat([x[G.src], x[G.dst]], 1)
    return summed(torch.tanh(typed(ends, weight)) @ hidden)


def _hgn_arguments(p: Callable[..., Tensor]) -> tuple[Any, ...]:
    names = SimpleNamespace(weight=p(IN, OUT), residual=p(IN, OUT), edge=p(R, 4))
    names.att_src, names.att_dst = p(HEADS, WIDTH), p(HEADS, WIDTH)
    names.w_edge, names.att_edge = p(4, OUT), p(HEADS, WIDTH)
    return names, HEADS


R = RELATIONS
LAYERS: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Any, ...]]]] = {
    "gcn": (gcn, lambda p: (p(IN, OUT), p(OUT))),
    "gat": (gat, lambda p: (p(IN, OUT), p(HEADS, WIDTH), p(HEADS, WIDTH), HEADS)),
    "relational_gatv2": (
        gatv2,
        lambda p: (p(R, IN, OUT), p(R, IN, OUT), p(R, HEADS, WIDTH), HEADS),
    ),
    "comp_gcn": (comp_gcn, lambda p: (p(R, IN), p(R, IN, OUT), p(IN, OUT))),
    "simple_hgn": (simple_hgn, _hgn_arguments),
    "edge_mlp": (edge_mlp, lambda p: (p(R, 2 * IN, OUT), p(OUT, OUT))),
}


def leaves(values: tuple[Any, ...]) -> list[Tensor]:
    found: list[Tensor] = []
    for v in values:
        inner = tuple(vars(v).values()) if isinstance(v, SimpleNamespace) else (v,)
        found += [t for t in inner if isinstance(t, Tensor)]
    return found


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, slope)]


@pytest.mark.parametrize("settings", [None, *ALL_SETTINGS], ids=str)
@pytest.mark.parametrize("name", list(LAYERS))
def test_against_pytorch(name: str, settings: Optimizations | None) -> None:
    plain, arguments = LAYERS[name]
    make = parameters()
    x, rest = make(NODES, IN), arguments(make)
    inputs = [x, *leaves(rest)]
    layer = getattr(hector_layers, name).with_options(optimizations=settings)
    got = with_gradients(layer(G, x, *rest), inputs)
    want = with_gradients(plain(x, *rest), inputs)
    for mine, expected in zip(got, want, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-10)
    report = layer.executable(G, x, *rest).report
    assert report.fallbacks == 0
    assert report.backward is not None
    if settings is not None:
        assert report.optimizations == settings


def test_compaction_and_reordering_shorten_a_typed_message() -> None:
    """What the optimizations are for: fewer rows, and products of parameters."""
    make = parameters()
    arguments = (make(NODES, IN), make(R, IN), make(R, IN, OUT), make(IN, OUT))
    texts = {}
    for s in ALL_SETTINGS:
        layer = hector_layers.comp_gcn.with_options(optimizations=s)
        texts[str(s)] = str(layer.executable(G, *arguments).report.forward)
    assert "src_pair[" not in texts["none"]
    assert "src_pair[" in texts["compact"]
    assert texts["reorder"] != texts["none"]

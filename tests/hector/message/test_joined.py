"""Layers of a block's relations that are sent at once, against one call a relation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hector.message import HeteroGraph, joined
from hector.message import functions as fn
from hector.message import nn as dglnn
from hector.message.frame import EdgeFrame, Frame
from hector.message.typed import CROSS

KINDS = [("a", "r", "a"), ("a", "s", "b"), ("b", "t", "a"), ("b", "u", "b")]
SOURCES, ENDS, WIDTH = {"a": 20, "b": 12}, {"a": 7, "b": 5}, 6
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "right": lambda: dglnn.GraphConv(WIDTH, 4, norm="right"),
    "both": lambda: dglnn.GraphConv(WIDTH, 8),
    "mean": lambda: dglnn.SAGEConv(WIDTH, 8, "mean"),
    "narrow": lambda: dglnn.SAGEConv(WIDTH, 4, "mean", feat_drop=0.0),
    "gcn": lambda: dglnn.SAGEConv(WIDTH, 4, "gcn"),
    "pool": lambda: dglnn.SAGEConv(WIDTH, 4, "pool"),
    "gat": lambda: dglnn.GATConv(WIDTH, 3, 2, residual=True),
    "wide": lambda: dglnn.GraphConv(WIDTH, 8, norm="right"),
    "no bias": lambda: dglnn.SAGEConv(WIDTH, 8, "mean", bias=False),
    "gat alone": lambda: dglnn.GATConv(WIDTH, 3, 2),
    "relu": lambda: dglnn.SAGEConv(WIDTH, 8, "mean", activation=torch.relu),
}


def block(**changed: tuple[Tensor, Tensor]) -> HeteroGraph:
    """Some relation has few edges and one has none."""
    gen, edges = torch.Generator().manual_seed(0), {}
    for kind, count in zip(KINDS, (60, 3, 30, 0), strict=True):
        edges[kind] = changed.get(kind[1]) or (
            torch.randint(SOURCES[kind[0]], (count,), generator=gen),
            torch.randint(ENDS[kind[2]], (count,), generator=gen),
        )
    sides = [
        {n: Frame(size, torch.device("cpu"), "node") for n, size in sizes.items()}
        for sizes in (SOURCES, ENDS)
    ]
    edata = {k: EdgeFrame(e[0].numel(), e[0].device) for k, e in edges.items()}
    return HeteroGraph.block(*sides, edges, edata)


def layers_of(name: str) -> dglnn.HeteroGraphConv:
    torch.manual_seed(0)
    return dglnn.HeteroGraphConv({r: LAYERS[name]() for _, r, _ in KINDS}).double()


def rows() -> dict[str, Tensor]:
    return {
        n: torch.randn(size, WIDTH, dtype=torch.float64, requires_grad=True)
        for n, size in SOURCES.items()
    }


def one_by_one(
    conv: dglnn.HeteroGraphConv, g: HeteroGraph, h: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The sum of what each relation's layer returns."""
    found: dict[str, Any] = dict.fromkeys(ENDS, 0)
    for kind in KINDS:
        pair = h[kind[0]], h[kind[2]][: ENDS[kind[2]]]
        found[kind[2]] = found[kind[2]] + conv.mods[kind[1]](g[kind], pair)
    return found


def derivatives(conv: nn.Module, out: dict[str, Tensor], h: Any) -> list[Tensor]:
    """Gradients, and those of the gradients' squares."""
    inputs = [*h.values(), *conv.parameters()]
    total = sum(t.tanh().sum() for t in out.values())
    options: Any = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(total, inputs, create_graph=True, **options)
    twice = sum(g.square().sum() for g in first)
    return [*first, *torch.autograd.grad(twice, inputs, **options)]


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_two_derivatives(name: str) -> None:
    conv, g, h = layers_of(name), block(), rows()
    got, want = conv(g, h), one_by_one(conv, g, h)
    for n in ENDS:
        torch.testing.assert_close(got[n], want[n])
    pairs = zip(derivatives(conv, got, h), derivatives(conv, want, h), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other)


def test_means_and_layers_of_two_widths() -> None:
    conv, g, h = layers_of("mean"), block(), rows()
    whole = conv(g, h)
    conv.aggregate = "mean"
    for n in ENDS:
        torch.testing.assert_close(conv(g, h)[n], whole[n] / 2)
    conv.aggregate = "max"
    pair = h["a"], h["a"][: ENDS["a"]]
    other = h["b"], pair[1]
    want = torch.maximum(conv.mods["r"](g["r"], pair), conv.mods["t"](g["t"], other))
    torch.testing.assert_close(conv(g, h)["a"], want)


def test_parameters_of_two_dtypes_are_refused_as_one_by_one() -> None:
    conv, g, h = layers_of("mean"), block(), rows()
    conv.mods["r"].float()
    with pytest.raises(RuntimeError):
        one_by_one(conv, g, h)
    with pytest.raises(RuntimeError):
        conv(g, h)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The destinations of each sum that runs."""
    from hector.message.direct import Passing

    found, seen = [], Passing.__call__

    def call(passing: Passing, r: Any, *args: Any) -> Tensor:
        found.append(r.num_dst_nodes())
        return seen(passing, r, *args)

    monkeypatch.setattr(Passing, "__call__", call)
    return found


@pytest.mark.parametrize("name", ["right", "gat"])
def test_one_sum_of_all_relations(name: str, sums: list[int]) -> None:
    conv, g = layers_of(name), block()
    conv(g, rows())
    without_edges = ENDS["b"] if name == "gat" else 0
    assert sums == [2 * sum(ENDS.values()) - without_edges]


def test_layers_of_several_kinds_are_sent_by_kind(sums: list[int]) -> None:
    conv, g, h = layers_of("right"), block(), rows()
    conv.mods["t"] = dglnn.GraphConv(WIDTH, 4, norm="none").double()
    conv.mods["t"].set_allow_zero_in_degree(True)
    want = one_by_one(conv, g, h)
    sums.clear()
    got = conv(g, h)
    assert sorted(sums) == [ENDS["a"], ENDS["a"] + 2 * ENDS["b"]]
    torch.testing.assert_close(got["a"], want["a"])


def test_a_layer_with_a_hook_is_called(sums: list[int]) -> None:
    conv, g, h = layers_of("right"), block(), rows()
    want = conv(g, h)["a"]
    hooked: Any = conv.mods["t"]
    hooked.register_forward_hook(lambda m, given, out: out + 1)
    sums.clear()
    torch.testing.assert_close(conv(g, h)["a"], want + 1)
    assert sorted(sums) == [ENDS["a"], ENDS["a"] + 2 * ENDS["b"]]


def test_masked_edges_are_masked() -> None:
    conv, g, h = layers_of("mean"), block(), rows()
    whole = conv(g, h)["a"]
    with g["r"].masked(torch.zeros(60, dtype=torch.float64)):
        got, want = conv(g, h)["a"], one_by_one(conv, g, h)["a"]
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got, whole)


def test_edges_that_are_written_to_are_read_again() -> None:
    conv, g, h = layers_of("right"), block(), rows()
    conv(g, h)
    for kind in KINDS[:3]:
        g[kind].edges()[1].copy_(g[kind].edges()[1].flip(0))
        torch.testing.assert_close(conv(g, h)["a"], one_by_one(conv, g, h)["a"])


def test_an_id_of_another_relation_is_out_of_range() -> None:
    """In the row of all destinations it would be one of the next relation's."""
    bad = torch.tensor([0, 1, 2]), torch.tensor([0, ENDS["b"], 1])
    with pytest.raises(ValueError, match=r"expected dst in \[0, 64\), got -1"):
        layers_of("right")(block(s=bad), rows())


def test_rows_of_another_number_are_refused() -> None:
    h = rows()
    h["a"], h["b"] = h["a"][:-1], torch.cat((h["b"], h["b"][:1]))
    with pytest.raises(ValueError, match="expected 'h' with 20 node rows, got"):
        layers_of("right")(block(), h)


def _frozen(conv: Any) -> None:
    conv.mods["r"].fc.requires_grad_(False)
    conv.mods["t"].attn_l.requires_grad_(False)
    conv.mods["s"].bias.requires_grad_(False)


def _twice(conv: Any) -> None:
    conv.mods["t"] = conv.mods["r"]


def _normed(conv: Any) -> None:
    nn.utils.parametrizations.weight_norm(conv.mods["r"].fc)
    nn.utils.parametrizations.weight_norm(conv.mods["t"], "attn_l", dim=1)


def _hooked(conv: Any) -> None:
    conv.mods["r"].fc.register_forward_hook(lambda m, given, out: out * 2)


def _pairs(conv: Any) -> None:
    made = dglnn.GATConv((WIDTH, WIDTH), 3, 2, allow_zero_in_degree=True)
    conv.mods["s"] = made.double()


def _other_slope(conv: Any) -> None:
    conv.mods["t"].slope = 0.4


def _no_bias(conv: Any) -> None:
    for name in ("r", "u"):
        conv.mods[name].bias = None


def _with_bias(conv: Any) -> None:
    conv.mods["r"].fc = nn.Linear(WIDTH, 6).double()


ALTERED = [
    _with_bias,
    _frozen,
    _twice,
    _normed,
    _hooked,
    _pairs,
    _other_slope,
    _no_bias,
]


@pytest.mark.parametrize("alter", ALTERED)
def test_attention_of_altered_layers(alter: Callable[[Any], None]) -> None:
    conv, g, h = layers_of("gat alone"), block(), rows()
    alter(conv)
    got, want = conv(g, h), one_by_one(conv, g, h)
    for n in ENDS:
        torch.testing.assert_close(got[n], want[n])
    learned = {k: p for k, p in conv.named_parameters() if p.requires_grad}
    first, second = (
        torch.autograd.grad(
            sum(t.tanh().sum() for t in out.values()),
            [*h.values(), *learned.values()],
            allow_unused=True,
            materialize_grads=True,
        )
        for out in (got, want)
    )
    for mine, other in zip(first, second, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("aggregate", ["mean", "max", "stack", lambda parts, _: parts])
def test_attention_is_joined_as_its_parts_are(aggregate: Any) -> None:
    conv, g, h = layers_of("gat alone"), block(), rows()
    parts = {}
    for kind in KINDS:
        pair = h[kind[0]], h[kind[2]][: ENDS[kind[2]]]
        parts.setdefault(kind[2], []).append(conv.mods[kind[1]](g[kind], pair))
    conv.aggregate = aggregate
    for n, got in conv(g, h).items():
        if callable(aggregate):
            torch.testing.assert_close(got, parts[n])
        else:
            torch.testing.assert_close(got, CROSS[aggregate](torch.stack(parts[n])))


def test_attention_gives_every_parameter_a_gradient() -> None:
    """Those along relations without edges too: replicas count on it."""
    conv, none = layers_of("gat alone"), torch.empty(0, dtype=torch.int64)
    out = conv(block(s=(none, none)), rows())
    sum(t.sum() for t in out.values()).backward()
    assert all(p.grad is not None for p in conv.parameters())
    assert not conv.mods["s"].fc.weight.grad.any()


def test_attention_without_any_edges() -> None:
    conv, none = layers_of("gat alone"), torch.empty(0, dtype=torch.int64)
    with torch.no_grad():
        for layer in conv.mods.values():
            layer.bias += 1
    out = conv(block(r=(none, none), s=(none, none), t=(none, none)), rows())
    for n, got in out.items():
        torch.testing.assert_close(got, torch.full_like(got, 2.0))
        assert len(got) == ENDS[n]


def test_attention_under_transforms_and_autocast() -> None:
    conv, g, h = layers_of("gat alone"), block(), rows()

    def total(call: Any, x: Tensor) -> Tensor:
        return sum(t.tanh().sum() for t in call({**h, "a": x}).values())

    got, want = (
        torch.func.grad(partial(total, call))(h["a"])
        for call in (lambda x: conv(g, x), lambda x: one_by_one(conv, g, x))
    )
    torch.testing.assert_close(got, want)
    conv, h = conv.float(), {n: x.detach().float() for n, x in h.items()}
    with torch.autocast("cpu", torch.bfloat16):
        mine, other = conv(g, h), one_by_one(conv, g, h)
    for n in ENDS:
        assert mine[n].dtype is other[n].dtype
        torch.testing.assert_close(mine[n], other[n])


def test_attention_of_given_parameters() -> None:
    conv, g, h = layers_of("gat alone"), block(), rows()
    given = {k: p.detach() * 1.5 for k, p in conv.named_parameters()}
    got = torch.func.functional_call(conv, given, (g, h))
    conv.load_state_dict(given)
    for n, want in one_by_one(conv, g, h).items():
        torch.testing.assert_close(got[n], want)


def test_rows_of_attention_are_checked() -> None:
    h = rows()
    h["a"], h["b"] = h["a"][:-1], torch.cat((h["b"], h["b"][:1]))
    with pytest.raises(ValueError, match="expected 'h' with 20 node rows, got"):
        layers_of("gat")(block(), h)


@fn.pure
def _attend(e: Any, key: str, value: str, how: str = "mul") -> dict[str, Any]:
    score = (e.src[key] * e.dst["q"]).sum(-1, keepdim=True)
    share = e.softmax(score)
    return {"m": share * e.src[value] if how == "mul" else share + e.src[value]}


@fn.pure
def _of_edges(e: Any) -> dict[str, Any]:
    return {"m": e.src["k_r"] * e.data["w"]}


@fn.pure
def _times(e: Any, key: str, factor: Tensor) -> dict[str, Any]:
    return {"m": e.src[key] * factor}


@fn.pure
def _scaled(e: Any, key: str, factor: float) -> dict[str, Any]:
    return {"m": e.src[key] * factor}


@fn.pure
def _in_memory(e: Any, key: str) -> dict[str, Any]:
    return {"m": e.src[key].cumsum(0)}


MESSAGES: dict[str, tuple[list[Any], int]] = {
    "names": ([_attend(f"k_{r}", f"v_{r}") for r in "rstu"], 1),
    "one name twice": (
        [_attend(f"k_{r}", f"{'vkvk'[i]}_{r}") for i, r in enumerate("rstu")],
        2,
    ),
    "another value": (
        [_attend(f"k_{r}", f"v_{r}", "mul" if r < "t" else "add") for r in "rstu"],
        2,
    ),
    "another number": ([_scaled(f"k_{r}", 2.0 + (r > "s")) for r in "rstu"], 2),
    "edges": ([_of_edges(), *(_attend(f"k_{r}", f"v_{r}") for r in "stu")], 1),
    "tensors": (
        [_times(f"k_{r}", torch.full((), 2.0 + i)) for i, r in enumerate("rstu")],
        0,
    ),
    "in memory": ([_in_memory(f"k_{r}") for r in "rstu"], 0),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "ONE_BY_ONE", ())


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("cross", ["sum", "mean", "max", "stack"])
@pytest.mark.parametrize("name", MESSAGES)
def test_pure_messages_are_sent_at_once(name: str, cross: str, sums: list[int]) -> None:
    g, gen = block(), torch.Generator().manual_seed(1)
    messages, programs = MESSAGES[name]

    def number(count: int) -> Tensor:
        made = torch.randn(count, 2, 3, dtype=torch.float64, generator=gen)
        return made.requires_grad_()

    inputs = []
    for a, r, b in KINDS:
        for letter in "kv":
            inputs.append(number(SOURCES[a]))
            g[r].srcdata[f"{letter}_{r}"] = inputs[-1]
        if "q" not in g[r].dstdata:
            inputs.append(number(ENDS[b]))
            g[r].dstdata["q"] = inputs[-1]
        inputs.append(number(g.num_edges(r))[:, :1])
        g[r].edata["w"] = inputs[-1]
    outs = {r: f"o_{b}" for _, r, b in KINDS}
    calls = {
        r: (m, fn.sum("m", outs[r]))
        for (_, r, _), m in zip(KINDS, messages, strict=True)
    }
    parts: dict[str, list[Tensor]] = {}
    for _, r, b in KINDS:
        parts.setdefault(b, []).append(g[r].propagate(*calls[r])[outs[r]])
    want = {n: CROSS[cross](torch.stack(p)) for n, p in parts.items()}
    sums.clear()
    # In another order than the graph's.
    g.multi_update_all(dict(reversed(calls.items())), cross)
    assert len(sums) == programs
    got = {n: g.dstnodes[n].data[f"o_{n}"] for n in ENDS}
    grads = []
    for out in (got, want):
        for n in ENDS:
            torch.testing.assert_close(out[n], want[n])
        total: Any = sum(t.tanh().sum() for t in out.values())
        options: Any = {"allow_unused": True, "materialize_grads": True}
        grads.append(torch.autograd.grad(total, inputs, **options))
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("cross", ["max", "sum"])
def test_what_arrives_may_be_written_to(cross: str) -> None:
    g, x = block(), torch.randn(SOURCES["a"], 3, requires_grad=True)
    g["r"].srcdata["k_r"] = x
    for kinds in ("r", "rs"):
        calls = {r: (_scaled("k_r", 2.0), fn.sum("m", "o")) for r in kinds}
        g.multi_update_all(calls, cross)
        out = g.dstnodes["a"].data["o"]
        want = out.detach().relu()
        torch.testing.assert_close(out.relu_(), want)
        out.sum().backward()

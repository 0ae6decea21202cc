"""Compiled functions whose module, globals or arguments change between calls."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hector
from hector.frontend.guards import snapshot
from hector.graph import HeteroGraph

SCALE = 2.0
G = HeteroGraph.from_arrays([0, 1, 2, 2], [1, 2, 0, 1], [0, 0, 1, 1], num_nodes=3)


def rows(width: int = 2) -> Tensor:
    return torch.arange(3.0 * width, dtype=torch.float64).view(3, width) + 1


def sources(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape).index_add(0, G.dst, x[G.src])


class Slope(nn.Module):
    """Its numbers, and which of two parameters it uses, may change."""

    def __init__(self, slope: float = 1.0) -> None:
        super().__init__()
        self.slope, self.factors, self.sizes = slope, [1.0, 3.0], {"a": 2.0}
        self.options = SimpleNamespace(shift=1.0)
        self.w = nn.Parameter(torch.full((2, 2), 1.0, dtype=torch.float64))
        self.v = nn.Parameter(torch.full((2, 2), 5.0, dtype=torch.float64))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.slope

    def plain(self, feature: Tensor) -> Tensor:
        made = sources(feature) @ self.w * self.slope * self.factors[1]
        return made * self.sizes["a"] + self.options.shift


@hector.compile
def layer(g: Any, module: Any, feature: Tensor) -> Tensor:
    for n in g.dst_nodes():
        n["h"] = 0.0
        for e in n.incoming_edges():
            n["h"] += e.src.feature
    made = (g.ndata["h"] @ module.w) * module.slope * module.factors[1]
    return made * module.sizes["a"] + module.options.shift


@hector.compile
def by_global(g: Any, feature: Tensor) -> Tensor:
    return g.ndata["feature"] * SCALE


@hector.compile
def by_number(g: Any, feature: Tensor, power: Any) -> Tensor:
    return g.ndata["feature"] * (power if isinstance(power, float) else 10.0)


@hector.compile
def by_namespace(g: Any, feature: Tensor, p: Any) -> Tensor:
    return g.ndata["feature"] * p.scale


@hector.compile
def by_weight(g: Any, feature: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return g.ndata["feature"] @ weight + bias


@hector.compile
def by_scale(g: Any, feature: Tensor, scale: Tensor) -> Tensor:
    return g.ndata["feature"] * scale


def changed(module: Slope, name: str) -> None:
    if name == "slope":
        module.slope = 7.0
    elif name == "factors":
        module.factors[1] = 4.0
    elif name == "sizes":
        module.sizes["a"] = 9.0
    elif name == "options":
        module.options.shift = 3.0
    else:
        module.w, module.v = module.v, module.w


@pytest.mark.parametrize("name", ["slope", "factors", "sizes", "options", "parameters"])
def test_attributes_of_a_module(name: str) -> None:
    module, x = Slope(), rows()
    torch.testing.assert_close(layer(G, module, x), module.plain(x))
    changed(module, name)
    torch.testing.assert_close(layer(G, module, x), module.plain(x))


def test_many_modules_one_after_another() -> None:
    """Their ids are used again."""
    x = rows()
    for i in range(40):
        module = Slope(float(i))
        torch.testing.assert_close(layer(G, module, x), module.plain(x))
        del module
    gc.collect()
    assert len(layer._programs) <= 1


def test_a_module_ends_with_its_last_reference() -> None:
    module = Slope()
    layer(G, module, rows())
    gone = weakref.ref(module)
    del module
    assert gone() is None


def test_global_names(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows()
    assert torch.equal(by_global(G, x), x * 2)
    monkeypatch.setitem(by_global.function.__globals__, "SCALE", 5.0)
    assert torch.equal(by_global(G, x), x * 5)


def test_enclosing_names() -> None:
    factor = 2.0

    @hector.compile
    def inner(g: Any, feature: Tensor) -> Tensor:
        return g.ndata["feature"] * factor

    x = rows()
    assert torch.equal(inner(G, x), x * 2)
    factor = 3.0
    assert torch.equal(inner(G, x), x * 3)


def test_equal_numbers_of_different_types() -> None:
    x = rows()
    assert torch.equal(by_number(G, x, 1.0), x)
    assert torch.equal(by_number(G, x, 1), x * 10)


def test_numbers_in_a_namespace() -> None:
    x = rows()
    assert torch.equal(by_namespace(G, x, SimpleNamespace(scale=2.0)), x * 2)
    assert torch.equal(by_namespace(G, x, SimpleNamespace(scale=3.0)), x * 3)


def test_first_sizes_of_parameters() -> None:
    """The rows of a matrix for all types, and the length of a vector."""
    for ins, outs in ((2, 3), (4, 3), (4, 5)):
        x, w = rows(ins), torch.ones(ins, outs, dtype=torch.float64)
        b = torch.arange(outs, dtype=torch.float64)
        torch.testing.assert_close(by_weight(G, x, w, b), x @ w + b)


def test_the_length_of_a_vector_alone() -> None:
    x = rows(4)
    for scale in (torch.tensor([3.0]), torch.arange(4.0)):
        scale = scale.double()
        torch.testing.assert_close(by_scale(G, x, scale), x * scale)


def test_a_parameter_with_as_many_rows_as_nodes() -> None:
    small = HeteroGraph.from_arrays([0], [1], [0], num_nodes=2)
    for graph, nodes in ((G, 3), (small, 2)):
        x = torch.ones(nodes, nodes, dtype=torch.float64)
        w = torch.ones(nodes, 4, dtype=torch.float64)
        b = torch.ones(4, dtype=torch.float64)
        torch.testing.assert_close(by_weight(graph, x, w, b), x @ w + b)


@hector.compile
def pyg_style(x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
    src, dst = edge_index
    from_src = x[src]
    return hector.scatter(from_src, dst)


def test_the_graphs_of_tensors_end_with_them() -> None:
    x = rows()
    for seed in range(30):
        gen = torch.Generator().manual_seed(seed)
        ends = torch.randint(3, (2, 5), generator=gen)
        kinds = torch.zeros(5, dtype=torch.int64)
        want = torch.zeros_like(x).index_add(0, ends[1], x[ends[0]])
        torch.testing.assert_close(pyg_style(x, ends, kinds), want)
        del ends, kinds
        assert len(pyg_style._graphs) == 0


def test_values_that_are_told_apart() -> None:
    nan = float("nan")
    assert snapshot(nan) == snapshot(nan)
    for a, b in ((0.0, -0.0), (1, True), (1, 1.0), ((1,), [1]), ({1: 2}, {1: 2.0})):
        assert snapshot(a) != snapshot(b)
    assert snapshot([1, (2.0, "a")]) == snapshot([1, (2.0, "a")])

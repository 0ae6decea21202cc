"""Gradients lie in memory as their parameters do."""

import pytest
import torch

from hector.ir.builder import Builder
from hector.ir.types import Domain
from hector.nn import RGATConv
from hector.nn.common import SETTINGS
from hector.runtime.contract import Contraction


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("num_bases", [None, 2])
def test_gradients_have_the_strides_of_their_parameters(
    setting: str, num_bases: int | None
) -> None:
    """On axes of one element too: DistributedDataParallel compares all strides, and
    warns. A head of one column has such an axis in q and k."""
    ends = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
    layer = RGATConv(4, 4, 2, num_bases=num_bases)
    layer.set_optimization(setting)
    layer(torch.randn(3, 4), ends, torch.tensor([0, 1, 1, 0])).sum().backward()
    found = {n: p for n, p in layer.named_parameters() if p.grad is not None}
    assert {"q", "k"} < set(found)
    assert all(p.grad.stride() == p.stride() for p in found.values())


@pytest.mark.parametrize("equation", ["ab,bc->ac", "ab,bc->ca", "ba,cb->ca"])
@pytest.mark.parametrize("a", [1, 3])
def test_contractions_make_values_in_order(equation: str, a: int) -> None:
    sizes = {"a": a, "b": 4, "c": 1}
    left, _, right = equation.partition("->")[0].partition(",")
    shapes = [tuple(sizes[c] for c in text) for text in (left, right)]
    b = Builder()
    x, y = (b.input(n, Domain.GLOBAL, s) for n, s in zip("xy", shapes, strict=True))
    made = Contraction(b.einsum(equation, x, y), lambda _: 1)
    values = [torch.randn(1, *s) for s in shapes]
    found = made(*values)
    assert found.stride() == torch.empty(found.shape).stride()
    expected = torch.einsum(equation, *(v[0] for v in values))
    torch.testing.assert_close(found[0], expected)

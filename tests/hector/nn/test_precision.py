"""Layers in tensors of several dtypes, and inside autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hector.nn import HGTConv, RGATConv, RGCNConv

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (RGCNConv, {}),
    (RGCNConv, {"aggr": "std"}),
    (RGCNConv, {"num_bases": 2}),
    (RGCNConv, {"num_blocks": 2}),
    (RGATConv, {"heads": 2}),
    (RGATConv, {"num_bases": 2}),
]
UNREAD = ("w", "l1", "b1", "l2", "b2")
"""Parameters of RGAT that other settings of it read."""


def step(layer: Any, x: Tensor, autocast: bool) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the rows and of every parameter."""
    made = torch.Generator().manual_seed(0)
    edges = torch.randint(9, (2, 30), generator=made)
    kinds = torch.randint(3, (30,), generator=made)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = layer(x, edges, kinds)
    read = [x, *(p for n, p in layer.named_parameters() if n not in UNREAD)]
    return out, list(torch.autograd.grad(out.float().square().sum(), read))


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_under_autocast(kind: Any, options: Any, dtype: torch.dtype) -> None:
    """bf16 rows are what a layer gets behind an `nn.Linear` under autocast."""
    torch.manual_seed(0)
    layer, x = kind(4, 6, 3, **options), torch.randn(9, 4)
    wanted, exact = step(layer, x, autocast=False)
    found, grads = step(layer, x.to(dtype), autocast=True)
    scale = float(wanted.detach().abs().max())
    torch.testing.assert_close(found.float(), wanted, atol=0.03 * scale, rtol=0)
    assert {g.dtype for g in grads[1:]} == {torch.float32}
    assert grads[0].dtype is dtype and bool(grads[0].isfinite().all())
    if dtype is torch.float32 and not options:
        assert torch.equal(found, wanted)
        assert all(map(torch.equal, grads, exact))


def test_rows_give_the_dtype_of_results() -> None:
    torch.manual_seed(0)
    layer, x = RGCNConv(4, 6, 3), torch.randn(9, 4)
    for weights, rows in (
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        out, grads = step(layer.to(weights), x.to(rows), autocast=False)
        assert out.dtype is rows
        assert [g.dtype for g in grads] == [rows, weights, weights, weights]


def test_rows_of_another_width_are_refused() -> None:
    """Weights are padded for types of several widths; they were cut as well."""
    edges = {("a", "to", "b"): torch.tensor([[0, 1], [1, 0]])}
    layer = HGTConv({"a": 4, "b": 6}, 6, (["a", "b"], list(edges)), heads=2)
    x = {"a": torch.randn(2, 4), "b": torch.randn(2, 6)}
    assert set(layer(x, edges)) == {"b"}
    for name, width in (("a", 3), ("a", 6), ("b", 4), ("b", 7)):
        with pytest.raises(ValueError, match=rf"x\['{name}'\] of shape \[nodes, "):
            layer({**x, name: torch.randn(2, width)}, edges)

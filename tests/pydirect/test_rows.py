"""Which calls are row gathers, and where their gradients start from."""

from typing import Any

import pytest
import torch

import pydirect
from pydirect import transfer
from pydirect.rows import as_row_gather

ATEN = torch.ops.aten


def table() -> torch.Tensor:
    return torch.arange(12.0).view(4, 3).to("unified")


def test_subscripts_selections_and_embeddings_are_row_gathers() -> None:
    rows, index = table(), torch.tensor([2, 0])
    calls: list[tuple[Any, tuple[Any, ...], bool]] = [
        (ATEN.index.Tensor, (rows, [index]), True),
        (ATEN.index_select.default, (rows, 0, index), False),
        (ATEN.embedding.default, (rows, index), False),
        (ATEN.embedding.default, (rows, index, -1, False, True), False),
    ]
    for op, args, wraps in calls:
        found = as_row_gather(op, args)
        assert found is not None, op
        assert found.table is rows and found.index is index and found.wraps is wraps


def test_other_calls_are_not() -> None:
    rows, index = table(), torch.tensor([2, 0])
    for op, args in (
        (ATEN.index.Tensor, (rows, [index, index])),
        (ATEN.index.Tensor, (rows, [index.bool()])),
        (ATEN.index_select.default, (rows, 1, index)),
        (ATEN.embedding.default, (rows, index, -1, True)),
        (ATEN.index.Tensor, (rows.t(), [index])),
        (ATEN.index.Tensor, (rows[0], [index])),
        (ATEN.index.Tensor, (rows.cpu(), [index])),
        (ATEN.add.Tensor, (rows, rows)),
    ):
        assert as_row_gather(op, args) is None, op


def test_a_gradient_that_has_nowhere_to_go_is_refused_in_the_forward() -> None:
    leaf = torch.zeros(4, 3, dtype=torch.complex64).to("unified").requires_grad_()
    with pytest.raises(pydirect.UnsupportedOperatorError, match="views of leaves"):
        torch.view_as_real(leaf) + 1


def test_gradients_start_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lay in the memory that they are given."""
    stock = transfer.empty_strided

    def dirty(*given: Any) -> torch.Tensor:
        made = stock(*given)
        pydirect.to_host(made).fill_(7)
        return made

    monkeypatch.setattr(transfer, "empty_strided", dirty)
    leaf = table().requires_grad_()
    leaf[torch.tensor([1])].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.cpu().sum(1).tolist() == [0, 3, 0, 0]

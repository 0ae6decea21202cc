"""Attention as CUDA runs it, captured on the meta device."""

import pytest
import torch
from torch.nn import functional as F

from ssdtrain.tools.foresight.capture import AsOn


def saved_bytes(*, learns: bool, dropout_p: float = 0.0) -> int:
    """What one attention with a bias stores, its inputs left out."""
    with torch.device("meta"):
        query, key, value = (
            torch.empty(2, 4, 32, 16, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        bias = torch.empty(1, 4, 32, 32, dtype=torch.bfloat16, requires_grad=learns)
    given = {id(each) for each in (query, key, value, bias)}
    found = dict[int, torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in given:
            found[id(base)] = base
        return tensor

    with AsOn(), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = F.scaled_dot_product_attention(query, key, value, bias, dropout_p)
    assert out.dtype is torch.bfloat16 and out.shape == query.shape
    return sum(each.nbytes for each in found.values())


def test_a_bias_that_learns_stores_the_scores_in_float32() -> None:
    scores = 2 * 4 * 32 * 32
    assert saved_bytes(learns=False) < 2 * scores
    plain, dropped = (saved_bytes(learns=True, dropout_p=p) for p in (0.0, 0.1))
    assert plain >= 4 * scores
    # Dropout keeps a mask of one byte, and its result.
    assert dropped == plain + (1 + 4) * scores


@pytest.mark.parametrize("size", [(32, 16), (8, 32, 16), (2, 2, 4, 32, 16)])
@pytest.mark.parametrize("given", ["none", "a bias", "a bias that learns"])
def test_attention_without_heads_is_operators(
    size: tuple[int, ...], given: str
) -> None:
    """No kernel of one piece takes anything but batches of heads."""
    with torch.device("meta"):
        query = torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
        bias = torch.empty(32, 32, dtype=query.dtype, requires_grad="learns" in given)
    with AsOn():
        mask = None if given == "none" else bias
        out = F.scaled_dot_product_attention(query, query, query, mask)
    out.sum().backward()
    assert out.shape == query.shape and query.grad is not None


def test_a_negative_scale_is_one() -> None:
    with torch.device("meta"):
        query = torch.empty(1, 1, 32, 16, dtype=torch.bfloat16, requires_grad=True)
        bias = torch.empty(32, 32, dtype=query.dtype, requires_grad=True)
    with AsOn():
        out = F.scaled_dot_product_attention(query, query, query, bias, scale=-0.5)
    assert out.shape == query.shape

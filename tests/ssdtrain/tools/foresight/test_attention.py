"""Attention as CUDA runs it, captured on the meta device."""

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

"""The kernel of gated products gives the bytes of torch's two."""

import pytest
import torch
from torch.nn import functional as F

from ssdtrain.remat.expression import Layout
from ssdtrain.remat.pairs import Pairs
from tests.ssdtrain.bits import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_is_compared_and_equal(dtype: torch.dtype) -> None:
    device, pairs = torch.device("cuda", 0), Pairs(min_bytes=1)
    gate, other = torch.randn(2, 1000, 208, device=device).to(dtype)
    assert pairs.takes(Layout.of(gate), device)
    factor = F.silu(gate)
    assert same_bits([*pairs.make(gate, other)], [factor, factor * other])

"""On a GPU each kernel of attention is taken from where a plan stores it, and every bit
is plain training's."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssdtrain.plan.placement import Placement
from tests.ssdtrain.regions.test_attention import run_both

WIDTH, HEADS, LENGTH, NUM_BLOCKS = 256, 4, 512, 3
KERNELS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
UNORDERED = frozenset({"cuDNN"})
"""Torch calls no such kernel under deterministic algorithms: backward adds what tiles
of keys give to the queries' gradients in no order."""
ONE_TILE = 128
"""Tokens that make one tile of keys, of which there is but one order."""


class Block(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, -1))
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Net(nn.Module):
    """Blocks behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def deterministic(kernel: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backward of attention sums in one order alone under this flag."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(kernel not in UNORDERED)
    yield
    torch.use_deterministic_algorithms(before)


def taken(
    device: str,
    dtype: torch.dtype,
    around: AbstractContextManager[object],
    stored: Placement,
    monkeypatch: pytest.MonkeyPatch,
    length: int = LENGTH,
) -> None:
    """Train plainly and under a plan that stores attention; the same bits."""

    def loss_of(model: nn.Module, number: int) -> Tensor:
        torch.manual_seed(100 + number)
        x = torch.randn(2, length, WIDTH).to(device, dtype)
        loss: Tensor = model(x).square().mean()
        return loss

    with around:
        model = Net().to(device, dtype)
        told, session = run_both(model, monkeypatch, loss_of, stored=stored)
    assert told == ["taken"] * NUM_BLOCKS
    last = session.last_step
    assert last is not None and not last.fallbacks, last
    assert last.recipes["region"] > 0
    if stored is Placement.OFFLOAD:
        assert last.bytes_offloaded > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stored", [Placement.KEEP, Placement.OFFLOAD])
@pytest.mark.parametrize("kernel", KERNELS)
def test_stored_attention_is_taken_and_bits_are_plain_trainings(
    kernel: str,
    stored: Placement,
    deterministic: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = KERNELS[kernel]
    around = nullcontext() if chosen is None else sdpa_kernel(chosen)
    length = ONE_TILE if kernel in UNORDERED else LENGTH
    taken("cuda", torch.bfloat16, around, stored, monkeypatch, length)

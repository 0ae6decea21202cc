"""The model of the placement benchmarks: pre-LN GPT blocks, one token dimension."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_SIZE = 128
DROPOUT = 0.1


class Block(nn.Module):
    """Attention and MLP with residuals. Shapes: B batch, S sequence, H hidden."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_heads = max(1, hidden // HEAD_SIZE)
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        B, S, H = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, S, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        rate = DROPOUT if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(B, S, H)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Blocks(nn.Module):
    """`num_layers` blocks; returns the mean square of the last one's output."""

    def __init__(self, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(num_layers))
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) to a scalar."""
        for block in self.blocks:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x.float().square().mean()


def build(hidden: int, num_layers: int, device: torch.device) -> Blocks:
    """Seeded blocks in bf16 with gradients allocated."""
    torch.manual_seed(0)
    with device:
        model = Blocks(hidden, num_layers).to(torch.bfloat16).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model

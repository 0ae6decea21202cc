"""The model of the placement benchmarks: the blocks of `ssdtrain plan`, trained.

Shapes: B batch, S sequence, H hidden.
"""

import torch
from torch import Tensor, nn

from ssdtrain.tools.report.subject import Block


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

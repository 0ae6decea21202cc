"""Models of the dissertation's table 3.1, and a transformer, as plain modules."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, inner: int, outer: int, into: int, stride: int) -> None:
        super().__init__()
        sizes = ((into, inner, 1, 1), (inner, inner, 3, stride), (inner, outer, 1, 1))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.shortcut: nn.Module = nn.Identity()
        if into != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(into, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C', H', W')."""
        out = x
        for at, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            out = norm(convolution(out))
            out = F.relu(out) if at < 2 else out
        return F.relu(out + self.shortcut(x))


class WideResNet(nn.Module):
    """ResNet-L with W times as many channels."""

    def __init__(self, layers: tuple[int, ...] = (3, 8, 36, 3), wide: int = 4) -> None:
        super().__init__()
        width = 64 * wide
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        blocks: list[nn.Module] = []
        into = width
        for stage, count in enumerate(layers):
            inner = width * 2**stage
            for at in range(count):
                stride = 2 if stage and not at else 1
                blocks.append(Bottleneck(inner, 4 * inner, into, stride))
                into = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(into, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, 1000)."""
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        found: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return found


class UnrolledLSTM(nn.Module):
    """L layers of H units, unrolled."""

    def __init__(self, layers: int, hidden: int, into: int = 1024) -> None:
        super().__init__()
        self.hidden = hidden
        self.cells = nn.ModuleList(
            Cell(into if at == 0 else hidden, hidden) for at in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(steps, B, into) to (B, H)."""
        for cell in self.cells:
            state = [torch.zeros(x.shape[1], self.hidden, device=x.device)] * 2
            outs = []
            for step in x.unbind(0):
                state = list(cell(step, *state))
                outs.append(state[0])
            x = torch.stack(outs)
        return x[-1]


class Cell(nn.Module):
    """One step of an LSTM, gate by gate."""

    def __init__(self, into: int, hidden: int) -> None:
        super().__init__()
        self.by_input = nn.ModuleList(nn.Linear(into, hidden) for _ in range(4))
        self.by_state = nn.ModuleList(
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """(B, into), (B, H), (B, H) to the next (B, H), (B, H)."""
        both = zip(self.by_input, self.by_state, strict=True)
        i, f, g, o = (one(x) + two(h) for one, two in both)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class AttentionBlock(nn.Module):
    """Attention and a feed-forward part, each with a norm and a shortcut."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(hidden, hidden) for _ in range(4)
        )
        self.up, self.down = (
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) to the same."""
        y = self.norms[0](x)
        parts = (self.query(y), self.key(y), self.value(y))
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))

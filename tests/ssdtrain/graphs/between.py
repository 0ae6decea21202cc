"""Random chains of modules, between which the program writes.

What one module gives is saved by nobody where the next one reads it: recipes pass it
because modules' arguments, and what dropouts and norms read, were seen unchanged. From
step `TURN` on something is written to it there, under `no_grad`, as plain autograd does
not mind, and lengths change. The judge is that of `surprises.py`.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from tests.ssdtrain.graphs.operands import random_plan
from tests.ssdtrain.graphs.surprises import judged_steps, random_plans

ROWS, WIDTH = 12, 16
NUM_STEPS, TURN = 12, 6
"""Step 2 is the first under a plan, which 3 follows as a table."""
PLANS: list[dict[str, Any]] = [
    {"plan": "auto", "max_overhead": 1.0, "min_bytes": 1},
    {"plan": "auto", "max_overhead": 1.0, "min_bytes": 1, "recompute": "full"},
]


class RmsNorm(nn.Module):
    """As those of Llama and T5: in float32, of which autograd saves the input."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Gated(nn.Module):
    """A gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class Attention(nn.Module):
    """Two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.all(x).view(1, len(x), 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*heads)
        return found.transpose(1, 2).reshape(len(x), WIDTH)


class Around(nn.Module):
    """A module with another one inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


PARTS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms": lambda: RmsNorm(torch.rand(WIDTH) + 0.5),
    "dropout": lambda: nn.Dropout(0.2),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "gated": Gated,
    "attention": Attention,
}
KINDS = list(PARTS)
USUAL = (
    ["layer norm", "dropout", "linear"],
    ["rms", "gated", "dropout"],
    ["layer norm", "attention", "dropout"],
    ["linear", "gelu", "dropout", "no bias"],
)
"""As models have them."""
WRITES: tuple[Callable[[Tensor], object], ...] = (
    lambda x: x.mul_(1.5),
    lambda x: x.add_(0.25),
    lambda x: x[:3].zero_(),
    lambda x: x.clamp_(-1, 1),
    lambda x: x.detach().mul_(0.5),
)


class Model(nn.Module):
    """A random chain."""

    def __init__(self, seed: int, features: Counter[str]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        names = []
        while len(names) < 5:
            names += draw.choice(USUAL) if draw.random() < 0.5 else [draw.choice(KINDS)]
        parts = [PARTS[name]() for name in names]
        features.update(names)
        self.parts = nn.ModuleList(
            Around(part) if draw.random() < 0.25 else part for part in parts
        )
        self.adds = [draw.random() < 0.3 for _ in parts]
        self.is_narrow = draw.random() < 0.6
        self.write = draw.choice(WRITES)
        self.number = 0
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, written: int) -> Tensor:
        """(rows, WIDTH) to a scalar. written: behind which part; -1: none."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_narrow):
            x = self.shift + x
            every = zip(self.parts, self.adds, strict=True)
            for number, (part, adds) in enumerate(every):
                x = x + part(x) if adds else part(x)
                if number == written:
                    with torch.no_grad():
                        self.write(x)
            found: Tensor = self.last(x)
            return found.float().square().mean()


def train(seed: int, settings: dict[str, Any] | None, features: Counter[str]) -> Any:
    """Gradients of every step as bytes; a string where a step raised."""
    model, draw = Model(seed, features), random.Random(seed + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def one(session: ssdtrain.Session | None) -> list[Tensor]:
        turned = model.number >= TURN
        rows = draw.choice((ROWS, ROWS, ROWS + 4)) if turned else ROWS
        written = draw.randrange(-1, len(model.parts)) if turned else -1
        features["written"] += written >= 0
        loss = model(torch.randn(rows, WIDTH), written)
        loss.backward()
        return [loss.detach()]

    plan_draw = random.Random(seed + 2)
    plans = random_plans(lambda profile: random_plan(profile, plan_draw))
    return judged_steps(model, optimizer, NUM_STEPS, settings, plans, one, features)

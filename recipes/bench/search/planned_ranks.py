"""Four ranks train a model as a found plan says; the losses are one process's.

python planned_ranks.py OUT
"""

import contextlib
import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.bench.search.models import AttentionBlock, Cell
from ssdtrain.tools.search.moves import WorkerAxis
from ssdtrain.tools.search.placement import Cut
from ssdtrain.tools.search.runner import PlannedStep, distribute
from ssdtrain.tools.search.search import partition
from ssdtrain.tools.search.trace import trace

STEPS = 2
Case = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], tuple[int, ...]]


class Recurrent(nn.Module):
    """A cell, five steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = Cell(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 16)
        for step in x.unbind(0):
            h, c = self.cell(step, h, c)
        return self.head(h)


class Words(nn.Module):
    """Words in, the next word out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.block = AttentionBlock(16, 4)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.block(self.embedding(ids.long())))
        return F.cross_entropy(logits.flatten(0, 1), ids.long().flatten())


def cases() -> dict[str, Case]:
    """Models, their losses, and shapes of a batch."""

    def square(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    mlp = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8)
    )
    convolutions = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 8),
    )
    return {
        "mlp": (mlp, square, (8, 16)),
        "attention": (AttentionBlock(16, 4), square, (4, 8, 16)),
        "convolutions": (convolutions, square, (4, 4, 16, 16)),
        "recurrent": (Recurrent(), square, (5, 8, 8)),
        "halo": (
            nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU()),
            square,
            (1, 3, 16, 16),
        ),
        "words": (Words(), lambda model, x: model(x), (4, 8)),
    }


class Sent(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name.startswith(("_c10d_functional", "_dtensor")) and "wait" not in name:
            self.count += 1
        return func(*args, **(kwargs or {}))


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    batches: list[Tensor],
    step: Any,
) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        with step():
            loss = loss_of(model, batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
    return losses


def run(name: str, case: Case) -> dict[str, Any]:
    model, loss_of, shape = case
    torch.manual_seed(4)
    model = model.double()
    if name == "words":
        batches = [torch.randint(0, 32, shape) for _ in range(STEPS)]
    else:
        batches = [torch.randn(shape, dtype=torch.float64) for _ in range(STEPS)]
    alone = copy.deepcopy(model)
    want = train(alone, loss_of, batches, contextlib.nullcontext)
    traced = copy.deepcopy(model).to("meta")
    blank = batches[0].to("meta")
    problem = trace(traced, lambda: loss_of(traced, blank))
    found = partition(problem, [WorkerAxis(2), WorkerAxis(2)])
    mesh = init_device_mesh("cpu", found.ways, mesh_dim_names=("outer", "inner"))
    distribute(model, problem, found, mesh)
    sent = Sent()
    with sent:
        got = train(model, loss_of, batches, lambda: PlannedStep(problem, found, mesh))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    for (path, one), other in zip(
        model.named_parameters(), alone.parameters(), strict=True
    ):
        torch.testing.assert_close(
            one.full_tensor(),
            other,
            rtol=1e-8,
            atol=1e-9,
            msg=lambda t, p=path: f"{p}: {t}",
        )
    halos = [n for c in found.chosen for s in c for n in s.needs if isinstance(n, Cut)]
    if name == "halo" and not any(need.has_halo for need in halos):
        raise AssertionError("no halo was exchanged")
    cuts = {p for n in problem.weights.values() for p in found.placements[n]}
    return {
        "cut": sum(isinstance(p, Cut) for p in cuts),
        "collectives": sent.count,
        "worst": max(abs(float(a - b)) for a, b in zip(got, want, strict=True)),
    }


def main() -> None:
    """Run the named cases, or all, and write what was found."""
    out, *names = sys.argv[1:]
    distributed.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    chosen = {
        name: case for name, case in cases().items() if name in names or not names
    }
    found = {name: run(name, case) for name, case in chosen.items()}
    if distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


if __name__ == "__main__":
    main()

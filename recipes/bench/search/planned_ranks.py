"""Four ranks train a model as a found plan says; the losses are one process's.

torchrun --nproc-per-node 4 -m recipes.bench search.planned_ranks OUT
"""

import contextlib
import copy
import json
import os
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
from ssdtrain.tools.foresight.collectives import Collective, bus_bytes
from ssdtrain.tools.search.moves import WorkerAxis, cost, moves
from ssdtrain.tools.search.placement import Cut
from ssdtrain.tools.search.problem import Problem
from ssdtrain.tools.search.runner import PlannedStep, distribute
from ssdtrain.tools.search.search import Partition, partition
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
    """Counts collectives, and the bytes that a rank sends by them."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.num_bytes = 0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        out = func(*args, **(kwargs or {}))
        kind = next((k for word, k in KINDS.items() if name.startswith(word)), None)
        if kind is not None:
            message = max(args[0].nbytes, out.nbytes)
            self.count += 1
            self.num_bytes += bus_bytes(kind, message, AXIS)
        return out


KINDS = {
    "all_gather": Collective.ALL_GATHER,
    "all_reduce": Collective.ALL_REDUCE,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "shard_dim_alltoall": Collective.ALL_TO_ALL,
}
AXIS = 2
"""Workers of each axis."""


def expected_bytes(problem: Problem, found: Partition) -> float:
    """What a rank sends here: as planned, but inputs are copies, and gloo, which has no
    all-to-all, gathers twice its bytes."""
    made = {number for one in problem.operations for number in one.results}
    known = made | set(problem.weights.values())
    total = 0.0
    for one, chosen in zip(problem.operations, found.chosen, strict=True):
        ways = [
            (number, found.placements[number], tuple(s.needs[at] for s in chosen))
            for at, number in enumerate(one.operands)
            if number in known
        ]
        ways += [
            (number, tuple(s.gives[at] for s in chosen), found.placements[number])
            for at, number in enumerate(one.results)
        ]
        for number, source, target in ways:
            extent = problem.tensors[number]
            for step in moves(source, target, found.ways, extent.shape):
                times = 2 if step.kind is Collective.ALL_TO_ALL else 1
                total += times * cost([step], extent.num_bytes, found.axes)
    return total


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
    found = partition(problem, [WorkerAxis(AXIS), WorkerAxis(AXIS)])
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
        "sent_bytes": sent.num_bytes / STEPS,
        "expected_bytes": expected_bytes(problem, found),
        "planned_bytes": found.cost,
        "worst": max(abs(float(a - b)) for a, b in zip(got, want, strict=True)),
    }


def main(out: Path, names: tuple[str, ...] = (), /) -> None:
    """Run the named cases, or all, and write what was found."""
    distributed.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    chosen = {
        name: case for name, case in cases().items() if name in names or not names
    }
    found = {name: run(name, case) for name, case in chosen.items()}
    if distributed.get_rank() == 0:
        out.write_text(json.dumps(found, indent=1) + "\n")
    distributed.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends

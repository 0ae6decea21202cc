"""A small DLRM that trains with its embedding tables where a plan puts them.

    torchrun --nproc-per-node 2 -m ssdtrain.tools.foresight.dlrm plan.json --steps 20

Every rank has its own samples, its copy of the dense part and its tables. It looks up
their rows for all samples; all-to-alls bring rows to samples and gradients back (Lin
2023, 5.2). They are added to the rows at once, as torchrec's fused kernels do.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Replicate

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.table_plan import TABLE_PLAN_FILE, TablePlan

DENSE_FEATURES, HIDDEN = 13, 64
LEARNING_RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Of one rank."""

    dense: Tensor
    """(samples, features)."""
    sparse: Sequence[Tensor]
    """Of each table (samples, lookups): rows."""
    labels: Tensor
    """(samples,): 0 or 1."""


class _Pooled(torch.autograd.Function):
    """Sums of rows of a rank's tables; backward changes the rows by their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        rows: Sequence[Tensor],
        tables: Sequence[Tensor],
        rate: float,
    ) -> Tensor:
        """anchor: (samples, 0), which needs a gradient, so that backward is run."""
        ctx.rows, ctx.tables, ctx.rate = rows, tables, rate
        bags = zip(rows, tables, strict=True)
        pooled = [nn.functional.embedding_bag(*bag, mode="sum") for bag in bags]
        return torch.cat([anchor, *pooled], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Change the tables."""
        widths = [0, *(table.shape[1] for table in ctx.tables)]
        _, *parts = grads[0].split(widths, 1)
        for rows, table, part in zip(ctx.rows, ctx.tables, parts, strict=True):
            values = part.repeat_interleave(rows.shape[1], 0)
            table.index_add_(0, rows.flatten(), values, alpha=-ctx.rate)
        return None, None, None, None


def _exchanged(own: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Rows of this rank's tables for all samples to those of all tables for its own:
    (all samples, own width) to one (own samples, width) from each rank."""
    samples = len(own) // len(widths)
    sizes = [samples * width for width in widths]
    into = own.new_empty(sum(sizes))
    sent = [samples * own.shape[1]] * len(widths)
    found = all_to_all_single(into, own.flatten(), sizes, sent)
    parts = zip(found.split(sizes), widths, strict=True)
    return [part.view(samples, width) for part, width in parts]


class PlacedTables(nn.Module):
    """The tables that a plan gives this rank, and the exchange with the others. Raises
    ConfigError: the plan is for another number of ranks."""

    def __init__(self, plan: TablePlan, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._ranks = distributed.get_world_size()
        if plan.num_ranks != self._ranks:
            raise ConfigError(
                f"the plan is for {plan.num_ranks} ranks, {self._ranks} are running"
            )
        rank = distributed.get_rank()
        self._own = [at for at, t in enumerate(plan.tables.values()) if t.rank == rank]
        self._widths = [0] * self._ranks
        self._order: list[list[int]] = [[] for _ in range(self._ranks)]
        self._of = list(plan.tables.values())
        for at, (name, table) in enumerate(plan.tables.items()):
            self._widths[table.rank] += table.width
            self._order[table.rank].append(at)
            held = table.rank == rank
            rows = table.rows if held else 0
            local = torch.empty(rows, table.width, device=device, dtype=dtype)
            whole = DTensor.from_local(
                local,
                _mesh(device, table.rank),
                [Replicate() for _ in table.placements],
                run_check=False,
                shape=torch.Size((table.rows, table.width)),
                stride=(table.width, 1),
            )
            self.register_parameter(name, nn.Parameter(whole))

    def local(self, at: int) -> Tensor:
        """Return what this rank has of a table."""
        whole: Any = list(self.parameters())[at]
        found: Tensor = whole.to_local()
        return found

    def forward(self, sparse: Sequence[Tensor]) -> Tensor:
        """Of each table (own samples, lookups) to (own samples, sum of the widths)."""
        mine = torch.cat(list(sparse), 1)
        everyone = [torch.empty_like(mine) for _ in range(self._ranks)]
        distributed.all_gather(everyone, mine)
        rows = torch.cat(everyone).split([own.shape[1] for own in sparse], 1)
        tables = [self.local(at).detach() for at in self._own]
        first = next(self.parameters())
        anchor = torch.zeros(
            len(rows[0]), 0, dtype=first.dtype, device=mine.device, requires_grad=True
        )
        pool: Callable[..., Tensor] = _Pooled.apply
        rate = LEARNING_RATE / self._ranks
        own = pool(anchor, [rows[at] for at in self._own], tables, rate)
        exchanged = _exchanged(own, self._widths)
        parts: dict[int, Tensor] = {}
        for order, found in zip(self._order, exchanged, strict=True):
            widths = [self._of[at].width for at in order]
            parts |= zip(order, found.split(widths, 1), strict=True)
        return torch.cat([parts[at] for at in range(len(parts))], 1)


@functools.cache
def _mesh(device: str, rank: int) -> DeviceMesh:
    return DeviceMesh(device, [rank])


class Dlrm(nn.Module):
    """Dense features through a small network, next to the rows of all tables."""

    def __init__(self, tables: nn.Module, width: int, **where: Any) -> None:
        super().__init__()
        self.tables = tables
        self.bottom = nn.Linear(DENSE_FEATURES, HIDDEN, **where)
        self.top = nn.Sequential(
            nn.Linear(HIDDEN + width, HIDDEN, **where),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1, **where),
        )

    def forward(self, own: Samples) -> Tensor:
        """Return the mean loss of these samples."""
        dense = torch.relu(self.bottom(own.dense))
        found = self.top(torch.cat([dense, self.tables(own.sparse)], 1))
        return nn.functional.binary_cross_entropy_with_logits(found[:, 0], own.labels)


def train_step(model: Dlrm, own: Samples) -> float:
    """Train on every rank's samples; return the mean loss of all."""
    ranks = distributed.get_world_size()
    loss = model(own)
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:  # of the dense part
                distributed.all_reduce(weight.grad)
                weight.sub_(weight.grad, alpha=LEARNING_RATE / ranks)
                weight.grad = None
    mean = loss.detach().clone()
    distributed.all_reduce(mean)
    return float(mean) / ranks


def samples(
    plan: TablePlan, number: int, lookups: int, *, device: str, dtype: torch.dtype
) -> Samples:
    """Draw some, with the CPU's default generator."""

    def drawn(most: int, *size: int) -> Tensor:
        found = torch.randint(most, size, dtype=torch.long, device="cpu")
        return found.to(device)

    rows = [drawn(table.rows, number, lookups) for table in plan.tables.values()]
    dense = torch.randn(number, DENSE_FEATURES, dtype=dtype, device="cpu")
    return Samples(
        dense=dense.to(device), sparse=rows, labels=drawn(2, number).to(dtype)
    )


def main() -> None:
    """Train with a plan, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("plan")
    add("--steps", type=int, default=10)
    add("--samples", type=int, default=256, help="of each rank")
    add("--lookups", type=int, default=4, help="of a sample and table")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = distributed.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    plan = TABLE_PLAN_FILE.read(args.plan)
    where: dict[str, Any] = {"device": device, "dtype": torch.float32}
    torch.manual_seed(0)
    tables = PlacedTables(plan, **where)
    with torch.no_grad():
        for weight in tables.parameters():
            weight.to_local().normal_(std=0.1)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    width = sum(table.width for table in plan.tables.values())
    model = Dlrm(tables, width, **where)
    torch.manual_seed(1 + rank)
    own = samples(plan, args.samples, args.lookups, **where)
    for step in range(args.steps):
        loss = train_step(model, own)
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

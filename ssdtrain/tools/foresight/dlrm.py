"""A small DLRM that trains with its embedding tables where a plan puts them.

    torchrun --nproc-per-node 2 -m ssdtrain.tools.foresight.dlrm plan.json --steps 20

Every rank has its own samples, its own copy of the dense part, and the tables that the
plan gives it. It looks up their rows for all samples; an all-to-all brings each
sample's rows to its rank, and another one the gradients back (Lin 2023, 5.2).
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
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
    sparse: Tensor
    """(tables, samples, lookups): rows."""
    labels: Tensor
    """(samples,): 0 or 1."""


class _Exchange(torch.autograd.Function):
    """Rows of a rank's tables for all samples, to all tables' rows of its samples."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, widths: Sequence[int], group: Any
    ) -> tuple[Tensor, ...]:
        """(all samples, own width) to one (own samples, width) from each rank."""
        ctx.group, ctx.widths = group, widths
        ranks = len(widths)
        samples = own.shape[0] // ranks
        found = [own.new_empty(samples, width) for width in widths]
        sent = [part.contiguous() for part in own.chunk(ranks)]
        _all_to_all(found, sent, group)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The other way round."""
        own = ctx.widths[distributed.get_rank(ctx.group)]
        found = [grads[0].new_empty(grads[0].shape[0], own) for _ in ctx.widths]
        _all_to_all(found, [grad.contiguous() for grad in grads], ctx.group)
        return torch.cat(found), None, None


def _all_to_all(found: list[Tensor], sent: list[Tensor], group: Any) -> None:
    """As `distributed.all_to_all`, which gloo has for no list of tensors."""
    flat = torch.cat([part.flatten() for part in sent])
    into = flat.new_empty(sum(part.numel() for part in found))
    sizes = [part.numel() for part in found]
    distributed.all_to_all_single(
        into, flat, sizes, [part.numel() for part in sent], group=group
    )
    for part, values in zip(found, into.split(sizes), strict=True):
        part.copy_(values.view_as(part))


class PlacedTables(nn.Module):
    """The tables that a plan gives this rank, and the exchange with the others.

    Args:
        plan: names a rank for each table.
        device: of this rank.
        dtype: of the rows.

    Raises:
        ConfigError: the plan is for another number of ranks.
    """

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
        meshes = [DeviceMesh(device, [each]) for each in range(self._ranks)]
        self._of = list(plan.tables.values())
        for at, (name, table) in enumerate(plan.tables.items()):
            self._widths[table.rank] += table.width
            self._order[table.rank].append(at)
            held = table.rank == rank
            rows = table.rows if held else 0
            local = torch.empty(rows, table.width, device=device, dtype=dtype)
            whole = DTensor.from_local(
                local,
                meshes[table.rank],
                [Replicate() for _ in table.placements],
                run_check=False,
                shape=torch.Size((table.rows, table.width)),
                stride=(table.width, 1),
            )
            self.register_parameter(name, nn.Parameter(whole))

    def local(self, at: int) -> Tensor:
        """Return a table that this rank has, as autograd follows it."""
        whole: Any = list(self.parameters())[at]
        found: Tensor = whole.to_local()
        return found

    def forward(self, sparse: Tensor) -> Tensor:
        """(tables, own samples, lookups) to (own samples, sum of the widths)."""
        everyone = [torch.empty_like(sparse) for _ in range(self._ranks)]
        distributed.all_gather(everyone, sparse.contiguous())
        rows = torch.cat(everyone, dim=1)
        pooled = [
            nn.functional.embedding_bag(rows[at], self.local(at), mode="sum")
            for at in self._own
        ]
        own = torch.cat(pooled, 1) if pooled else self._nothing(rows.shape[1])
        exchange: Callable[..., tuple[Tensor, ...]] = _Exchange.apply
        exchanged = exchange(own, self._widths, None)
        parts: dict[int, Tensor] = {}
        for order, found in zip(self._order, exchanged, strict=True):
            widths = [self._of[at].width for at in order]
            parts |= zip(order, found.split(widths, 1), strict=True)
        return torch.cat([parts[at] for at in range(len(parts))], 1)

    def _nothing(self, samples: int) -> Tensor:
        """A rank without tables takes part in the exchange all the same."""
        first = next(self.parameters())
        return torch.zeros(
            samples, 0, dtype=first.dtype, device=first.device, requires_grad=True
        )


class Dlrm(nn.Module):
    """Dense features through a small network, beside the rows of all tables."""

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
        for name, weight in model.named_parameters():
            grad = weight.grad
            if grad is None:
                continue
            if isinstance(grad, DTensor):
                grad = grad.to_local()
            elif not name.startswith("tables."):
                distributed.all_reduce(grad)
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.sub_(grad, alpha=LEARNING_RATE / ranks)
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
        dense=dense.to(device),
        sparse=torch.stack(rows),
        labels=drawn(2, number).to(dtype),
    )


def main() -> None:
    """Train with a plan, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=256, help="of each rank")
    parser.add_argument("--lookups", type=int, default=4, help="of a sample and table")
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

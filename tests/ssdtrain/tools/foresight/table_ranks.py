"""Two ranks train a DLRM with the tables of each plan; and each trains it alone.

python table_ranks.py OUT PLAN...
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ssdtrain.tools.foresight.dlrm import (
    LEARNING_RATE,
    Dlrm,
    PlacedTables,
    Samples,
    samples,
    train_step,
)
from ssdtrain.tools.foresight.table_plan import TABLE_PLAN_FILE, TablePlan
from tests.ranks import leave

STEPS, NUMBER, LOOKUPS = 4, 6, 3
WHERE: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}


class WholeTables(nn.Module):
    """All of them in one process."""

    def __init__(self, plan: TablePlan) -> None:
        super().__init__()
        self.all = nn.ParameterList(rows(plan, at) for at in range(len(plan.tables)))

    def forward(self, sparse: Sequence[Tensor]) -> Tensor:
        """Of each table (samples, lookups) to (samples, sum of the widths)."""
        found = [
            nn.functional.embedding_bag(own, table, mode="sum")
            for own, table in zip(sparse, self.all, strict=True)
        ]
        return torch.cat(found, 1)


def rows(plan: TablePlan, at: int) -> Tensor:
    table = list(plan.tables.values())[at]
    generator = torch.Generator().manual_seed(at)
    return torch.randn(
        table.rows, table.width, generator=generator, dtype=torch.float64
    )


def dlrm(plan: TablePlan, tables: nn.Module) -> Dlrm:
    torch.manual_seed(0)
    return Dlrm(tables, sum(t.width for t in plan.tables.values()), **WHERE)


def drawn(plan: TablePlan, rank: int) -> Samples:
    torch.manual_seed(10 + rank)
    return samples(plan, NUMBER, LOOKUPS, **WHERE)


def alone(plan: TablePlan) -> tuple[list[float], list[Tensor]]:
    """Losses of all samples in one process, and the tables in the end."""
    model = dlrm(plan, WholeTables(plan))
    both = [drawn(plan, rank) for rank in range(plan.num_ranks)]
    own = Samples(
        dense=torch.cat([each.dense for each in both]),
        sparse=[torch.cat(own) for own in zip(*(b.sparse for b in both), strict=True)],
        labels=torch.cat([each.labels for each in both]),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        loss = model(own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, [table.detach() for table in model.tables.all]


def trained(plan: TablePlan, rank: int) -> list[dict[str, Any]]:
    """What every rank found."""
    tables = PlacedTables(plan, **WHERE)
    with torch.no_grad():
        for at, table in enumerate(plan.tables.values()):
            if table.rank == rank:
                tables.local(at).copy_(rows(plan, at))
    held = sum(tables.local(at).numel() for at in range(len(plan.tables)))
    model = dlrm(plan, tables)
    own = drawn(plan, rank)
    losses = [train_step(model, own) for _ in range(STEPS)]
    expected, whole = alone(plan)
    differences = [
        float((tables.local(at).detach() - whole[at]).abs().max())
        for at, table in enumerate(plan.tables.values())
        if table.rank == rank
    ]
    found = {"losses": losses, "alone": expected, "held": held}
    found["worst"] = max(differences, default=0.0)
    every: list[Any] = [None] * plan.num_ranks
    distributed.all_gather_object(every, found)
    return every


def main() -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    found = [trained(TABLE_PLAN_FILE.read(path), rank) for path in sys.argv[2:]]
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()

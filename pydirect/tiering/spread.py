"""A table's hot rows over the GPUs of all processes of a run."""

import torch

from pydirect.ranks import Ranks
from pydirect.tiering.place import plan_tiers
from pydirect.tiering.table import TieredTable, free_budget_bytes, share_of


def spread_table(
    ranks: Ranks,
    table: torch.Tensor,
    score: torch.Tensor | None,
    *,
    budget_bytes: int | None = None,
    replicated_share: float = 0.0,
) -> TieredTable:
    """Hot rows dealt out over the GPUs of ``ranks``, each read in place by all.

    Where GPUs do not reach one another, and in a run of one process, each keeps the
    hottest rows itself. All ranks call it, with the same arguments.

    Args:
        ranks: the processes; they must live as long as the table.
        table: host memory that every rank's device reads (`Ranks.share`), shape
            (num_rows, ...).
        score: heat of each row, or None; see `TieredTable`.
        budget_bytes: of each GPU; None for what the fullest one has free.
        replicated_share: of that budget, for rows that every GPU has a copy of. A
            peer's row costs less than the host's by far, so that copies pay only where
            peers are slow.

    Raises:
        ValueError: ``replicated_share`` outside 0 to 1, or ``budget_bytes`` below 0.
    """
    if not 0 <= replicated_share <= 1:
        raise ValueError(f"replicated_share: expects 0 to 1, got {replicated_share}")
    if budget_bytes is not None and budget_bytes < 0:
        raise ValueError(f"budget_bytes: expects 0 or more, got {budget_bytes}")
    budget = budget_bytes
    if budget is None:
        budget = free_budget_bytes(ranks.device)
    budget = ranks.least(budget)
    if not ranks.reach_all():
        return TieredTable(table, score, device=ranks.device, budget_bytes=budget)
    replicated = int(budget * replicated_share)
    row_bytes = max(1, table.nbytes // max(1, table.shape[0]))
    plan = plan_tiers(
        table.shape[0],
        row_bytes,
        replicated_bytes=replicated,
        spread_bytes=budget - replicated,
        num_gpus=ranks.size,
    )
    shares: tuple[torch.Tensor, ...] = ()
    if plan.spread_rows:
        num_rows = len(plan.rows_on(ranks.rank))
        block = ranks.new_block((num_rows, *table.shape[1:]), table.dtype)
        share_of(table, score, plan, ranks.rank, ranks.device, out=block.tensor)
        shares = ranks.open_all(block)
    return TieredTable(table, score, device=ranks.device, plan=plan, shares=shares)

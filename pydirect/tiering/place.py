"""Where each row of a reordered table lies: in each GPU, spread over GPUs, or the host.

Rows are numbered by heat (`reorder_by`). The hottest are copied to every GPU, the next
are dealt out to the GPUs one by one, which balances memory and links, and the rest stay
in host memory. The address is arithmetic on the row number (Listing 4.1 of the
dissertation, with its order of evaluation put right).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """Boundaries of the tiers, as row numbers."""

    num_rows: int
    replicated_rows: int
    """Rows 0 to this one, exclusive, are in every GPU."""

    spread_rows: int
    """So many rows after them are spread over the GPUs."""

    num_gpus: int

    def __post_init__(self) -> None:
        kept = self.replicated_rows + self.spread_rows
        if min(self.replicated_rows, self.spread_rows) < 0 or kept > self.num_rows:
            raise ValueError(
                f"TierPlan expects tiers inside {self.num_rows} rows, got "
                f"{self.replicated_rows} replicated and {self.spread_rows} spread"
            )
        if self.num_gpus < 1:
            raise ValueError(f"num_gpus: expects at least 1, got {self.num_gpus}")

    def rows_on(self, gpu: int) -> torch.Tensor:
        """The rows of the spread tier that GPU ``gpu`` holds, in their order there."""
        first = self.replicated_rows + gpu
        end = self.replicated_rows + self.spread_rows
        return torch.arange(first, max(first, end), self.num_gpus, device="cpu")


def plan_tiers(
    num_rows: int,
    row_bytes: int,
    *,
    replicated_bytes: int,
    spread_bytes: int = 0,
    num_gpus: int = 1,
) -> TierPlan:
    """Boundaries from byte budgets of one GPU.

    Args:
        num_rows: of the table.
        row_bytes: of one row.
        replicated_bytes: what each GPU gives to rows that all have.
        spread_bytes: what each GPU gives to its share of spread rows; GPUs without a
            fast link between them should give none.
        num_gpus: that share the spread tier.

    Raises:
        ValueError: rows without bytes, budgets below 0, or no GPU.
    """
    if row_bytes < 1:
        raise ValueError(f"row_bytes: expects at least 1, got {row_bytes}")
    replicated = min(num_rows, replicated_bytes // row_bytes)
    spread = min(num_rows - replicated, spread_bytes // row_bytes * num_gpus)
    return TierPlan(
        num_rows=num_rows,
        replicated_rows=replicated,
        spread_rows=spread,
        num_gpus=num_gpus,
    )

"""Runs of consecutive rows in an index."""

from typing import NamedTuple

import torch


class Run(NamedTuple):
    """``index[position + k] == first_row + k`` for 0 <= k < num_rows."""

    position: int
    first_row: int
    num_rows: int


def find_runs(index: torch.Tensor) -> list[Run]:
    """Split a CPU index (1-D, integers) into its longest runs, in order."""
    if index.numel() == 0:
        return []
    broken = (index[1:] != index[:-1] + 1).nonzero().flatten() + 1
    starts = torch.cat((broken.new_zeros(1), broken))
    ends = torch.cat((broken, broken.new_full((1,), index.numel())))
    return [
        Run(position, row, end - position)
        for position, row, end in zip(
            starts.tolist(), index[starts].tolist(), ends.tolist(), strict=True
        )
    ]

"""The hottest rows of a host table in the memory of one device."""

from dataclasses import dataclass

import torch

from pydirect.gather import index_select


@dataclass(kw_only=True)
class TierCounters:
    """Rows asked for, by where they were found."""

    near_rows: int = 0
    host_rows: int = 0

    @property
    def hit_ratio(self) -> float:
        return self.near_rows / max(1, self.near_rows + self.host_rows)


class HotRows:
    """A host table with a copy of its hottest rows on a device.

    The copy is not updated: write to the table before, or build it again.
    """

    def __init__(
        self,
        table: torch.Tensor,
        score: torch.Tensor,
        budget_bytes: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            table: host memory that ``device`` can read, shape (num_rows, ...).
            score: heat of each row, shape (num_rows,).
            budget_bytes: device memory for rows; four bytes a row of the whole table
                for the directory come on top.
            device: where the rows are wanted.

        Raises:
            ValueError: one score a row is expected.
        """
        if len(score) != len(table):
            raise ValueError(
                f"score: expects one for each of {len(table)} rows, got {len(score)}"
            )
        row_bytes = max(1, table.nbytes // max(1, len(table)))
        num_near = min(len(table), budget_bytes // row_bytes)
        near = score.topk(num_near).indices
        self._table = table
        self._device = device
        self._near = index_select(table, near.to(device))
        slots = torch.full((len(table),), -1, dtype=torch.int32)
        slots[near] = torch.arange(num_near, dtype=torch.int32)
        self._slots = slots.to(device)
        self.counters = TierCounters()

    @property
    def num_near(self) -> int:
        """Rows on the device."""
        return len(self._near)

    def index_select(
        self, index: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``table[index]`` on the device, shape (num_indices, ...).

        Waits for the device once, to know how many rows the host must give.

        Args:
            index: int64, shape (num_indices,), on the device.
            out: where to write.
        """
        if out is None:
            shape = (len(index), *self._table.shape[1:])
            out = torch.empty(shape, dtype=self._table.dtype, device=self._device)
        slots = self._slots[index]
        far = torch.nonzero(slots < 0).squeeze(1)
        self.counters.host_rows += len(far)
        self.counters.near_rows += len(index) - len(far)
        if len(far) == 0:
            return torch.index_select(self._near, 0, slots, out=out)
        if self.num_near:
            # Far rows read row 0 here and are overwritten below.
            torch.index_select(self._near, 0, slots.clamp(min=0), out=out)
        return out.index_copy_(0, far, index_select(self._table, index[far]))


class TieredFetch:
    """A `pydirect.loader.Fetch` over `HotRows`."""

    def __init__(self, hot: HotRows, device: torch.device) -> None:
        self.uses_cpu = device.type != "cuda"
        self._hot = hot
        self._device = device

    def rows(self, node_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """See `pydirect.loader.Fetch.rows`. Every batch is a new tensor."""
        return self._hot.index_select(node_ids.to(self._device))

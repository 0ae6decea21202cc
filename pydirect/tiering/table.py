"""One table over the memory of this GPU, of its peers, and of the host (Listing 4.1).

The rows lie in host memory, all of them. The hottest are copied to each GPU, the next
may be dealt out over GPUs that reach one another fast, and one kernel reads every row
from the nearest place: no list of hits, no second gather, no wait.
"""

import torch

from pydirect.gather import index_select
from pydirect.gather.request import Tiers
from pydirect.memory import HostTable
from pydirect.sampling.graph import check_nodes
from pydirect.tiering.place import TierPlan, plan_tiers

_SAMPLED = 16


def free_budget_bytes(device: torch.device, reserve_bytes: int | None = None) -> int:
    """Return the bytes of GPU memory that hot rows may take now; 0 for a CPU.

    Args:
        device: where the rows are to lie.
        reserve_bytes: what stays for everything else; None for a fifth of the GPU.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    used = torch.cuda.memory_allocated(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    # What the allocator holds unused is free to us; beyond its limit nothing is.
    most = min(free + held - used, int(share * total) - used)
    reserve = int(share * total) // 5 if reserve_bytes is None else reserve_bytes
    return max(0, most - reserve)


class TieredTable:
    """A host table whose hottest rows lie in GPU memory too.

    The copies follow the table when `refresh` is told what has changed. Reads are
    asynchronous; a bad index is raised as `pydirect.gather.index_select` raises it.
    """

    def __init__(
        self,
        table: torch.Tensor | HostTable,
        score: torch.Tensor | None,
        *,
        device: torch.device,
        budget_bytes: int | None = None,
        plan: TierPlan | None = None,
        shares: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """
        Args:
            table: host memory that ``device`` can read, shape (num_rows, ...).
            score: heat of each row, shape (num_rows,); None where the rows are numbered
                by heat (`reorder_by`), which saves four bytes of GPU memory a row.
            device: where the rows are wanted.
            budget_bytes: GPU memory for copies; None for `free_budget_bytes`.
            plan: boundaries of the tiers, instead of ``budget_bytes``.
            shares: what `share_of` gave for each GPU of ``plan``, as tensors that this
                process can read: peers' memory in one process, or opened through CUDA
                IPC (`torch.multiprocessing`).

        Raises:
            ValueError: scores, plan and shares that do not fit the table.
        """
        self.host = table.tensor if isinstance(table, HostTable) else table
        num_rows = self.host.shape[0]
        check_score(score, num_rows)
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"budget_bytes: expects 0 or more, got {budget_bytes}")
        if plan is None:
            budget = budget_bytes
            if budget is None:
                budget = free_budget_bytes(device)
            plan = plan_tiers(num_rows, self.row_bytes, replicated_bytes=budget)
        _check_shares(plan, shares, num_rows)
        self.plan = plan
        self.device = device
        near = plan.replicated_rows + plan.spread_rows
        self._hottest = hottest_rows(score, near).to(device)
        heat = None
        if score is not None:
            heat = torch.full((num_rows,), near, dtype=torch.int32, device=device)
            heat[self._hottest] = torch.arange(near, dtype=torch.int32, device=device)
        local = index_select(self.host, self._hottest[: plan.replicated_rows])
        for share in shares:
            # PyTorch lets a GPU read a peer's memory from the first copy on.
            share[:1].to(device)
        self._tiers = Tiers(heat=heat, local=local, shares=shares)
        self._calls = 0
        self._counted = torch.zeros(2, dtype=torch.int64, device=device)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; at least 1."""
        return max(1, self.host.nbytes // max(1, self.host.shape[0]))

    @property
    def num_near(self) -> int:
        """Rows that GPUs hold."""
        return self._tiers.num_near

    def index_select(
        self,
        index: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        max_sms: int | None = None,
    ) -> torch.Tensor:
        """``table[index]`` on the device, shape (num_indices, ...).

        Args:
            index: int32 or int64, shape (num_indices,), on the device.
            out: where to write.
            max_sms: at most so many multiprocessors.
        """
        if self._calls % _SAMPLED == 0:
            self._count(index)
        self._calls += 1
        found = index_select(
            self.host,
            index,
            out=out,
            max_sms=max_sms,
            tiers=self._tiers if self.num_near else None,
        )
        if self.device.type == "cpu" and self.num_near:
            self._overlay(found, index)
        return found

    def hit_ratio(self) -> float:
        """Return the share of rows that GPU memory gave, of one call in sixteen; waits
        for the device. 0 before the first call."""
        near, every = (int(n) for n in self._counted)
        return near / max(1, every)

    def refresh(self, rows: torch.Tensor | None = None) -> None:
        """Copy again what has changed in the host table.

        Args:
            rows: int64, shape (num_rows,), which rows; None for all that are near.

        Raises:
            ValueError: rows that the table does not have, or rows are spread over GPUs,
                of which each holds its own.
        """
        if self.plan.spread_rows:
            raise ValueError(
                "refresh: expects a table without rows spread over GPUs; build the "
                "shares again with share_of"
            )
        ranks = torch.arange(self.num_near, device=self.device)
        if rows is not None:
            check_nodes("rows", rows, self.host.shape[0], "rows")
            ranks = self._rank(rows.to(self.device))
            ranks = ranks[ranks < self.num_near].unique()
        changed = index_select(self.host, self._hottest[ranks])
        self._tiers.local[ranks] = changed

    def read_from(self, table: torch.Tensor) -> None:
        """Read another host table of the same shape and dtype from now on."""
        self.host = table
        self.refresh()

    def _rank(self, rows: torch.Tensor) -> torch.Tensor:
        heat = self._tiers.heat
        return rows.long() if heat is None else heat[rows.long()].long()

    def _count(self, index: torch.Tensor) -> None:
        # Bad indices are the gather's to raise.
        rows = index.clamp(0, max(0, self.host.shape[0] - 1))
        if self.host.shape[0]:
            self._counted[0] += (self._rank(rows) < self.num_near).sum()
            self._counted[1] += index.numel()

    def _overlay(self, found: torch.Tensor, index: torch.Tensor) -> None:
        """Overlay rows of nearer tiers, as kernels do, in whole-tensor operations."""
        rank = self._rank(index)
        for places, copies in self._copies():
            slot = torch.full((self.num_near + 1,), -1, device="cpu")
            slot[places] = torch.arange(len(places), device="cpu")
            here = slot[rank.clamp(max=self.num_near)]
            found[here >= 0] = copies[here[here >= 0]]

    def _copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Ranks and rows of each place."""
        places = [torch.arange(self.plan.replicated_rows, device="cpu")]
        places += [self.plan.rows_on(gpu) for gpu in range(len(self._tiers.shares))]
        return list(zip(places, (self._tiers.local, *self._tiers.shares), strict=True))


def check_score(score: torch.Tensor | None, num_rows: int) -> None:
    """
    Raises:
        ValueError: not one number a row, or NaN, which has no place in an order.
    """
    if score is None:
        return
    if score.shape != (num_rows,):
        raise ValueError(
            f"score: expects one for each of {num_rows} rows, got shape "
            f"{list(score.shape)}"
        )
    if bool(score.isnan().any()):
        at = int(score.isnan().nonzero()[0])
        raise ValueError(f"score: expects numbers, got NaN for row {at}")


def hottest_rows(score: torch.Tensor | None, num_near: int) -> torch.Tensor:
    """Find the rows with the highest scores, in order: int64, shape (num_near,)."""
    if score is None:
        return torch.arange(num_near, device="cpu")
    found: torch.Tensor = score.argsort(descending=True, stable=True)[:num_near]
    return found


def share_of(
    table: torch.Tensor,
    score: torch.Tensor | None,
    plan: TierPlan,
    gpu: int,
    device: torch.device,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather what GPU ``gpu`` holds of the spread tier to ``device``, in ``out``."""
    near = plan.replicated_rows + plan.spread_rows
    rows = hottest_rows(score, near)[plan.rows_on(gpu)]
    return index_select(table, rows.to(device), out=out)


def _check_shares(
    plan: TierPlan, shares: tuple[torch.Tensor, ...], num_rows: int
) -> None:
    if plan.num_rows != num_rows:
        raise ValueError(
            f"plan: expects one of {num_rows} rows, got one of {plan.num_rows}"
        )
    expected = [len(plan.rows_on(gpu)) for gpu in range(plan.num_gpus)]
    given = [share.shape[0] for share in shares]
    if plan.spread_rows and given != expected:
        raise ValueError(
            f"shares: expects {expected} rows on {plan.num_gpus} GPUs (see share_of), "
            f"got {given}"
        )
    if not plan.spread_rows and shares:
        raise ValueError("shares: expects none, the plan spreads no rows")


class TieredFetch:
    """A `pydirect.loader.Fetch` over a `TieredTable`, into buffers that take turns."""

    def __init__(
        self, table: TieredTable, num_slots: int, max_sms: int | None = None
    ) -> None:
        """``num_slots``: batches on the device at once; ``max_sms``: of a gather."""
        self.uses_cpu = table.device.type != "cuda"
        self._table = table
        self.max_sms = max_sms
        self._buffers: list[torch.Tensor | None] = [None] * num_slots

    def rows(self, node_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """See `pydirect.loader.Fetch.rows`."""
        device, num = self._table.device, len(node_ids)
        buffer = self._buffers[slot]
        if buffer is None or buffer.shape[0] < num:
            host = self._table.host
            shape = (num + num // 10, *host.shape[1:])
            buffer = torch.empty(shape, dtype=host.dtype, device=device)
            self._buffers[slot] = buffer
        index = node_ids.to(device, non_blocking=True)
        return self._table.index_select(index, out=buffer[:num], max_sms=self.max_sms)

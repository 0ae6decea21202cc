"""Trainable rows of a table larger than GPU memory, with sparse updates.

[Note: Copies follow the optimizer] The parameter lies in host memory, its gradient is
a sparse tensor there, and torch's own sparse optimizers update it: results are those
of `torch.nn.Embedding(sparse=True)`, byte for byte. The copies in GPU memory are stale
from the update to the next `refresh`. `sparse_optimizer` refreshes exactly the rows
that had a gradient; any other change of the parameter is seen by its version and
refreshes all. Writes past autograd (``weight.data``) have no version: tell
``embedding.table.refresh(rows)``. A parameter that lies elsewhere than it did (after
``copy.deepcopy``, ``load_state_dict(assign=True)``) is copied to memory that GPUs read.
"""

from collections.abc import Callable
from typing import Any, cast

import torch

from pydirect.memory import to_table
from pydirect.tiering.place import TierPlan
from pydirect.tiering.table import TieredTable

# They change the rows that have a gradient, and no others.
_ROW_BY_ROW = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)


class TieredEmbedding(torch.nn.Module):
    """``weight[index]`` on a GPU, where ``weight`` is a parameter in host memory."""

    def __init__(
        self,
        weight: torch.Tensor,
        score: torch.Tensor | None,
        *,
        device: torch.device,
        budget_bytes: int | None = None,
        plan: TierPlan | None = None,
    ) -> None:
        """
        Args:
            weight: CPU, floating point, shape (num_rows, width); copied once into
                memory that GPUs read.
            score: heat of each row, or None; see `TieredTable`.
            device: where rows are wanted.
            budget_bytes: GPU memory for copies; None for what is free.
            plan: instead of ``budget_bytes``; rows cannot be spread over GPUs.

        Raises:
            ValueError: ``weight`` is not of floating point, or see `TieredTable`.
        """
        super().__init__()
        if not weight.is_floating_point():
            raise ValueError(f"weight: expects floating point, got {weight.dtype}")
        self.weight = torch.nn.Parameter(to_table(weight.detach()))
        self._table = TieredTable(
            self.weight.detach(),
            score,
            device=device,
            budget_bytes=budget_bytes,
            plan=plan,
        )
        self._seen_version = self.weight._version
        self.num_full_refreshes = 0
        """How often all copies were made again, because the parameter had changed in a
        way that was not announced."""

    @property
    def table(self) -> TieredTable:
        """The rows as they are read."""
        return self._table

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """The rows of ``index`` (int64, any shape), shape (*index.shape, width)."""
        self._follow()
        flat = index.reshape(-1)
        rows = cast(torch.Tensor, _Rows.apply(self.weight, self._table, flat))  # type: ignore[no-untyped-call]
        return rows.view(*index.shape, *self.weight.shape[1:])

    def _follow(self) -> None:
        """Make all copies again if the parameter was changed or replaced."""
        weight, host = self.weight.detach(), self._table.host
        if weight.data_ptr() != host.data_ptr():
            known = (host.dtype, host.shape, host.device)
            if (weight.dtype, weight.shape, weight.device) != known:
                raise ValueError(
                    f"weight: expects {host.dtype} of shape {list(host.shape)} in host "
                    f"memory, as it was built, got {weight.dtype} of shape "
                    f"{list(weight.shape)} on {weight.device}: build another "
                    "TieredEmbedding"
                )
            self.weight.data = to_table(weight.contiguous())
            self._table.read_from(self.weight.detach())
        elif self.weight._version != self._seen_version:
            self._table.refresh()
        else:
            return
        self._seen_version = self.weight._version
        self.num_full_refreshes += 1

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> "TieredEmbedding":
        """Leave the parameter in host memory when a model around it is moved.

        Raises:
            ValueError: the model gets another dtype, which the copies do not have.
        """
        dtype = fn(torch.empty(0, dtype=self.weight.dtype, device="cpu")).dtype
        if dtype != self.weight.dtype:
            raise ValueError(
                f"TieredEmbedding expects to keep its {self.weight.dtype}, got "
                f"{dtype}: build it from weight.to({dtype}) instead"
            )
        return self

    def sparse_optimizer(
        self, kind: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer of ``weight`` after whose steps the copies are right.

        Args:
            kind: `torch.optim.SGD`, `SparseAdam` or `Adagrad`.
            options: of ``kind``.

        Raises:
            ValueError: an optimizer, or momentum or decay, that changes rows without a
                gradient.
        """
        made = kind([self.weight], **options)
        dense = [
            name
            for name in ("momentum", "weight_decay")
            if any(group.get(name) for group in made.param_groups)
        ]
        if not isinstance(made, _ROW_BY_ROW) or dense:
            raise ValueError(
                "sparse_optimizer expects SGD, SparseAdam or Adagrad, without momentum "
                f"and weight decay, got {type(made).__name__} with {dense or 'none'}: "
                "others change rows that have no gradient. Build it yourself, and "
                "every step refreshes all copies"
            )
        made.register_step_pre_hook(self._remember)
        made.register_step_post_hook(self._refresh)
        return made

    def _remember(self, *_: Any) -> None:
        self._expected = self.weight._version == self._seen_version

    def _refresh(self, *_: Any) -> None:
        # Behind the step: a closure computes its gradient inside.
        grad = self.weight.grad
        if grad is None:
            return
        self._table.refresh(grad.coalesce().indices()[0] if grad.is_sparse else None)
        if self._expected:
            self._seen_version = self.weight._version


class _Rows(torch.autograd.Function):
    """A gather whose gradient is a sparse tensor in host memory."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, table: TieredTable, index: torch.Tensor
    ) -> torch.Tensor:
        ctx.index, ctx.shape = index, weight.shape
        return table.index_select(index.to(table.device))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        index, rows = ctx.index.cpu()[None], grad.cpu()
        made = torch.sparse_coo_tensor(
            index, rows, ctx.shape, check_invariants=True, device=rows.device
        )
        return made, None, None

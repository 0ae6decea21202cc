"""DGL's `TypedLinear`: one matrix a type."""

import math

import torch
from torch import Tensor, nn

from hector.indexing import group_by
from hector.precision import entering, wide
from hector.tracing import untraced


class TypedLinear(nn.Module):
    """Rows times the matrix of their type, with DGL's arguments.

    `regularizer` "basis": matrices are sums of `num_bases` bases; "bdd": of `num_bases`
    blocks on the diagonal. `@hector.compile` reads a call as one product of all types.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        num_types: int,
        regularizer: str | None = None,
        num_bases: int | None = None,
    ) -> None:
        super().__init__()
        if regularizer not in (None, "basis", "bdd"):
            raise ValueError(
                f"expected regularizer None, 'basis' or 'bdd', got {regularizer!r}"
            )
        if regularizer is not None and num_bases is None:
            raise ValueError(f"expected num_bases for regularizer {regularizer!r}")
        self.in_size, self.out_size, self.num_types = in_size, out_size, num_types
        self.num_bases, self.regularizer = num_bases or 0, regularizer
        self.coeff: nn.Parameter | None = None
        shape: tuple[int, ...] = (num_types, in_size, out_size)
        if regularizer == "basis":
            shape = (self.num_bases, in_size, out_size)
            self.coeff = nn.Parameter(torch.empty(num_types, self.num_bases))
        elif regularizer == "bdd":
            b = self.num_bases
            if in_size % b or out_size % b:
                raise ValueError(
                    f"expected in_size {in_size} and out_size {out_size} divisible by "
                    f"num_bases {b}"
                )
            shape = (num_types, b, in_size // b, out_size // b)
        self.W = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw matrices within 1 / sqrt(in_size), as DGL does."""
        bound = 1 / math.sqrt(self.W.shape[-2])
        nn.init.uniform_(self.W, -bound, bound)
        if self.coeff is not None:
            nn.init.xavier_uniform_(self.coeff, gain=nn.init.calculate_gain("relu"))

    def get_weight(self) -> Tensor:
        """Return [num_types, in_size, out_size], of "bdd" [num_types, blocks, ...]."""
        if self.coeff is None:
            return self.W
        flat = wide(self.coeff) @ wide(self.W).flatten(1)
        return flat.view(self.num_types, self.in_size, self.out_size)

    @untraced
    def forward(
        self, x: Tensor, x_type: Tensor, sorted_by_etype: bool = False
    ) -> Tensor:
        """Return [rows, out_size]; `sorted_by_etype` changes nothing: rows are sorted
        by type inside."""
        x, dtype = entering(x, self.W)
        groups = group_by(x_type, self.num_types)
        weights = wide(self.get_weight()).unbind()
        parts = [
            self._product(rows, weight)
            for rows, weight in zip(
                x[groups.items].split(groups.ptr.diff().tolist()), weights, strict=True
            )
        ]
        out = torch.empty_like(groups.items)
        out[groups.items] = torch.arange(len(out), device=out.device)
        return torch.cat(parts)[out].to(dtype)

    def _product(self, rows: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() == 2:
            return rows @ weight
        blocks = rows.unflatten(1, (weight.shape[0], -1))
        return torch.einsum("ebk,bkn->ebn", blocks, weight).flatten(1)

    def extra_repr(self) -> str:
        return (
            f"in_size={self.in_size}, out_size={self.out_size}, "
            f"num_types={self.num_types}, regularizer={self.regularizer}, "
            f"num_bases={self.num_bases}"
        )

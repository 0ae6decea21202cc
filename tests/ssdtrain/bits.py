"""Equality as bytes: `torch.equal` takes -0.0 for 0.0, and NaN for different."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def same_bits(ours: Any, theirs: Any) -> bool:
    """Whether tensors, numbers, or lists and mappings of them are equal byte by byte.

    Tensors also in dtype, shape and layout (strides may differ); of DTensors the local
    parts. Lists of other lengths differ.

    Raises:
        ValueError: nothing was compared, so the answer would mean nothing.
    """
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _same_tensor(ours.detach(), theirs.detach())
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and same_bits(
            list(ours.values()), [theirs[name] for name in ours]
        )
    if _is_list(ours) and _is_list(theirs):
        if not ours and not theirs:
            raise ValueError(
                "same_bits expects something to compare, got two empty lists"
            )
        return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours.hex() == theirs.hex()
    return type(ours) is type(theirs) and bool(ours == theirs)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _same_tensor(ours: Tensor, theirs: Tensor) -> bool:
    if isinstance(ours, DTensor) or isinstance(theirs, DTensor):
        return type(ours) is type(theirs) and _same_tensor(
            ours.to_local(), theirs.to_local()
        )
    if ours.dtype is not theirs.dtype or ours.layout is not theirs.layout:
        return False
    if ours.is_nested or ours.layout is not torch.strided:
        mine, others = _parts(ours), _parts(theirs)
        return len(mine) == len(others) and all(map(_same_tensor, mine, others))
    return ours.shape == theirs.shape and torch.equal(_bytes(ours), _bytes(theirs))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that a nested or sparse one is made of."""
    if tensor.is_nested:
        return list(tensor.unbind())
    size = torch.tensor(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        merged = tensor.coalesce()
        return [size, merged.indices(), merged.values()]
    return [size, tensor.crow_indices(), tensor.col_indices(), tensor.values()]


def _bytes(tensor: Tensor) -> Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)

"""FSDP2, tensor-parallel meshes and data parallel models: which ranks wait for whom."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ssdtrain.cache.wrapped import plain_parts
from ssdtrain.gathered import is_gathering

FSDP = "torch.distributed.fsdp"


def ranks_of(modules: Iterable[nn.Module]) -> set[int]:
    """Global ranks on the meshes of the parameters, and in the groups of wrappers."""
    ranks: set[int] = set()
    for module in modules:
        for parameter in nn.Module.parameters(module):
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                ranks.update(mesh.mesh.flatten().tolist())
        for part in module.modules():
            if isinstance(part, DistributedDataParallel) or _is_fsdp1(part):
                group: Any = part.process_group
                ranks.update(distributed.get_process_group_ranks(group))
    return ranks


def copies_tables(module: nn.Module) -> bool:
    """Whether FSDP2 gathers weights of it, for which it copies small tables to the
    device: [Note: others' small copies] in transfer/native.py."""
    return any(map(is_gathering, module.modules()))


def _is_fsdp1(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "FullyShardedDataParallel" and kind.__module__.startswith(
        FSDP
    )


def keep_parts(modules: Iterable[nn.Module], keep: Callable[[Tensor], None]) -> None:
    """Never move this rank's parts of distributed parameters and buffers: a model that
    computes with `weight.to_local()` saves tensors that lie in them.

    keep: never move the storage of this tensor.
    """
    for module in modules:
        both = chain(nn.Module.parameters(module), nn.Module.buffers(module))
        for tensor in both:
            for part in plain_parts(tensor):
                keep(part)

"""Let the GPU read host memory in place.

``import pydirect`` registers the device ``unified`` with PyTorch and does nothing else:
no CUDA context, no thread. ``features.to("unified")[index]`` then gathers rows of host
memory on the GPU. See docs/pydirect.md.
"""

import torch

from pydirect.device import register, set_affinity_
from pydirect.errors import PlacementError, UnsupportedOperatorError
from pydirect.placement import Affinity
from pydirect.transfer import Counters, over, to_device, to_host

__all__ = [
    "Affinity",
    "Counters",
    "PlacementError",
    "UnsupportedOperatorError",
    "counters",
    "set_affinity_",
    "to_device",
    "to_host",
    "unify",
]


def unify(
    tensor: torch.Tensor, affinity: Affinity | str = Affinity.GPU
) -> torch.Tensor:
    """A unified tensor over the memory of a CPU tensor: no copy.

    ``tensor.to("unified")`` copies, as `to` always does between devices; this does not,
    which is what a table of half the host memory needs. The memory is pinned in place
    when a GPU first works on it; shared memory stays shared.

    Args:
        tensor: CPU, dense, any shape and dtype, not inside an autograd graph.
        affinity: "gpu" or "host".

    Raises:
        ValueError: ``tensor`` is not on the CPU, not dense, or requires gradients.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"unify expects a dense CPU tensor, got {tensor.layout} on {tensor.device}"
        )
    if tensor.requires_grad:
        raise ValueError(
            "unify expects a tensor without gradients, got one that requires them: "
            "pass tensor.detach() and call requires_grad_() on the result"
        )
    return over(tensor, Affinity(affinity))


def counters() -> Counters:
    """What the placement rules have cost in this process."""
    return register().counters


register()

"""Let the GPU read host memory in place.

``import pydirect`` changes nothing in PyTorch: gathers, host tables, loaders, tiering
and traversal work on ordinary tensors. `enable` adds the device ``unified``, after
which ``features.to("unified")[index]`` gathers rows of host memory on the GPU. See
docs/pydirect.md.
"""

import torch

from pydirect.device import enable, enabled, set_affinity_
from pydirect.errors import NotEnabledError, PlacementError, UnsupportedOperatorError
from pydirect.gather import Explanation
from pydirect.gather import explain as _explain
from pydirect.memory import HostTable
from pydirect.placement import Affinity
from pydirect.region import DEVICE_TYPE
from pydirect.transfer import Counters, over, to_device, to_host

__all__ = [
    "Affinity",
    "Counters",
    "Explanation",
    "NotEnabledError",
    "PlacementError",
    "UnsupportedOperatorError",
    "counters",
    "enable",
    "explain",
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
    when a GPU first works on it; shared memory stays shared. GPUs map it in small pages
    and the copy of ``.to("unified")`` in large ones: docs/pydirect-gather.md says what
    that costs.

    Args:
        tensor: CPU, dense, any shape and dtype, not inside an autograd graph.
        affinity: "gpu" or "host".

    Raises:
        NotEnabledError: `enable` has not been called.
        ValueError: no tensor, or one that is not on the CPU, not dense, or requires
            gradients.
    """
    enabled()
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"unify expects a CPU tensor, got {type(tensor).__name__}: pass "
            "torch.from_numpy(array), which shares its memory"
        )
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


def explain(
    table: torch.Tensor | HostTable, rows: torch.Tensor, *, max_sms: int | None = None
) -> Explanation:
    """Tell which path ``table[rows]`` takes and why; gathers nothing.

    Args:
        table: unified tensor, host table or CPU tensor, shape (num_rows, ...).
        rows: int32 or int64, shape (num_indices,), on the CPU or a GPU.
        max_sms: budget of multiprocessors that the gather is to have; None for none.

    Returns:
        Predicted and measured milliseconds of every path, requests on the link and
        costs of address translation; ``print`` it.

    Raises:
        ValueError: ``table`` or ``rows`` is not what it should be.
    """
    if isinstance(table, torch.Tensor) and table.device.type == DEVICE_TYPE:
        table = to_host(table.detach())
    return _explain(table, rows, max_sms=max_sms)


def counters() -> Counters:
    """What the placement rules have cost in this process.

    Raises:
        NotEnabledError: `enable` has not been called.
    """
    return enabled().counters

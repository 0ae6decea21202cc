"""Keep LLM training inside GPU memory: saved activations are kept, offloaded or
recomputed, tensor by tensor, and gradients stay bitwise equal.

    session = ssdtrain.offload(model, target="ssd", directory="/mnt/nvme0")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdtrain.api import Session, offload
    from ssdtrain.config import OffloadConfig
    from ssdtrain.counters import StepReport
    from ssdtrain.remat.registry import recipe
    from ssdtrain.train.callback import OffloadCallback as OffloadCallback

# Without OffloadCallback: a star import must not ask for transformers.
__all__ = ["OffloadConfig", "Session", "StepReport", "offload", "recipe"]

_HOME = {
    "offload": "ssdtrain.api",
    "Session": "ssdtrain.api",
    "OffloadCallback": "ssdtrain.train.callback",
    "OffloadConfig": "ssdtrain.config",
    "StepReport": "ssdtrain.counters",
    "recipe": "ssdtrain.remat.registry",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that `import ssdtrain` is instant and loads no torch.
    if name not in _HOME:
        raise AttributeError(f"module 'ssdtrain' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)

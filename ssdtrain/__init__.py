"""Keep LLM training inside GPU memory: saved activations are kept, offloaded or
recomputed, tensor by tensor, and gradients stay bitwise equal.

    session = ssdtrain.offload(model, target="ssd", directory="/mnt/nvme0")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdtrain.api import Session, offload
    from ssdtrain.cache.scope import no_offload
    from ssdtrain.config import OffloadConfig
    from ssdtrain.counters import StepReport
    from ssdtrain.rebuild.recipes import recipe
    from ssdtrain.train.callback import OffloadCallback as OffloadCallback
    from ssdtrain.train.lightning_callback import (
        LightningCallback as LightningCallback,
    )

__version__ = "0.2.0"

# Without the callbacks: a star import must not ask for transformers or Lightning.
__all__ = [
    "OffloadConfig",
    "Session",
    "StepReport",
    "__version__",
    "no_offload",
    "offload",
    "recipe",
]

_HOME = {
    "offload": "ssdtrain.api",
    "Session": "ssdtrain.api",
    "LightningCallback": "ssdtrain.train.lightning_callback",
    "OffloadCallback": "ssdtrain.train.callback",
    "OffloadConfig": "ssdtrain.config",
    "StepReport": "ssdtrain.counters",
    "no_offload": "ssdtrain.cache.scope",
    "recipe": "ssdtrain.rebuild.recipes",
}

# The callbacks, and whose they are.
_FOR = {"LightningCallback": "lightning", "OffloadCallback": "transformers"}


def __getattr__(name: str) -> Any:
    # Lazy, so that `import ssdtrain` is instant and loads no torch.
    if name not in _HOME:
        raise AttributeError(f"module 'ssdtrain' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing != _FOR.get(name):
            raise
        raise ImportError(
            f"ssdtrain.{name} is for {_FOR[name]}, which is not installed: "
            f"pip install {_FOR[name]}",
            name=error.name,
        ) from error

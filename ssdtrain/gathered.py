"""Parameters whose data come for forward and backward, and go in between."""

from torch import Tensor


def is_gathered(parameter: Tensor) -> bool:
    """Whether ZeRO-3 gathers its data: it marks such parameters."""
    return hasattr(parameter, "ds_id")

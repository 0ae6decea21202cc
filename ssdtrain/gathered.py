"""Parameters whose data come for forward and backward, and go in between."""

from collections.abc import Iterable
from itertools import repeat

from torch import Tensor

MARK = "ds_id"


def is_gathered(parameter: Tensor) -> bool:
    """Whether ZeRO-3 gathers its data: it marks such parameters."""
    return hasattr(parameter, MARK)


def any_gathered(parameters: Iterable[Tensor]) -> bool:
    """Whether one of them is; without a call of Python for each."""
    return any(map(hasattr, parameters, repeat(MARK)))

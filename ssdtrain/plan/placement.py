"""What can happen to a saved tensor."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto


class Placement(Enum):
    """What happens to one record."""

    KEEP = auto()
    """Stays in device memory until backward has used it."""
    KEEP_LAST = auto()
    """Stays, because backward asks for it at once; takes the place of earlier tensors
    in the release window, which drains as these arrive."""
    OFFLOAD = auto()
    """Moves to the target and waits for the link if it must."""
    OFFLOAD_SSD = auto()
    """Moves to host memory and on to the storage after it at once, by the rates
    `ssd_write` and `ssd_read` of the profile, whatever the storage is; `tiered` chooses
    by item."""
    OFFLOAD_IF_IN_TIME = auto()
    """Moves to the target unless that would stall compute; then kept, counted."""
    RECOMPUTE = auto()
    """Is rebuilt from another record by a recipe."""
    RERUN = auto()
    """Is made again when the forward of its region runs again."""

    __hash__ = object.__hash__  # Enum's runs in Python: a search asks a million times


AGAIN_PLACEMENTS = (Placement.RECOMPUTE, Placement.RERUN)
"""Those by which bytes are not stored."""


AWAY_PLACEMENTS = (Placement.OFFLOAD, Placement.OFFLOAD_SSD)
"""Those of a plan by which bytes leave the device."""

Placements = Mapping[str, Sequence[Placement]]
"""A placement for each item, by kind of lane."""

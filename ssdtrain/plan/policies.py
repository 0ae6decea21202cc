"""The policies that need no profile: a placement for each record as it is packed."""

from dataclasses import dataclass
from typing import Protocol

from ssdtrain.plan.placement import Placement


@dataclass(frozen=True, kw_only=True)
class LaneOutlook:
    """What is known about a lane from the last time it was seen."""

    total_bytes: int
    """Bytes of all eligible records; 0 when the lane was never seen."""
    backward_follows: bool
    """Whether its backward began before any other forward."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One record at the moment it is packed."""

    ordinal: int
    """Position in its lane, from 0."""
    num_bytes: int
    bytes_before: int
    """Eligible bytes of the lane packed before it."""
    tail_bytes: int
    """Bytes that a release window could never get rid of before backward."""
    outlook: LaneOutlook
    held: bool = False
    """Its owner holds it until the end of backward: moving it frees nothing."""


class Policy(Protocol):
    """Decides placements, one record at a time, in pack order."""

    def place(self, candidate: Candidate) -> Placement:
        """Return the placement of this record."""


class KeepAll:
    """Moves nothing."""

    def place(self, candidate: Candidate) -> Placement:
        """Return KEEP."""
        return Placement.KEEP


@dataclass(frozen=True)
class OffloadAll:
    """Moves everything but the last tensors of a lane whose backward follows.

    Backward asks for those at once: moving them would only send them to the target
    and straight back (Wu 5.3.2, mark 4 of Figure 5.5).
    """

    placement: Placement = Placement.OFFLOAD
    spares_held: bool = False
    """Whether what its owner holds anyway stays, as in every plan."""

    def place(self, candidate: Candidate) -> Placement:
        """Return KEEP_LAST in the tail, else the placement given at construction."""
        if candidate.held and self.spares_held:
            return Placement.KEEP
        outlook = candidate.outlook
        left = outlook.total_bytes - candidate.bytes_before - candidate.num_bytes
        if outlook.backward_follows and 0 <= left < candidate.tail_bytes:
            return Placement.KEEP_LAST
        return self.placement

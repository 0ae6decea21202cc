"""Which part of a step each mark belongs to.

A region call has a part in forward and one in backward. What lies after a call belongs
to it, up to the next one; after the last one nothing says where it ends.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ssdtrain.plan.profile import Item, Phase, Profile, RegionRun

NONE = -1


class StepPart(NamedTuple):
    """One way through a region call."""

    kind: str
    region: int
    """`NONE`: what lies outside of regions."""
    phase: Phase


def parts_of(profile: Profile) -> list[StepPart]:
    """Return the part of the step that each mark belongs to."""
    found: list[StepPart] = []
    first_of = {
        kind: _first_readers(runs, profile.kinds[kind])
        for kind, runs in profile.regions.items()
    }
    last = {
        (kind, phase): last
        for kind, runs in profile.regions.items()
        for phase, last in ((Phase.FORWARD, len(runs) - 1), (Phase.BACKWARD, 0))
    }
    before: dict[tuple[int, Phase], int] = {}
    for mark in profile.marks:
        kind = profile.lanes[mark.lane]
        region = profile.kinds[kind][mark.item].region
        at = mark.lane, mark.phase
        if region < 0 and mark.phase is Phase.FORWARD:
            region = first_of.get(kind, {}).get(mark.item, NONE)
        if region >= 0:
            before[at] = region
        else:
            region = before.get(at, NONE)
            if region == last.get((kind, mark.phase)):
                region = NONE  # nothing follows that says where it ends
        found.append(StepPart(kind, region, mark.phase))
    return found


def ms_of(profile: Profile, parts: Sequence[StepPart]) -> dict[StepPart, float]:
    """Return what each part takes, in all lanes of its kind together."""
    found: dict[StepPart, float] = {}
    for mark, part in zip(profile.marks, parts, strict=True):
        found[part] = found.get(part, 0.0) + mark.ms
    return found


def _first_readers(runs: Sequence[RegionRun], items: Sequence[Item]) -> dict[int, int]:
    """Return the first region call that reads each item that none saves."""
    found: dict[int, int] = {}
    for number, run in enumerate(runs):
        for item in run.inputs:
            if items[item].region < 0:
                found.setdefault(item, number)
    return found

"""Selective checkpointing, as torchtitan does it, on an estimated profile: regions run
again, but for attention and every second product of matrices."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ssdtrain.plan.profile import Phase, Profile

PRODUCTS = ("aten::mm", "aten::addmm")
ATTENTION = "_scaled_dot_product"
"""In the name of every operator of fused attention."""


class StoredResult(NamedTuple):
    """What one call of a region stores."""

    ms: float
    """Of the operators that do not run again."""
    num_bytes: int
    """Of their results."""


def kept_operators(names: Iterable[tuple[int, str]]) -> list[int]:
    """Return the numbers of a call's operators whose results are stored."""
    found, num_products = [], 0
    for number, name in names:
        if name in PRODUCTS:
            num_products += 1
            if num_products % 2:
                found.append(number)
        elif ATTENTION in name:
            found.append(number)
    return found


def selective(profile: Profile, stored: Sequence[StoredResult]) -> Profile:
    """Return the profile whose "regions" policy is selective checkpointing."""
    [kind] = profile.lanes
    items, runs = profile.kinds[kind], profile.regions[kind]
    before = [0]  # by call: what the calls before it have stored
    for each in stored:
        before.append(before[-1] + each.num_bytes)
    marks = []
    pending = 0
    for mark in profile.marks:
        call = max(items[mark.item].region, items[mark.item].serves)
        if mark.phase is Phase.BACKWARD:
            # What comes before the last call's backward finds all of it stored.
            pending = before[call] if call >= 0 else pending
        elif call >= 0:
            pending = before[call + 1]
        marks.append(replace(mark, other_bytes=mark.other_bytes + pending))
    cheaper = tuple(
        replace(
            run,
            ms=max(0.0, run.ms - each.ms),
            other_bytes=run.other_bytes + before[call],
            parts=(),
        )
        for call, (run, each) in enumerate(zip(runs, stored, strict=True))
    )
    return replace(profile, marks=tuple(marks), regions={kind: cheaper})

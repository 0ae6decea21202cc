"""Selective checkpointing, as torchtitan does it, on an estimated profile: regions run
again, but for attention and every second product of matrices."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ssdtrain.plan.profile import Phase, Profile

PRODUCTS = ("aten::mm", "aten::addmm")
ATTENTION = "_scaled_dot_product"
"""In the name of every operator of fused attention."""
MODE_VIEWS = 2.0
"""What its dispatch mode takes the host for an operator, in a forward and where that
runs again, in times of what a view takes it (1.5 to 2.3, six stock models, H200)."""


class StoredResult(NamedTuple):
    """What one call of a region stores."""

    ms: float
    """Of the operators that do not run again."""
    num_bytes: int
    """Of their results."""
    host_ms: float = 0.0
    """Of the dispatch mode, which asks about each operator; 0: no host beside it."""


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
    pending, begun = 0, -1
    for mark in profile.marks:
        call = max(items[mark.item].region, items[mark.item].serves)
        if mark.phase is Phase.BACKWARD:
            # What comes before the last call's backward finds all of it stored.
            pending = before[call] if call >= 0 else pending
        elif call >= 0:
            pending = before[call + 1]
        host_ms = mark.host_ms
        if mark.phase is Phase.FORWARD and call > begun:
            host_ms += stored[call].host_ms
            begun = call
        other_bytes = mark.other_bytes + pending
        marks.append(replace(mark, host_ms=host_ms, other_bytes=other_bytes))
    cheaper = tuple(
        replace(
            run,
            ms=max(0.0, run.ms - each.ms),
            host_ms=run.host_ms + each.host_ms,
            other_bytes=run.other_bytes + before[call],
            parts=(),
        )
        for call, (run, each) in enumerate(zip(runs, stored, strict=True))
    )
    return replace(profile, marks=tuple(marks), regions={kind: cheaper})

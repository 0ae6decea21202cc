"""What is held in which step, so that none of them is a long one.

[Note: held in parts]
A step in which the device waits at every look is more than twice as long as the one
behind which it stands: one of 176 ms took 384, and 605 where each of 470 tensors was
rebuilt behind a wait. Training goes on meanwhile, and whoever trains sees such a step.
So it is run in parts: steps in which the device waits at some of the looks, or in which
some of the tensors are rebuilt (samples.py). A wait delays what is behind it by no more
than it lasts, so the waits of a part are no longer together than a step may take more
than it does. What follows a held look takes the device's own time up to the next look,
whether that one is held or not; what follows another look is not read. Looks are dealt
in turn, so that the host, which bounds these steps, comes up between two waits.

Plans wait for these steps, so there are few of them. Where they have no room for all
looks, as in a step of 2 ms, what was not held takes as much less than in the step
before as the rest usually does. A part that was another step than the others says that
they are not alike, and then nothing is known.
(tests/ssdtrain/observe/test_heldparts.py)
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ssdtrain.plan.calibrate import Pace

MOST_OF_STEP = 1.75
"""A held step takes no longer than so many of those that it stands behind: twice as
long is too long."""
LEAST_OF_STEP = 0.5
"""How much longer it may be at least than with its hooks alone. A slow host takes
nearly twice a plain step for them, and a graph's plan that knows nothing costs all its
replays half as much again."""
MOST_PARTS = 5
"""Steps whose looks are held at most."""


class HeldLooks(NamedTuple):
    """One of these steps."""

    holds_ms: Mapping[int, float]
    """For how long the device waited at each mark."""
    pace: Pace
    """What the step told."""


def room_ms(step_ms: float, hooked_ms: float) -> float:
    """Return for how long the device may wait in a step altogether.

    Args:
        step_ms: what it takes without anything.
        hooked_ms: likewise with hooks, and without a wait.
    """
    left_ms = MOST_OF_STEP * step_ms - max(step_ms, hooked_ms)
    return max(LEAST_OF_STEP * step_ms, left_ms)


def dealt(holds_ms: Mapping[int, float], most_ms: float) -> list[dict[int, float]]:
    """Return for how long to hold the device at which marks, part by part; a mark that
    has no room is in none of them.

    Args:
        holds_ms: of all marks, in their order.
        most_ms: of a part.
    """
    fitting = {mark: ms for mark, ms in holds_ms.items() if ms <= most_ms}
    parts: list[dict[int, float]] = []
    for num_parts in range(1, MOST_PARTS + 1):
        parts = [{} for _ in range(num_parts)]
        for mark, ms in fitting.items():
            emptiest = min(parts, key=_total_ms)
            if _total_ms(emptiest) + ms <= most_ms:
                emptiest[mark] = ms
        if sum(map(len, parts)) == len(fitting):
            break
    return [part for part in parts if part]


def _total_ms(part: Mapping[int, float]) -> float:
    return sum(part.values())


def together(before: Pace, parts: Sequence[HeldLooks]) -> Pace | None:
    """Return what one step would have told that was held at each look; None: nothing is
    known.

    Args:
        before: of the step that was not held.
        parts: all of them.
    """
    held = {
        segment.start: segment
        for part in parts
        for segment in part.pace.segments
        if segment.start in part.holds_ms
    }
    shares = [
        held[each.start].ms / each.ms
        for each in before.segments
        if each.start in held and each.ms > 0.0
    ]
    if not shares:
        return None
    usual = statistics.median(shares)
    return replace(
        parts[0].pace,
        head_ms=min(part.pace.head_ms for part in parts),
        segments=tuple(
            held.get(each.start, replace(each, ms=usual * each.ms))
            for each in before.segments
        ),
    )

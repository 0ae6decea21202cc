"""A profile's times, set right by a step that ran without ssdtrain.

[Note: the plain step]
The observed step is watched, and it moves everything: its operators wait for the host
more than those of other steps, and the device's clock is another one. What users
compare with is their step without ssdtrain. So where everything kept fits into device
memory, one such step is measured, and the profile's forward and backward are stretched
or shrunk to its times. What a plan may cost is then counted from the plain step.
(tests/ssdtrain/plan/test_calibrate.py)
"""

from dataclasses import replace
from typing import NamedTuple

from ssdtrain.plan.profile import Phase, Profile

LEAST_FACTOR, MOST_FACTOR = 0.2, 2.0
"""A step outside of these bounds was another one than the observed one."""


class PlainTimes(NamedTuple):
    """A step without ssdtrain."""

    step_ms: float
    """From its first forward to that of the next step."""
    forward_ms: float
    """Of its forwards."""


def calibrated(profile: Profile, plain: PlainTimes) -> Profile:
    """The profile in the plain step's times; as it was if they cannot be its own."""
    rest_ms = profile.compute_ms - profile.forward_ms
    if min(profile.forward_ms, rest_ms, plain.forward_ms) <= 0.0:
        return profile
    forward = plain.forward_ms / profile.forward_ms
    rest = (plain.step_ms - plain.forward_ms) / rest_ms
    if not all(LEAST_FACTOR < factor < MOST_FACTOR for factor in (forward, rest)):
        return profile
    marks = tuple(
        replace(mark, ms=mark.ms * (forward if mark.phase is Phase.FORWARD else rest))
        for mark in profile.marks
    )
    return replace(
        profile,
        marks=marks,
        head_ms=profile.head_ms * forward,
        tail_ms=profile.tail_ms * rest,
        notes={**profile.notes, "plain_step_ms": f"{plain.step_ms:.3f}"},
    )

"""What the forward of a step takes that was seen under hooks alone.

[Note: forwards under hooks]
Where operators are short, the hooks of a step of regions make its forward as long as
the host takes: 168 ms for 131 on an H200, and copies that were planned into the
difference were waited for. In the observed step operators do not wait for their
launches ([Note: held marks] in observe/observer.py), but its device does less at a
time, and may run at a higher clock rate. So a forward grows by as much as the rest of
the step does, which is far from bound by the host, and no further than to what was
measured.

Of several ranks no mark is held, and a batch of a new length makes the host choose
kernels: both steps are then as long as the host took. Under FSDP2 a forward of 178 ms
was believed to take 242, and 145 where batches changed their length and it took some
80. But each region ran again in backward, without hooks that search and far after what
was launched, and that was measured: its first forward takes as long, and what a re-run
leaves out (`LEFT_OUT`). So regions take that, and what lies outside of them, the loss
above all, no longer than it was observed. All of them together take no longer than was
measured.

So does the host: where it had hooks to run between its launches, a forward of FSDP2
took it 224 ms, and its regions 105 again without them. With the first a plan for
checkpointing's memory ran all 36 regions again and moved 4 GB, and was predicted to
take 882 ms; with the second one that moves 11 GB was found, for 829.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ssdtrain.plan.parts import StepPart, ms_of, parts_of
from ssdtrain.plan.profile import Phase, Profile

LEFT_OUT = 0.08
"""Of its re-run, what a region's forward computes besides: a re-run ends with the last
tensor that backward asks for, before a layer's last product. Of stock decoder layers
on H200s some 5.0 ms for 4.75, and 11.1 for 10.6."""

Times = Mapping[str, tuple[float, ...]]
"""Of region calls, in ms, by kind of lane."""


def with_forward_times(
    profile: Profile, factor: float, own: Sequence[float] = ()
) -> Profile:
    """Return the profile whose forwards take so many times as long.

    Args:
        own: factors of the marks, where they have their own.
    """
    factors = own or [factor] * len(profile.marks)
    marks = tuple(
        replace(mark, ms=mark.ms * each) if mark.phase is Phase.FORWARD else mark
        for mark, each in zip(profile.marks, factors, strict=True)
    )
    return replace(profile, marks=marks, head_ms=profile.head_ms * factor)


def without_hooks(
    profile: Profile, most_ms: float, rest: float, rerun_ms: Times
) -> Profile:
    """Return the profile whose forwards take what they take without hooks.

    Args:
        profile: of the observed step.
        most_ms: what all of them took in a step of regions.
        rest: by what the rest of that step was longer than the observed one's.
        rerun_ms: what its region calls took again; 0.0: not known.
    """
    growth = max(1.0, rest)
    most_ms = min(most_ms, profile.forward_ms * growth)
    parts = parts_of(profile)
    seen_ms = ms_of(profile, parts)
    own_ms = {
        part: min(ms, seen_ms[part] * growth)
        for part, ms in _of_regions(profile, rerun_ms).items()
        if seen_ms.get(part, 0.0) > 0.0
    }
    left_ms = most_ms - sum(own_ms.values())
    others_ms = profile.forward_ms - sum(seen_ms[part] for part in own_ms)
    if not own_ms or min(left_ms, others_ms) <= 0.0:
        return with_forward_times(profile, most_ms / profile.forward_ms)
    other = min(left_ms / others_ms, growth)
    factors = {part: ms / seen_ms[part] for part, ms in own_ms.items()}
    return with_forward_times(profile, other, [factors.get(p, other) for p in parts])


def most_host_ms(profile: Profile, rerun_host_ms: Times) -> float:
    """Return what all forwards take the host at most, without hooks; infinite where a
    region has not told.

    Args:
        profile: of the observed step.
        rerun_host_ms: what its region calls took the host again; 0.0: not known.
    """
    found = _of_regions(profile, rerun_host_ms)
    most_ms = profile.head_host_ms + sum(found.values())
    for mark, part in zip(profile.marks, parts_of(profile), strict=True):
        if mark.phase is Phase.FORWARD and part not in found:
            if part.region >= 0:
                return math.inf
            most_ms += mark.host_ms
    return most_ms


def _of_regions(profile: Profile, rerun_ms: Times) -> dict[StepPart, float]:
    """Return what the forwards of region calls take, of all lanes of a kind together. A
    kind of lane that had another number of them then is left out."""
    lanes = Counter(profile.lanes)
    return {
        StepPart(kind, number, Phase.FORWARD): lanes[kind] * ms * (1.0 + LEFT_OUT)
        for kind, times in rerun_ms.items()
        if len(profile.regions.get(kind, ())) == len(times)
        for number, ms in enumerate(times)
        if ms > 0.0
    }

"""A profile in the times of a CUDA graph's replay.

[Note: captured steps]
A CUDA graph's replay has no host: no operator waits for a launch, no hook runs. Where
the host bounds the eager step, the device idles in it, and copies planned into that
time would make the graph several times as long. So the plan that a graph holds is made
for a profile without the host, in the device's own times of a step of regions that was
held ([Note: a held step of regions] in observe/heldregions.py). A replay has no events,
but an edge between compute and a copy costs it something, too (`EDGE_MS`). What a
captured forward cannot do is left out: regions do not run again in it, and nothing is
compared at its rebuilds.

[Note: the host's time is not the device's]
No held step tells of several ranks. Then forward and backward take a replay no longer
than they took in the observed step, whose operators waited for the host the least
([Note: held marks] in observe/observer.py). Believed too short, they hide fewer
copies, and the plan is a worse one; believed too long, the replay waits for copies.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from ssdtrain.plan.calibrate import (
    Corrections,
    RegionTime,
    corrected,
    rebuild_key,
)
from ssdtrain.plan.parts import StepPart, ms_of, parts_of
from ssdtrain.plan.profile import HostCosts, Item, Phase, Profile

UNHELD = "replay_ms"
"""Name of the note that no held step told of a replay's times."""
EDGE_MS = 0.0016
"""What a replay loses where an edge leads from compute to a copy, or back: the kernel
after it starts only then. Of an H100; 0.001 on an H200, whose eager events cost five
times as much."""
REPLAY_SLOWDOWN = 0.01
"""By which copies slow a replay down at least. Eager launches hide after kernels what
a replay shows: its small memsets take microseconds more while a copy runs in. As
above."""
REPLAY_BATCH_SHARE = 0.02
"""`Links.batch_share` of a replay. A layer's two largest tensors are 1 % of what 28
layers save: with 2 % half of the plain graph's memory was predicted at 1.0257x, with
4 % at 1.0259x."""
NEVER_MS = 1e9
"""Of what cannot run in a captured step."""


def captured(profile: Profile, by: Corrections) -> Profile:
    """Return the profile that plans of a CUDA graph are made for: [Note: captured
    steps]."""
    eager = corrected(profile, by)
    before_ms = eager.compute_ms - eager.tail_ms
    eager, held = unhosted(eager, by.held_regions, by.held_head_ms)
    if by.plain:
        eager = no_longer_than(profile, eager, set(Phase) - held)
    eager = replace(eager, tail_ms=0.0)
    # Launches bound rebuilds as they bound the step.
    factor = min(1.0, eager.compute_ms / before_ms) if before_ms else 1.0

    def own_ms(item: Item) -> float:
        found = by.rebuild_ms.get(rebuild_key(item.recipe or "", item.num_bytes))
        return item.recipe_ms * factor if found is None else min(found, item.recipe_ms)

    compares = eager.notes.get("recompute") == "full"
    kinds = {
        kind: tuple(
            replace(
                item,
                recipe=None if compares else item.recipe,
                recipe_ms=own_ms(item),
                made_ms=item.made_ms * factor,
                recipe_host_ms=0.0,
            )
            for item in items
        )
        for kind, items in eager.kinds.items()
    }
    regions = {
        kind: tuple(replace(run, ms=NEVER_MS, host_ms=0.0) for run in runs)
        for kind, runs in eager.regions.items()
    }
    return replace(
        eager,
        kinds=kinds,
        regions=regions,
        marks=tuple(replace(mark, host_ms=0.0) for mark in eager.marks),
        links=replace(
            eager.links,
            event_ms=EDGE_MS,
            copy_slowdown=max(eager.links.copy_slowdown, REPLAY_SLOWDOWN),
            batch_share=REPLAY_BATCH_SHARE,
        ),
        head_host_ms=0.0,
        tail_host_ms=0.0,
        host_lead_ms=0.0,
        host_costs=HostCosts(),
    )


def no_longer_than(seen: Profile, profile: Profile, phases: Set[Phase]) -> Profile:
    """Return the profile of which these phases take no longer than in the observed
    step: [Note: the host's time is not the device's]."""
    before_ms, now_ms = _phases_ms(seen), _phases_ms(profile)
    factors = {
        phase: min(1.0, before_ms[phase] / now_ms[phase])
        for phase in phases
        if now_ms[phase] > 0.0
    }
    if all(factor == 1.0 for factor in factors.values()):
        return profile
    marks = tuple(
        replace(mark, ms=mark.ms * factors.get(mark.phase, 1.0))
        for mark in profile.marks
    )
    head_ms = profile.head_ms * factors.get(Phase.FORWARD, 1.0)
    notes = {**profile.notes, UNHELD: "as observed"}
    return replace(profile, marks=marks, head_ms=head_ms, notes=notes)


def _phases_ms(profile: Profile) -> dict[Phase, float]:
    own = {Phase.FORWARD: profile.head_ms, Phase.BACKWARD: 0.0}
    for mark in profile.marks:
        own[mark.phase] += mark.ms
    return own


def unhosted(
    profile: Profile,
    held: Mapping[str, tuple[RegionTime, ...]],
    held_head_ms: float = 0.0,
) -> tuple[Profile, Set[Phase]]:
    """Return the profile with its regions in the times that they took without the host,
    and the phases of which any is known; a kind of lane with another number of them
    stays as it is.

    What lies after a region call belongs to it, up to the next one; outside of them
    all, time shrinks as it usually does. What lies before the first one starts after
    an idle device, all launches: it takes no longer than it was seen to.
    """
    parts = parts_of(profile)
    factors = _held_factors(profile, held, parts)
    usual = {
        phase: statistics.median(each)
        for phase in Phase
        if (each := [one for part, one in factors.items() if part.phase is phase])
    }
    if not usual:
        return profile, set()

    def factor_of(part: StepPart) -> float:
        if part.kind not in held:
            return 1.0
        return factors.get(part, usual.get(part.phase, 1.0))

    marks = tuple(
        replace(mark, ms=mark.ms * factor_of(part))
        for mark, part in zip(profile.marks, parts, strict=True)
    )
    head_ms = profile.head_ms * usual.get(Phase.FORWARD, 1.0)
    head_ms = min(head_ms, held_head_ms or head_ms)
    return replace(profile, marks=marks, head_ms=head_ms), set(usual)


def _held_factors(
    profile: Profile,
    held: Mapping[str, tuple[RegionTime, ...]],
    parts: Sequence[StepPart],
) -> dict[StepPart, float]:
    """Return by how much parts of the step shrink, of those that were measured."""
    lanes: Counter[str] = Counter(profile.lanes)
    total_ms = ms_of(profile, parts)
    found: dict[StepPart, float] = {}
    for kind, times in held.items():
        if len(profile.regions.get(kind, ())) != len(times):
            continue
        for number, time in enumerate(times):
            both = (Phase.FORWARD, time.forward_ms), (Phase.BACKWARD, time.backward_ms)
            for phase, own_ms in both:
                part = StepPart(kind, number, phase)
                hosted_ms = total_ms.get(part, 0.0) / max(1, lanes[kind])
                if own_ms > 0.0 and hosted_ms > 0.0:
                    found[part] = min(1.0, own_ms / hosted_ms)
    return found

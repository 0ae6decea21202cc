"""A profile's times, set right by steps that ran without ssdtrain.

[Note: the plain step]
The observed step is watched, and it moves everything: its operators wait for the host
more than those of other steps, and the device's clock is another one. What users
compare with is their step without ssdtrain. So where everything kept fits into device
memory, such steps are measured, and the profile's forward and backward are stretched or
shrunk to the times of one (observe/plainsteps.py), the host's as well. What a plan may
cost is then counted from the plain step.

[Note: the step of regions]
Where the plain step does not fit, no step without re-runs can be measured. But the one
in which all regions run again can, and nobody watches its tensors, so its operators
wait for the host no more than those of a plan do. Each re-run is measured by itself, so
the step that keeps everything is what remains without them and without the waits for
copies. The re-runs' own times are taken from there, too: a plan that runs all regions
again is then predicted to take what this step took, but for its hooks
([Note: forwards under hooks] in forwards.py). One step may have waited for what
is over after it, and all plans would be judged by that: the fastest of some counts,
and when steps drift from a plan they are measured again. The host's time of its
forwards is the program's own: the hooks' and the region calls' are measured and left
out, and the plan has them again, for what it does. What the re-runs take the host is
taken from there as well: in the observed step recipes are looked for inside of them.

[Note: a host that is blocked]
The driver takes a thousand launches ahead of the device, and then a launch lasts as
long as a kernel. In a settled step the host's forward so looks as long as the device's.
What it takes by itself shows in a forward that starts on an idle device, the first
step's of those that are measured: the least of them counts.

[Note: the host after backward]
What the program does after its last mark, an optimizer's step above all, is not taken
from the observed step, where it took the host of two ranks several times as long as in
others: where regions ran again, it is what the host took from the last re-run on.

[Note: after the last re-run]
Nor is the device's time after backward taken from there, where a step of regions
tells: what its device takes from the end of its last re-run to the next step is the
rest of backward and what lies after it.

[Note: the host is no later than the device]
No operator ends before the host has launched it, so up to any mark the host's time is
at most the device's. Where two measurements say otherwise, the host's is cut: the step
that keeps everything then takes what was measured, and where the host is as late as the
device, whatever is added to its work is added to the step.
(tests/ssdtrain/plan/test_calibrate.py)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ssdtrain.jsonfile import Duration, Positive
from ssdtrain.plan.forwards import with_forward_times, without_hooks
from ssdtrain.plan.profile import HostCosts, Phase, Profile

PLAIN_STEP, WITHOUT_RERUNS = NOTES = ("plain_step_ms", "without_reruns_ms")
"""Names under which profiles tell of a step that set their times right."""
BLAMED = "with what steps under a plan took beyond its prediction"
"""How the slowdown by copies was found, for `explain`."""
LEAST_FACTOR, MOST_FACTOR = 0.02, 2.0
"""A step outside of these bounds was another one than the observed one. An observed
step that is bound by the host takes several times the plain one."""


class PlainTimes(NamedTuple):
    """A step without ssdtrain."""

    step_ms: float
    """From its first forward to that of the next step."""
    forward_ms: float
    """Of its forwards."""
    host_forward_ms: float = 0.0
    """Host time of its forwards, unblocked: [Note: a host that is blocked]. 0: not
    known."""
    host_lead_ms: float = 0.0
    """By how much the host was ahead of the device when it started."""


def rebuild_key(recipe: str, num_bytes: int) -> str:
    """Return the name of the rebuilds that take as long as one another."""
    return f"{recipe} of {num_bytes}"


@dataclass(frozen=True, kw_only=True)
class RegionTime:
    """One region call without the host: [Note: a held step of regions] in
    observe/heldregions.py."""

    forward_ms: Duration
    """Up to the next region call; 0: not known."""
    backward_ms: Duration
    """0: not known."""


class RegionTimes(NamedTuple):
    """A step in which all regions ran again: [Note: the step of regions]."""

    step: PlainTimes
    """As it was, re-runs and waits included."""
    rerun_ms: float
    """Of all re-runs and rebuilds."""
    stall_ms: float = 0.0
    """Compute's waits for copies."""
    stall_out_ms: float = 0.0
    """Of these: in its forwards."""

    def plain(self) -> PlainTimes:
        """Return the step that keeps everything."""
        return self.step._replace(
            step_ms=self.step.step_ms - self.rerun_ms - self.stall_ms,
            forward_ms=self.step.forward_ms - self.stall_out_ms,
        )


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """What later steps said of an observed one."""

    plain: tuple[float, ...] = ()
    """`PlainTimes`; empty: none were measured."""
    note: str = PLAIN_STEP
    """Under which name the profile tells of them."""
    rebuild_ms: Mapping[str, float] = field(default_factory=dict)
    """Device time of rebuilds in a step in which each was held, by `rebuild_key`."""
    held_regions: Mapping[str, tuple[RegionTime, ...]] = field(default_factory=dict)
    """Of region calls in a step in which they were held, by kind of lane; empty: a step
    without them was, or none."""
    held_head_ms: Duration = 0.0
    """Up to the first of these; 0: not known."""
    rerun_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of region calls, by kind of lane; 0.0: as they were observed."""
    rerun_host_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """And what they take the host, in a step in which nothing is looked for
    inside of them."""
    tail_host_ms: Duration | None = None
    """What the host takes after backward at most: [Note: the host after backward].
    None: as it was observed."""
    behind_ms: Duration | None = None
    """Device time of a step of regions after its last re-run; None: not known."""
    host_costs: HostCosts | None = None
    """None: as they were observed."""
    host_factor: Positive = 1.0
    """What hooks cost the host under a plan, over what they were measured to."""
    copy_slowdown: Duration = 0.0
    """What steps under a plan lost for each ms of its copies, and nothing else told of:
    added to `Links.copy_slowdown`."""


def corrected(profile: Profile, by: Corrections) -> Profile:
    """Return the profile that plans are made for."""
    if by.plain:
        plain = PlainTimes(*by.plain)
        profile = calibrated(
            profile,
            plain,
            note=by.note,
            rerun_ms=by.rerun_ms,
            behind_ms=by.behind_ms,
        )
        profile = with_reruns(profile, by.rerun_ms, by.rerun_host_ms)
    if by.tail_host_ms is not None:
        tail_ms = min(profile.tail_host_ms, by.tail_host_ms)
        profile = replace(profile, tail_host_ms=tail_ms)
    if by.copy_slowdown:
        profile = with_copies_blamed(profile, by.copy_slowdown)
    profile = with_host_in_step(profile)
    return repriced(profile, by.host_costs, by.host_factor)


def with_copies_blamed(profile: Profile, slowdown: float) -> Profile:
    """Let copies cost compute so much more, as a fraction of their time."""
    whole = min(1.0, profile.links.copy_slowdown + slowdown)
    links = replace(profile.links, copy_slowdown=whole)
    notes = {**profile.notes, "copy_slowdown": BLAMED}
    return replace(profile, links=links, notes=notes)


def repriced(profile: Profile, costs: HostCosts | None, factor: float) -> Profile:
    """Return the profile with other costs of the host, if any, and hooks and rebuilds
    that cost it so many times as much."""
    if costs is None and factor == 1.0:
        return profile
    costs = costs or profile.host_costs
    before_ms = profile.host_costs.rebuild.use_ms
    rebuild = costs.rebuild.use_ms / before_ms if before_ms else 1.0
    kinds = {
        kind: tuple(
            replace(item, recipe_host_ms=item.recipe_host_ms * rebuild * factor)
            for item in items
        )
        for kind, items in profile.kinds.items()
    }
    return replace(profile, kinds=kinds, host_costs=costs.times(factor))


def with_reruns(
    profile: Profile,
    rerun_ms: Mapping[str, tuple[float, ...]],
    host_ms: Mapping[str, tuple[float, ...]],
) -> Profile:
    """Return the profile with these times of its region calls, which take the host no
    longer than this; see `Corrections`.

    A kind of lane that had another number of them when they were measured keeps those
    that were observed.
    """

    def own(
        found: Mapping[str, tuple[float, ...]], kind: str, count: int
    ) -> Sequence[float]:
        times = found.get(kind, ())
        return times if len(times) == count else [0.0] * count

    regions = {
        kind: tuple(
            replace(run, ms=ms or run.ms, host_ms=min(run.host_ms, host or run.host_ms))
            for run, ms, host in zip(
                runs,
                own(rerun_ms, kind, len(runs)),
                own(host_ms, kind, len(runs)),
                strict=True,
            )
        )
        for kind, runs in profile.regions.items()
    }
    return replace(profile, regions=regions)


def calibrated(
    profile: Profile,
    plain: PlainTimes,
    *,
    note: str = PLAIN_STEP,
    rerun_ms: Mapping[str, tuple[float, ...]] | None = None,
    behind_ms: float | None = None,
) -> Profile:
    """Return the profile in the plain step's times; as it was if they cannot be its
    own.

    Args:
        profile: of the observed step.
        plain: what the step takes that keeps everything.
        note: under which name the profile tells of it.
        rerun_ms: see `Corrections`.
        behind_ms: as above.
    """
    if min(profile.forward_ms, plain.forward_ms) <= 0.0:
        return profile
    rest, tail_ms = _rest(profile, plain.step_ms - plain.forward_ms, behind_ms)
    if note == WITHOUT_RERUNS:
        own = without_hooks(profile, plain.forward_ms, rest, rerun_ms or {})
    else:
        own = with_forward_times(profile, plain.forward_ms / profile.forward_ms)
    forward = own.forward_ms / profile.forward_ms
    if not all(LEAST_FACTOR < factor < MOST_FACTOR for factor in (forward, rest)):
        return _as_long_as(profile, plain.step_ms, note)
    host = _host_factor(profile, plain)
    marks = tuple(
        replace(
            mark,
            ms=mark.ms if mark.phase is Phase.FORWARD else mark.ms * rest,
            host_ms=mark.host_ms * host,
        )
        for mark in own.marks
    )
    step_ms = own.forward_ms + rest * _backward_ms(profile) + tail_ms
    return replace(
        own,
        marks=marks,
        tail_ms=tail_ms,
        head_host_ms=profile.head_host_ms * host,
        host_lead_ms=plain.host_lead_ms,
        notes={**profile.notes, note: f"{step_ms:.3f}"},
    )


def _as_long_as(profile: Profile, step_ms: float, note: str) -> Profile:
    """Return the profile in a step of this length, all the same, where its forward and
    its backward are no measure of it; as it was if that was another step."""
    factor = step_ms / profile.compute_ms if profile.compute_ms > 0.0 else 0.0
    if not LEAST_FACTOR < factor < MOST_FACTOR:
        return profile
    marks = tuple(
        replace(mark, ms=mark.ms * factor, host_ms=mark.host_ms * factor)
        for mark in profile.marks
    )
    return replace(
        profile,
        marks=marks,
        head_ms=profile.head_ms * factor,
        tail_ms=profile.tail_ms * factor,
        head_host_ms=profile.head_host_ms * factor,
        notes={**profile.notes, note: f"{step_ms:.3f}"},
    )


def _rest(
    profile: Profile, rest_ms: float, behind_ms: float | None
) -> tuple[float, float]:
    """Return by what backward is longer than in the observed step, and what lies after
    it, in ms: [Note: after the last re-run]. 0.0: it was another step.

    Args:
        profile: of the observed step.
        rest_ms: of the plain step, after its forwards.
        behind_ms: see `Corrections`.
    """
    backward_ms = _backward_ms(profile)
    last = None if behind_ms is None else _last_rerun(profile)
    if behind_ms is not None and last is not None:
        own_ms = sum(mark.ms for mark in profile.marks[last:])
        before_ms = backward_ms - own_ms
        factor = (rest_ms - behind_ms) / before_ms if before_ms > 0.0 else 0.0
        tail_ms = behind_ms - factor * own_ms
        if factor > 0.0 and tail_ms >= 0.0:
            return factor, tail_ms
    observed_ms = backward_ms + profile.tail_ms
    factor = rest_ms / observed_ms if observed_ms > 0.0 else 0.0
    return factor, profile.tail_ms * factor


def _last_rerun(profile: Profile) -> int | None:
    """Return the mark at which the last region runs again; None: none does, or a
    forward is after it."""
    begun, last = set[tuple[int, int]](), None
    for number, mark in enumerate(profile.marks):
        place = mark.lane, profile.items_of(mark.lane)[mark.item].region
        if mark.phase is Phase.FORWARD:
            last = None
        elif place[1] >= 0 and place not in begun:
            begun.add(place)
            last = number
    return last


def _backward_ms(profile: Profile) -> float:
    return sum(mark.ms for mark in profile.marks if mark.phase is Phase.BACKWARD)


def _host_factor(profile: Profile, plain: PlainTimes) -> float:
    """Scale the host's time: a host that waited looks slower than it is, never
    faster. See [Note: a host that is blocked]."""
    own_ms = profile.head_host_ms + sum(
        mark.host_ms for mark in profile.marks if mark.phase is Phase.FORWARD
    )
    if own_ms <= 0.0 or plain.host_forward_ms <= 0.0:
        return 1.0
    return min(1.0, plain.host_forward_ms / own_ms)


def with_host_in_step(profile: Profile) -> Profile:
    """Return the profile with [Note: the host is no later than the device] in force."""
    if profile.host_ms <= 0.0:
        return profile
    device_ms = profile.head_ms
    end_ms = profile.compute_ms
    # As the next step finds it.
    lead_ms = min(profile.host_lead_ms, end_ms)
    head_ms = min(profile.head_host_ms, device_ms + lead_ms)
    host_ms = head_ms - lead_ms
    marks = []
    for mark in profile.marks:
        device_ms += mark.ms
        most_ms = min(device_ms, end_ms - lead_ms)
        until_ms = max(host_ms, min(host_ms + mark.host_ms, most_ms))
        marks.append(replace(mark, host_ms=until_ms - host_ms))
        host_ms = until_ms
    left_ms = max(0.0, end_ms - host_ms - lead_ms)
    return replace(
        profile,
        marks=tuple(marks),
        head_host_ms=head_ms,
        host_lead_ms=lead_ms,
        tail_host_ms=min(profile.tail_host_ms, left_ms),
    )

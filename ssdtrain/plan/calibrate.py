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
is over behind it, and all plans would be judged by that: the fastest of some counts,
and when steps drift from a plan they are measured again. The host's time of its
forwards is the program's own: the hooks' and the region calls' are measured and left
out, and the plan has them again, for what it does. What the re-runs take the host is
taken from there as well: in the observed step recipes are looked for inside of them.

[Note: a host that is blocked]
The driver takes a thousand launches ahead of the device, and then a launch lasts as
long as a kernel. In a settled step the host's forward so looks as long as the device's.
What it takes by itself shows in a forward that starts on an idle device, the first
plain step's: the least of both counts. Where it reads a result back it waits as well,
in the observed step for a device that is far behind. So what is behind such a reading
says nothing of how much slower the observed step's host was. And the least of each
segment's two counts is less than any host ever took: those say how the time is shared
out, the least of each half's two sums how much it is. A forward that took the host some
70 ms was believed to take 38, and the hooks that it had no time for seemed to be free.
Where the host is hardly ahead of the device, no queue can have blocked it, and what it
took from one such moment to the next is its own. Behind a result that it read back it
is ahead by nothing, and up to such a moment by as much as is seen there: a loss of many
small launches may take the host as long as the device, where it would be believed to go
ahead by all of it.
Nor does the wait for a result say that the host bounds the step: whether it may is
asked without those segments (`without_readings`). With a loss that is read back a 4B's
step of 502 ms was held for it twice, 1.0 and 1.3 s long on an H100, whose layers take
the host less than half of the device's time; and the step of a mixture of experts was
not, whose layers take it two thirds.

[Note: a device that idles]
Where a step was held, it is known what each segment takes the device by itself. One
that takes longer in the plain step has a device that idles, and then it is the host
that takes so long, whatever its clock said. On an H200 with a slow host backward took
74 ms, of which the device needed 40, and the host was believed to need 49: as if hooks
had 25 ms to spare.

[Note: the host behind backward]
What the program does behind its last mark, an optimizer's step above all, is not taken
from the observed step, where it took the host of two ranks several times as long as in
others. Where one was timed mark by mark, it is what the host's lead loses from the
last mark to the next step, for the device has waited for nothing there; where regions
ran again, what the host took from the last re-run on. On two H200s the 46 ms behind an
FSDP2 backward of a 4B were taken for 260, and the 24 of a tensor parallel one for 322:
no host time was left in the step, all that hooks take was added to it, and the default
moved 0.3 GB where it now finds a plan that moves 10.

[Note: behind the last re-run]
Nor is the device's time behind backward taken from there, where a step of regions
tells: what its device takes from the end of its last re-run to the next step is the
rest of backward and what lies behind it. Under FSDP2 235 ms were behind the observed
step's backward, which was then believed to take 312 where it takes 457: copies in had a
third less time than there is.

[Note: the host is no later than the device]
No operator ends before the host has launched it, so up to any mark the host's time is
at most the device's. Where two measurements say otherwise, the host's is cut: the step
that keeps everything then takes what was measured, and where the host is as late as the
device, whatever is added to its work is added to the step. Where the host reads a
result back it goes on from when the device has come there: what it waited for that is
none of its own time, though it was measured with it.
(tests/ssdtrain/plan/test_calibrate.py)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ssdtrain.jsonfile import Duration, Natural, Positive
from ssdtrain.plan.forwards import with_forward_times, without_hooks
from ssdtrain.plan.profile import HostCosts, Phase, Profile

PLAIN_STEP, WITHOUT_RERUNS = NOTES = ("plain_step_ms", "without_reruns_ms")
"""Names under which profiles tell of a step that set their times right."""
BLAMED = "with what steps under a plan took beyond its prediction"
"""How the slowdown by copies was found, for `explain`."""
HOSTED_SHARE = 0.97
"""From this share of a forward's time on, the host may bound it."""
BUSY_SHARE = 0.5
"""Likewise of a short step: the host may bound parts of it, or its backward. A forward
with 0.968 was of a step that took 65.6 ms, and its replay 56.3."""
SHORT_MS = 250.0
"""Up to here a step is short."""
HOOKED_SHARE = 0.3
"""Likewise where the forward was one of regions: whether the program's host would bound
it without the hooks is not known. They made one that a replay computes in 18 ms take 79
on an H100, of which the program's host had 35, and 112 on an H200, of which it had 33:
so the share is of the re-runs' time, where that is less."""
LEAD_SHARE = 0.05
"""A host that is ahead of the device by this part of a forward when it starts does not
bound it."""
AHEAD_MS = 1e9
"""Lead of a host that may be any."""
NEAR_MS = 10.0
"""Lead up to which no queue of a thousand launches is full, and blocks the host."""
IDLE_SHARE = 0.1
"""Part of a segment from which on the device idles in it; less is what two measurements
differ by."""
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

    @property
    def is_hosted(self) -> bool:
        """Whether the device waits for the host."""
        share = BUSY_SHARE if self.step_ms < SHORT_MS else HOSTED_SHARE
        return self.host_forward_ms > share * self.forward_ms

    def may_be_hosted(self, rerun_ms: float) -> bool:
        """Return whether it may, of a step that was measured with hooks.

        Args:
            rerun_ms: what the second forwards took; 0: not known.
        """
        own_ms = min(self.forward_ms, rerun_ms or self.forward_ms)
        return (
            self.host_forward_ms > HOOKED_SHARE * own_ms
            and self.host_lead_ms < LEAD_SHARE * own_ms
        )


@dataclass(frozen=True, kw_only=True)
class Segment:
    """From one mark to that of the next segment, in a step that keeps everything."""

    start: Natural
    """The mark."""
    ms: Duration
    host_ms: Duration
    reads_back: bool = False
    """See `Mark.reads_back`."""
    lead_ms: Duration = AHEAD_MS
    """By how much the host was ahead of the device at its start."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Where the time of such a step goes: [Note: pace] in observe/paced.py."""

    num_marks: Natural
    """Of the profile."""
    head_ms: Duration
    """From the start of the first forward to the first segment."""
    head_host_ms: Duration
    segments: tuple[Segment, ...]
    end: Natural
    """The mark at which the last one ends; those from there on are as they were."""
    end_lead_ms: Duration = AHEAD_MS
    """`Segment.lead_ms` there."""

    @property
    def ms(self) -> float:
        """Of the step, up to the end of the last segment."""
        return self.head_ms + sum(segment.ms for segment in self.segments)

    def is_like(self, plain: PlainTimes, most: float = MOST_FACTOR) -> bool:
        """Whether the step took about as long as a plain one, and is believed.

        Args:
            plain: that one.
            most: times as long.
        """
        return self.ms <= most * plain.step_ms


def without_readings(plain: PlainTimes, pace: Pace, profile: Profile) -> PlainTimes:
    """Return the plain step with the forward of the segments in which nothing is read
    back; as it is where nothing is. What the host waits for a result is none of its own
    time: the forward of a model whose loss is read back takes it as long as the device,
    and looks as if the host bound it.

    Args:
        plain: of the step.
        pace: of the same step.
        profile: whose marks these are.
    """
    if not _is_of(pace, profile):
        return plain
    forward = [
        segment
        for segment in pace.segments
        if profile.marks[segment.start].phase is Phase.FORWARD
    ]
    own = [segment for segment in forward if not segment.reads_back]
    if len(own) == len(forward):
        return plain
    return plain._replace(
        forward_ms=pace.head_ms + sum(segment.ms for segment in own),
        host_forward_ms=pace.head_host_ms + sum(segment.host_ms for segment in own),
    )


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
    pace: Pace | None = None
    """None: as the observed step's."""
    held_pace: Pace | None = None
    """Of a step whose operators never waited for the host: [Note: captured steps] in
    replays.py. None: as `pace`."""
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
    """Likewise what they take the host, in a step in which nothing is looked for
    inside of them."""
    tail_host_ms: Duration | None = None
    """What the host takes behind backward at most, where no step was timed mark by
    mark: [Note: the host behind backward]. None: as it was observed."""
    behind_ms: Duration | None = None
    """Device time of a step of regions behind its last re-run; None: not known."""
    host_costs: HostCosts | None = None
    """None: as they were observed."""
    host_factor: Positive = 1.0
    """What hooks cost the host under a plan, over what they were measured to: [Note:
    the price of hooks] in adapt.py."""
    copy_slowdown: Duration = 0.0
    """What steps under a plan lost for each ms of its copies, and nothing else told of:
    added to `Links.copy_slowdown`."""
    out_slowdown: Duration = 0.0
    """By which fraction copies out take longer under a plan than in the observed step:
    [Note: slower links] in observe/waits.py."""
    in_slowdown: Duration = 0.0
    """Likewise copies in."""

    @property
    def may_be_hosted(self) -> bool:
        """Whether the plain times may be those of a host that the device waits for."""
        if not self.plain:
            return False
        plain = PlainTimes(*self.plain)
        if self.note == PLAIN_STEP:
            return plain.is_hosted
        return plain.may_be_hosted(sum(map(sum, self.rerun_ms.values())))


def corrected(profile: Profile, by: Corrections) -> Profile:
    """Return the profile that plans are made for."""
    if by.plain:
        plain = PlainTimes(*by.plain)
        profile = calibrated(
            profile,
            plain,
            note=by.note,
            pace=by.pace,
            rerun_ms=by.rerun_ms,
            behind_ms=by.behind_ms,
        )
        if by.pace is not None:
            profile = paced(profile, by.pace, plain.step_ms)
        if by.held_pace is not None:
            profile = with_idle_hosted(profile, by.held_pace)
        profile = with_reruns(profile, by.rerun_ms)
        profile = with_rerun_hosts(profile, by.rerun_host_ms)
    if by.tail_host_ms is not None:
        tail_ms = min(profile.tail_host_ms, by.tail_host_ms)
        profile = replace(profile, tail_host_ms=tail_ms)
    if by.copy_slowdown:
        profile = with_copies_blamed(profile, by.copy_slowdown)
    if by.out_slowdown or by.in_slowdown:
        profile = with_slower_links(profile, by.out_slowdown, by.in_slowdown)
    profile = with_host_in_step(profile)
    if by.host_costs is not None:
        profile = repriced(profile, by.host_costs)
    return dearer(profile, by.host_factor)


def with_copies_blamed(profile: Profile, slowdown: float) -> Profile:
    """Let copies cost compute so much more, as a fraction of the time that they take:
    see [Note: the measured overhead] in adapt.py."""
    whole = min(1.0, profile.links.copy_slowdown + slowdown)
    links = replace(profile.links, copy_slowdown=whole)
    notes = {**profile.notes, "copy_slowdown": BLAMED}
    return replace(profile, links=links, notes=notes)


def with_slower_links(profile: Profile, out: float, into: float) -> Profile:
    """Let copies out and in take longer by these fractions."""
    links = profile.links
    links = replace(
        links,
        d2h=links.d2h.slower(1.0 + out),
        h2d=links.h2d.slower(1.0 + into),
    )
    return replace(profile, links=links)


def repriced(profile: Profile, costs: HostCosts) -> Profile:
    """Return the profile with other costs of the host."""
    before, now = profile.host_costs.rebuild.use_ms, costs.rebuild.use_ms
    return _at_costs(profile, costs, now / before if before else 1.0)


def dearer(profile: Profile, factor: float) -> Profile:
    """Return the profile with hooks that cost the host so many times as much."""
    if factor == 1.0:
        return profile
    return _at_costs(profile, profile.host_costs.times(factor), factor)


def _at_costs(profile: Profile, costs: HostCosts, factor: float) -> Profile:
    """Return the profile at these costs, and rebuilds at so many times theirs."""
    kinds = {
        kind: tuple(
            replace(item, recipe_host_ms=item.recipe_host_ms * factor) for item in items
        )
        for kind, items in profile.kinds.items()
    }
    return replace(profile, kinds=kinds, host_costs=costs)


def with_reruns(profile: Profile, rerun_ms: Mapping[str, tuple[float, ...]]) -> Profile:
    """Return the profile with these times of its region calls; see `Corrections`.

    A kind of lane that had another number of them when they were measured keeps those
    that were observed.
    """
    regions = {
        kind: tuple(
            replace(run, ms=ms or run.ms)
            for run, ms in zip(runs, rerun_ms[kind], strict=True)
        )
        for kind, runs in profile.regions.items()
        if len(rerun_ms.get(kind, ())) == len(runs)
    }
    return replace(profile, regions={**profile.regions, **regions})


def with_rerun_hosts(
    profile: Profile, host_ms: Mapping[str, tuple[float, ...]]
) -> Profile:
    """Return the profile in which region calls take the host no longer than this;
    likewise."""
    regions = {
        kind: tuple(
            replace(run, host_ms=min(run.host_ms, ms or run.host_ms))
            for run, ms in zip(runs, host_ms[kind], strict=True)
        )
        for kind, runs in profile.regions.items()
        if len(host_ms.get(kind, ())) == len(runs)
    }
    return replace(profile, regions={**profile.regions, **regions})


def calibrated(
    profile: Profile,
    plain: PlainTimes,
    *,
    note: str = PLAIN_STEP,
    pace: Pace | None = None,
    rerun_ms: Mapping[str, tuple[float, ...]] | None = None,
    behind_ms: float | None = None,
) -> Profile:
    """Return the profile in the plain step's times; as it was if they cannot be its
    own.

    Args:
        profile: of the observed step.
        plain: what the step takes that keeps everything.
        note: under which name the profile tells of it.
        pace: of such a step, if it is known.
        rerun_ms: see `Corrections`.
        behind_ms: likewise.
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
        return profile
    host = _host_factor(profile, plain, pace)
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


def _rest(
    profile: Profile, rest_ms: float, behind_ms: float | None
) -> tuple[float, float]:
    """Return by what backward is longer than in the observed step, and what lies behind
    it, in ms: [Note: behind the last re-run]. 0.0: it was another step.

    Args:
        profile: of the observed step.
        rest_ms: of the plain step, behind its forwards.
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
    forward is behind it."""
    begun, last = set[tuple[int, int]](), None
    for number, mark in enumerate(profile.marks):
        place = mark.lane, profile.items_of(mark.lane)[mark.item].region
        if mark.phase is Phase.FORWARD:
            last = None
        elif place[1] >= 0 and place not in begun:
            begun.add(place)
            last = number
    return last


def paced(profile: Profile, pace: Pace, step_ms: float) -> Profile:
    """Return the profile with its time where that step had it; as it was if that was
    another step.

    The hooks of such a step may have been what its device waited for, as in a tensor
    parallel one: then its time is shared out as it was there, and is no more.

    Args:
        step_ms: what the step takes that keeps everything.
    """
    marks = list(profile.marks)
    left_ms = sum(mark.ms for mark in marks[pace.end :])
    tail_ms = step_ms - pace.head_ms - left_ms
    tail_ms -= sum(segment.ms for segment in pace.segments)
    if not _is_of(pace, profile) or step_ms - tail_ms > MOST_FACTOR * step_ms:
        return profile
    first = pace.segments[0].start if pace.segments else pace.end
    before = marks[:first]
    head_ms, *lengths = _shared(
        pace.head_ms, [profile.head_ms, *(mark.ms for mark in before)]
    )
    own_ms = [profile.head_host_ms, *(mark.host_ms for mark in before)]
    head_host_ms, *hosts = _shared(min(pace.head_host_ms, sum(own_ms)), own_ms)
    marks[:first] = [
        replace(mark, ms=ms, host_ms=host)
        for mark, ms, host in zip(before, lengths, hosts, strict=True)
    ]
    every = zip(pace.segments, _ends(pace), _hosts(profile, pace), strict=True)
    for segment, end, host_ms in every:
        own = marks[segment.start : end]
        lengths = _shared(segment.ms, [mark.ms for mark in own])
        hosts = _shared(host_ms, [mark.host_ms for mark in own])
        marks[segment.start : end] = [
            replace(mark, ms=ms, host_ms=host)
            for mark, ms, host in zip(own, lengths, hosts, strict=True)
        ]
        if segment.reads_back:
            marks[segment.start] = replace(marks[segment.start], reads_back=True)
    found = replace(
        profile,
        marks=tuple(marks),
        head_ms=head_ms,
        head_host_ms=head_host_ms,
        tail_ms=max(0.0, tail_ms),
    )
    found = found if tail_ms >= 0.0 else _as_long_as(profile, found)
    return replace(found, tail_host_ms=_tail_host_ms(found, pace))


def _tail_host_ms(profile: Profile, pace: Pace) -> float:
    """Return what the host takes behind the last mark: [Note: the host behind
    backward].

    Args:
        profile: in the times of the pace.
        pace: of a step that is followed by another one.
    """
    if pace.end_lead_ms >= AHEAD_MS:
        return profile.tail_host_ms  # nobody has looked
    left = profile.marks[pace.end :]
    lead_ms = pace.end_lead_ms + sum(mark.ms - mark.host_ms for mark in left)
    return max(0.0, lead_ms + profile.tail_ms - profile.host_lead_ms)


def with_idle_hosted(profile: Profile, held: Pace) -> Profile:
    """Return the profile whose host takes as long as the device where that idles:
    [Note: a device that idles]; as it was if a step of another kind was held.

    Args:
        profile: in the plain step's times, each segment.
        held: of a step whose operators never waited for the host.
    """
    if not _is_of(held, profile):
        return profile
    marks = list(profile.marks)
    for segment, end in zip(held.segments, _ends(held), strict=True):
        own = marks[segment.start : end]
        ms, host_ms = sum(mark.ms for mark in own), sum(mark.host_ms for mark in own)
        if segment.reads_back or host_ms >= ms or ms - segment.ms <= IDLE_SHARE * ms:
            continue
        hosts = _shared(ms, [mark.host_ms for mark in own])
        marks[segment.start : end] = [
            replace(mark, host_ms=host) for mark, host in zip(own, hosts, strict=True)
        ]
    return replace(profile, marks=tuple(marks))


def _as_long_as(plain: Profile, found: Profile) -> Profile:
    """Return a profile whose halves take as long as those of another one."""
    halves = (
        (plain.forward_ms, found.forward_ms),
        (_backward_ms(plain), _backward_ms(found)),
    )
    if min(map(min, halves)) <= 0.0:
        return plain
    forward, backward = (wanted / own for wanted, own in halves)
    marks = tuple(
        replace(mark, ms=mark.ms * forward)
        if mark.phase is Phase.FORWARD
        else replace(mark, ms=mark.ms * backward)
        for mark in found.marks
    )
    head_ms = found.head_ms * forward
    return replace(found, marks=marks, head_ms=head_ms, tail_ms=plain.tail_ms)


def _backward_ms(profile: Profile) -> float:
    return sum(mark.ms for mark in profile.marks if mark.phase is Phase.BACKWARD)


def _shared(total: float, parts: list[float]) -> list[float]:
    """Return the total, shared out as the parts are."""
    whole = sum(parts)
    if whole <= 0.0:
        return [total / len(parts) for _ in parts]
    return [total * part / whole for part in parts]


def _host_factor(profile: Profile, plain: PlainTimes, pace: Pace | None) -> float:
    """Scale the host's time: a host that waited looks slower than it is, never
    faster. See [Note: a host that is blocked]."""
    plain_ms, paced_ms, waited = plain.host_forward_ms, 0.0, set[int]()
    if pace is not None and _is_of(pace, profile):
        paced_ms = pace.head_host_ms
        for segment, end in zip(pace.segments, _ends(pace), strict=True):
            if profile.marks[segment.start].phase is not Phase.FORWARD:
                continue
            if segment.reads_back:
                waited.update(range(segment.start, end))
            else:
                paced_ms += segment.host_ms
    own_ms = profile.head_host_ms + sum(
        mark.host_ms
        for number, mark in enumerate(profile.marks)
        if mark.phase is Phase.FORWARD and number not in waited
    )
    if waited:
        plain_ms = min(plain_ms, paced_ms)
    if own_ms <= 0.0 or plain_ms <= 0.0:
        return 1.0
    return min(1.0, plain_ms / own_ms)


def _is_of(pace: Pace, profile: Profile) -> bool:
    """Return whether the pace is that of such a step."""
    starts = [*(segment.start for segment in pace.segments), pace.end]
    return pace.num_marks == len(profile.marks) and starts == sorted(set(starts))


def _ends(pace: Pace) -> tuple[int, ...]:
    """Return the mark at which each segment ends."""
    if not pace.segments:
        return ()
    return *(segment.start for segment in pace.segments[1:]), pace.end


def _hosts(profile: Profile, pace: Pace) -> list[float]:
    """Return the host's time of each segment: [Note: a host that is blocked]."""
    marks = profile.marks
    own = [
        sum(mark.host_ms for mark in marks[segment.start : end])
        for segment, end in zip(pace.segments, _ends(pace), strict=True)
    ]
    found = [
        min(segment.host_ms, ms) for segment, ms in zip(pace.segments, own, strict=True)
    ]
    for phase in Phase:
        half = [
            number
            for number, segment in enumerate(pace.segments)
            if marks[segment.start].phase is phase and not segment.reads_back
        ]
        least_ms = min(
            sum(pace.segments[number].host_ms for number in half),
            sum(own[number] for number in half),
        )
        shared = _shared(least_ms, [found[number] for number in half])
        for number, ms in zip(half, shared, strict=True):
            found[number] = ms
    for number, ms in _unblocked(pace).items():
        found[number] = max(found[number], ms)
    return found


def _unblocked(pace: Pace) -> dict[int, float]:
    """Return the host's time of the segments in which nothing can have blocked it but
    a result that it read back, by number."""
    leads_ms = [*(segment.lead_ms for segment in pace.segments), pace.end_lead_ms]
    found = {}
    for number, segment in enumerate(pace.segments):
        lead_ms, end_lead_ms = leads_ms[number : number + 2]
        if end_lead_ms > NEAR_MS:
            continue
        if segment.reads_back:
            found[number] = max(0.0, segment.ms - end_lead_ms)
        elif lead_ms <= NEAR_MS:
            found[number] = segment.host_ms
    return found


def with_host_in_step(profile: Profile) -> Profile:
    """Return the profile with [Note: the host is no later than the device] in force."""
    if profile.host_ms <= 0.0:
        return profile
    since_ms = device_ms = profile.head_ms
    for mark in profile.marks:
        since_ms = device_ms if mark.reads_back else since_ms
        device_ms += mark.ms
    end_ms = device_ms + profile.tail_ms
    # As the next step finds it: no more than what is left behind the last reading.
    lead_ms = min(profile.host_lead_ms, end_ms - since_ms)
    device_ms = profile.head_ms
    head_ms = min(profile.head_host_ms, device_ms + lead_ms)
    host_ms = head_ms - lead_ms
    is_led = any(mark.reads_back for mark in profile.marks)
    spare_ms = min(lead_ms, device_ms - host_ms) if is_led else 0.0
    marks = []
    for mark in profile.marks:
        if mark.reads_back:
            host_ms, is_led = max(host_ms, device_ms), False
        device_ms += mark.ms
        # See [Note: steady state] in simulate.py.
        most_ms = min(device_ms, end_ms - lead_ms + spare_ms)
        until_ms = max(host_ms, min(host_ms + mark.host_ms, most_ms))
        marks.append(replace(mark, host_ms=until_ms - host_ms))
        host_ms = until_ms
        if is_led:
            spare_ms = min(spare_ms, device_ms - host_ms)
    left_ms = end_ms - host_ms - lead_ms + spare_ms
    return replace(
        profile,
        marks=tuple(marks),
        head_host_ms=head_ms,
        host_lead_ms=lead_ms,
        tail_host_ms=min(profile.tail_host_ms, max(0.0, left_ms)),
    )

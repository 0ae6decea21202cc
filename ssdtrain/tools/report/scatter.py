"""Predicted plans next to predicted checkpointing: a table and a plot."""

from collections.abc import Sequence
from typing import NamedTuple

from ssdtrain.plan.baselines import fixed_policies
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import Run, keep_all, simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.quantities import bytes_text
from ssdtrain.tools.report.frontier import frontier
from ssdtrain.tools.report.references import Reference, references

WIDTH, HEIGHT = 64, 16
OURS, OTHERS = "o", "x"


class Spot(NamedTuple):
    """A predicted step."""

    name: str
    step_ms: float
    peak_bytes: int
    """Above the step's start."""
    is_ours: bool
    """Whether ssdtrain's planner chose it."""


def spots(profile: Profile) -> list[Spot]:
    """Keeping everything, the frontier's plans, and checkpointing in its forms; the
    largest peak first."""
    timeline = Timeline(profile)
    keep = Run(timeline, keep_all(timeline)).run()
    found = [Spot("keep everything", keep.step_ms, keep.peak_bytes, False)]
    found += [
        Spot("plan", keep.step_ms * (1 + point.overhead), point.peak_bytes, True)
        for point in frontier(profile)
    ]
    others = references(timeline)
    lift = _lift(timeline, others)
    found += [
        Spot(other.name, other.step_ms, other.peak_bytes + lift, False)
        for other in others
    ]
    return sorted(found, key=lambda spot: (-spot.peak_bytes, spot.step_ms))


def _lift(timeline: Timeline, others: Sequence[Reference]) -> int:
    """Return what the step outside of the layers, such as the loss, needs beyond the
    references' own peaks: the simulated peak with every region run again has it."""
    named = {policy.name: policy for policy in fixed_policies(timeline)}
    full = [other.peak_bytes for other in others if other.name == "full recompute"]
    if "regions" not in named or not full:
        return 0
    policy = named["regions"]
    orders = schedule(timeline, policy.placements, policy.style)
    return max(0, simulate(timeline, orders).peak_bytes - full[0])


def lines(points: Sequence[Spot], room_bytes: int | None = None) -> list[str]:
    """Format one line a point, and the plot below; `room_bytes` of the device, if
    known."""
    if not points:
        return []
    keep_ms = min(point.step_ms for point in points)
    told = [
        f"  {mark_of(point)} {bytes_text(point.peak_bytes):>10}  "
        f"{point.step_ms:9.1f} ms  {point.step_ms / keep_ms:5.2f}x  {point.name}"
        + ("  (does not fit)" if room_bytes and point.peak_bytes > room_bytes else "")
        for point in points
    ]
    head = f"Frontier: peak, predicted step ({OURS} ssdtrain's, {OTHERS} others)"
    return [head, *told, *plot(points)]


def mark_of(point: Spot) -> str:
    """Return the letter of a point in the plot."""
    return OURS if point.is_ours else OTHERS


def plot(points: Sequence[Spot]) -> list[str]:
    """Plot step time upwards, peak to the right; ssdtrain's points hide the others'."""
    most_bytes = max(point.peak_bytes for point in points)
    times = [point.step_ms for point in points]
    low_ms, high_ms = min(times), max(times)
    span_ms = max(high_ms - low_ms, 1e-9)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for point in sorted(points, key=lambda point: point.is_ours):
        column = round((WIDTH - 1) * point.peak_bytes / max(1, most_bytes))
        row = round((HEIGHT - 1) * (high_ms - point.step_ms) / span_ms)
        grid[row][column] = mark_of(point)
    labels = {0: f"{high_ms:.1f} ms", HEIGHT - 1: f"{low_ms:.1f} ms"}
    body = [
        f"{labels.get(number, ''):>11} |{''.join(row).rstrip()}"
        for number, row in enumerate(grid)
    ]
    right = bytes_text(most_bytes)
    return [*body, " " * 12 + "+" + "-" * WIDTH, " " * 12 + "0" + f"{right:>{WIDTH}}"]

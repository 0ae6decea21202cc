"""Predicted plans next to predicted checkpointing."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ssdtrain.plan.baselines import checkpointing
from ssdtrain.plan.choose import kept_but
from ssdtrain.plan.plan import Prediction
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.regions import as_they_run
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.simulate import Simulation, keep_all, simulate
from ssdtrain.plan.timeline import Timeline
from ssdtrain.plan.unsearched import again_moving, num_read
from ssdtrain.quantities import bytes_text
from ssdtrain.tools.report.frontier import frontier

OURS, OTHERS = "o", "x"


class Predicted(NamedTuple):
    """A predicted step."""

    name: str
    step_ms: float
    peak_bytes: int
    """Above the step's start."""
    is_ours: bool
    """Whether ssdtrain's planner chose it."""


def spots(profile: Profile) -> list[Predicted]:
    """Keeping everything, the frontier's plans, and checkpointing in its forms; the
    largest peak first."""
    timeline = Timeline(profile)
    keep = Simulation(timeline, keep_all(timeline)).run()
    found = [Predicted("keep everything", keep.step_ms, keep.peak_bytes, False)]
    found += [
        Predicted("plan", keep.step_ms * (1 + point.overhead), point.peak_bytes, True)
        for point in frontier(profile)
    ]
    found += [
        Predicted(name, other.step_ms, other.peak_bytes, False)
        for name, other in reruns(timeline)
    ]
    return sorted(found, key=lambda spot: (-spot.peak_bytes, spot.step_ms))


_FORMS = {
    "regions": "full recompute",
    "regions + attention": "full recompute, attention stored",
}
"""What fixed policies are to someone who knows checkpointing."""


def reruns(timeline: Timeline) -> Iterator[tuple[str, Prediction]]:
    """Yield checkpointing in its forms, as the planner's simulator prices them, full
    recompute first; nothing where the profile has no regions."""
    for policy in checkpointing(timeline):
        orders = schedule(timeline, policy.placements, policy.style)
        yield _FORMS[policy.name], simulate(timeline, orders)
    moving = again_moving(timeline, num_read(timeline.profile))
    if moving is not None:
        yield "full recompute, checkpoints offloaded", simulate(timeline, moving)
        second = [region for region in as_they_run(timeline) if region[1] % 2 == 0]
        orders = kept_but(timeline, second)
        yield "every second layer recomputed", simulate(timeline, orders)


def frontier_lines(
    points: Sequence[Predicted], room_bytes: int | None = None
) -> list[str]:
    """Format one line a point; `room_bytes` of the device, if known."""
    if not points:
        return []
    keep_ms = min(point.step_ms for point in points)
    told = [
        f"  {OURS if point.is_ours else OTHERS} {bytes_text(point.peak_bytes):>10}  "
        f"{point.step_ms:9.1f} ms  {point.step_ms / keep_ms:5.2f}x  {point.name}"
        + ("  (does not fit)" if room_bytes and point.peak_bytes > room_bytes else "")
        for point in points
    ]
    head = f"Frontier: peak, predicted step ({OURS} ssdtrain's, {OTHERS} others)"
    return [head, *told]

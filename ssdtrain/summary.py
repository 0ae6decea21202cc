"""What a session saves and costs, in three lines: memory, time, what to do next."""

import statistics
from collections.abc import Sequence

from ssdtrain.counters import StepReport
from ssdtrain.plan.calibrate import PLAIN_STEP
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Item, Profile
from ssdtrain.quantities import bytes_text

NEXT = "Next: "
"""How the line begins that tells what to do; `plan.words.explain` ends with one."""
NOISY = 4 / 3
"""Steps whose longest takes more than this times the shortest give no ratio."""
NUM_TIMED = 3
"""The newest timed steps that are looked at."""
LEAST_SHARE = 0.01
"""Of what was saved: less is not worth a reason."""


Reports = Sequence[StepReport]
"""Finished ones, oldest first."""


def summary(
    steps: Reports,
    plan: Plan | None = None,
    profile: Profile | None = None,
    advice: str = "",
) -> str:
    """Return three lines: memory saved, time paid, what to do next.

    Args:
        steps: of the session.
        plan: in force.
        profile: what it was made for.
        advice: what to do next, a sentence without its subject.
    """
    return "\n".join(
        [
            f"Memory: {_memory(steps, plan, profile)}",
            f"Time: {_time(steps, plan, profile)}",
            f"{NEXT}{advice or 'nothing; go on training.'}",
        ]
    )


def _memory(steps: Reports, plan: Plan | None, profile: Profile | None) -> str:
    if not steps:
        return "no step has been reported yet."
    last = steps[-1]
    if not last.bytes_saved:  # it may have run without hooks
        return "nothing is moved or made again; the step is as without ssdtrain."
    peak = last.saved_peak_bytes
    whole = _kept_bytes(steps, plan, profile)
    told = f"at most {bytes_text(peak)} of saved tensors on the device"
    if whole is None:
        return (
            f"{told} at once; autograd saved {bytes_text(last.bytes_saved)} in the "
            "step (both measured)."
        )
    share = 100 * (1 - peak / whole)
    if share < 1:
        return f"{told}, as much as without ssdtrain (measured)."
    return f"{told} instead of {bytes_text(whole)}: {share:.0f} % less (measured)."


def _kept_bytes(
    steps: Reports, plan: Plan | None, profile: Profile | None
) -> int | None:
    """Return the most bytes of saved tensors alive at once if all of them stayed, as
    autograd was seen to save them; None: the micro-batches of the step are unknown."""
    last = steps[-1]
    if profile is not None:
        if len(profile.lanes) == 1:
            return max(last.bytes_saved, last.saved_peak_bytes)
        prediction = None if plan is None else plan.prediction
        return None if prediction is None else prediction.keep_peak_bytes
    stayed = [
        step.saved_peak_bytes
        for step in steps
        if not (step.bytes_offloaded or step.bytes_recomputed) and step.bytes_saved
    ]
    if stayed:
        return max(*stayed, last.saved_peak_bytes)
    # The first saved tensor is asked for when all of a single micro-batch are made.
    return None


def _time(steps: Reports, plan: Plan | None, profile: Profile | None) -> str:
    prediction = None if plan is None else plan.prediction
    if plan is not None and plan.keeps_all:
        return "none; the step runs without hooks."
    errors = [step.plan_error for step in steps if step.plan_error is not None]
    if prediction is None or not errors:
        return "not compared; no step without ssdtrain was timed."
    times = [prediction.step_ms * (1 + error) for error in errors[-NUM_TIMED:]]
    took = statistics.median(times)
    if max(times) > NOISY * min(times):
        return (
            f"not compared; the last steps took {min(times):.0f} to {max(times):.0f} "
            "ms, too different for a ratio. Is the machine busy?"
        )
    if profile is None or PLAIN_STEP not in profile.notes:
        return f"{took:.1f} ms a step; not compared, as no plain step was timed."
    change = 100 * (took / prediction.keep_ms - 1)
    how = f"{change:.1f} % slower than" if change >= 0.05 else "as fast as"
    if change <= -1:
        how = f"{-change:.1f} % faster than"
    return (
        f"{took:.1f} ms a step, {how} the step without ssdtrain "
        f"({prediction.keep_ms:.1f} ms, measured here)."
    )


def why_it_stays(profile: Profile, plan: Plan) -> list[str]:
    """Return why saved tensors stay on the device under a plan, most bytes first; none
    for what is less than a hundredth of all that was saved."""
    bytes_by: dict[str, int] = {}
    for lane in range(len(profile.lanes)):
        orders = plan.orders[profile.lanes[lane]]
        for item, order in zip(profile.items_of(lane), orders, strict=True):
            if item.owner < 0 and item.serves < 0:
                if order.placement is Placement.KEEP:
                    reason = _reason(item)
                    bytes_by[reason] = bytes_by.get(reason, 0) + item.num_bytes
    least = LEAST_SHARE * profile.saved_bytes
    found = sorted(bytes_by.items(), key=lambda pair: -pair[1])
    return [f"{bytes_text(size)} {reason}." for reason, size in found if size >= least]


def _reason(item: Item) -> str:
    if item.held:
        return (
            "stay because your script or model holds them until backward ends: moving "
            "them would free nothing (delete outputs that you do not need)"
        )
    return "stay because moving them would not help to reach the goal"

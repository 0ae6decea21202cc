"""A step without a chosen plan in plain words, and why nothing was offloaded in it."""

from collections.abc import Mapping
from typing import Any

KEPT = "kept: "
"""How the fallbacks begin that leave a tensor on the device."""


def why_nothing_left(
    totals: Mapping[str, Any], fallbacks: Mapping[str, int], plan: str, min_bytes: int
) -> str | None:
    """Return the reason for `bytes_offloaded == 0`; None where something was offloaded.

    Args:
        totals: `bytes_saved`, `bytes_offloaded` and `bytes_recomputed` of the same
            steps, of which at least one was not yet planned; empty where no tensor
            was large enough for a report.
        fallbacks: how often what was asked for was not done, by reason.
        plan: the setting of that name.
        min_bytes: the setting of that name.
    """
    if totals.get("bytes_offloaded"):
        return None
    kept = [reason for reason in fallbacks if reason.startswith(KEPT)]
    if kept:
        return "; ".join(f"{reason} ({fallbacks[reason]} times)" for reason in kept)
    if plan == "keep-all":  # perhaps without hooks, which count what is saved
        return "plan='keep-all' moves nothing"
    below = f"min_bytes={min_bytes} ({min_bytes / 1e6:.3g} MB)"
    if not totals.get("bytes_saved"):
        return (
            f"everything was below {below}; set min_bytes lower to move small tensors"
        )
    if plan not in ("auto", "offload-all"):
        return f"the plan {plan} moves nothing that was saved"
    if totals["bytes_recomputed"]:
        return f"what reached {below} was rebuilt, so nothing was left to move"
    return f"what reached {below} is held by its owner, so moving it frees nothing"


def explain_step(
    step: Mapping[str, Any] | None, plan: str, min_bytes: int, *, will_plan: bool
) -> str:
    """Return what a fixed policy did in its last step.

    Args:
        step: the StepReport as plain values; None while there is none.
        plan: the setting of that name.
        min_bytes: the setting of that name.
        will_plan: whether a plan is still to come.
    """
    later = "plan='auto' runs a step, observes the next one, then plans."
    if step is None:
        none = "No step has ended yet with a saved tensor of at least "
        return none + f"min_bytes={min_bytes}." + (f" {later}" if will_plan else "")
    moved = (
        f"Last step, plan={plan!r}, no prediction: of {_mb(step, 'bytes_saved')} saved,"
        f" {_mb(step, 'bytes_offloaded')} offloaded, {_mb(step, 'bytes_recomputed')} "
        f"rebuilt, {_mb(step, 'bytes_kept')} kept; peak of saved tensors "
        f"{_mb(step, 'saved_peak_bytes')}, stalled {step['stall_ms']:.1f} ms."
    )
    why = why_nothing_left(step, step["fallbacks"], plan, min_bytes)
    lines = [moved, "" if why is None else f"Nothing was offloaded: {why}."]
    return "\n".join(filter(None, [*lines, later if will_plan else ""]))


def _mb(step: Mapping[str, Any], name: str) -> str:
    return f"{step[name] / 1e6:.2f} MB"

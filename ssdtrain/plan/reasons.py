"""Why nothing was offloaded, in one sentence: a zero in a report is explained."""

from collections.abc import Mapping
from typing import Any

KEPT = "kept: "
"""How the fallbacks begin that leave a tensor on the device."""


def why_nothing_left(
    totals: Mapping[str, Any], fallbacks: Mapping[str, int], plan: str, min_bytes: int
) -> str | None:
    """The reason for `bytes_offloaded == 0`; None where something was offloaded.

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
    below = f"min_bytes={min_bytes} ({min_bytes / 1e6:.3g} MB)"
    if not totals.get("bytes_saved"):
        return (
            f"everything was below {below}; set min_bytes lower to move small tensors"
        )
    if plan == "keep-all":
        return "plan='keep-all' moves nothing"
    if plan not in ("auto", "offload-all"):
        return f"the plan {plan} moves nothing that was saved"
    if totals["bytes_recomputed"]:
        return f"what reached {below} was rebuilt, so nothing was left to move"
    return f"what reached {below} is held by its owner, so moving it frees nothing"

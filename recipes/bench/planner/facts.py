"""What the planner's results keep of a plan and of a profile."""

from typing import Any

from ssdtrain.plan.profile import Profile


def summary(plan: Any) -> dict[str, Any]:
    """Of a plan with a prediction."""
    prediction = plan.prediction
    return {
        "policy": plan.policy,
        "bytes": plan.bytes_by_placement(),
        "step_ms": prediction.step_ms,
        "peak_gb": prediction.peak_bytes / 1e9,
        "keep_ms": prediction.keep_ms,
        "keep_peak_gb": prediction.keep_peak_bytes / 1e9,
        "stall_ms": prediction.stall_ms,
        "recompute_ms": prediction.recompute_ms,
    }


def facts(profile: Profile) -> dict[str, Any]:
    """Of a profile: links, times, recipes."""
    links = profile.links
    recipes: dict[str, list[float]] = {}
    for items in profile.kinds.values():
        for item in items:
            if item.recipe is not None:
                cell = recipes.setdefault(item.recipe, [0, 0.0, 0.0])
                cell[0] += 1
                cell[1] += item.num_bytes / 1e9
                cell[2] += item.recipe_ms
    return {
        "d2h_gb_per_s": links.d2h.bytes_per_second / 1e9,
        "h2d_gb_per_s": links.h2d.bytes_per_second / 1e9,
        "copy_slowdown": links.copy_slowdown,
        "duplex_slowdown": links.duplex_slowdown,
        "ssd_gb_per_s": [
            None if curve is None else curve.bytes_per_second / 1e9
            for curve in (links.ssd_write, links.ssd_read)
        ],
        "ssd_duplex_slowdown": links.ssd_duplex_slowdown,
        "notes": dict(profile.notes),
        "num_marks": len(profile.marks),
        "compute_ms": profile.compute_ms,
        "head_ms": profile.head_ms,
        "tail_ms": profile.tail_ms,
        "recipes (number, GB, ms)": recipes,
    }

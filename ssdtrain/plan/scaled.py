"""A profile at another batch size: numbers scale, places stay."""

from dataclasses import replace

from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline


def scaled(profile: Profile, ratio: float) -> Profile:
    """Return the profile of a step whose saved tensors are larger by this ratio: so are
    its operators' times and memory. The host's work and the weights stay."""
    kinds = {
        kind: tuple(
            replace(
                item,
                num_bytes=round(item.num_bytes * ratio),
                recipe_ms=item.recipe_ms * ratio,
                made_ms=item.made_ms * ratio,
            )
            for item in items
        )
        for kind, items in profile.kinds.items()
    }
    marks = tuple(
        replace(mark, ms=mark.ms * ratio, other_bytes=round(mark.other_bytes * ratio))
        for mark in profile.marks
    )
    regions = {
        kind: tuple(
            replace(
                run,
                ms=run.ms * ratio,
                other_bytes=round(run.other_bytes * ratio),
                parts=tuple(replace(part, ms=part.ms * ratio) for part in run.parts),
            )
            for run in runs
        )
        for kind, runs in profile.regions.items()
    }
    return replace(profile, kinds=kinds, marks=marks, regions=regions)


def as_observed(plan: Plan, profile: Profile) -> Plan:
    """Give a plan for a scaled profile the observed sizes and their prediction."""
    orders = {
        kind: tuple(
            replace(order, num_bytes=item.num_bytes)
            for order, item in zip(own, profile.kinds[kind], strict=True)
        )
        for kind, own in plan.orders.items()
    }
    predicted = simulate(Timeline(profile), orders)
    return Plan(orders=orders, policy=plan.policy, prediction=predicted)

"""A profile at another batch size: numbers scale, places stay."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline

FIXED_SHARE = 0.3
"""Part of a step's times that does not grow with its batch: weights are read, and their
gradients written, for a batch of any size. Twelve layers of a 4B model took an H200 117
ms for 2379 tokens, 184 for 5365 and 257 for 8192, of which some 60 are that part."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What is known of a step of another size than that everything grows evenly."""

    fixed: tuple[str, ...] = ()
    """Names of items that have one size at any size of the batch."""

    def bytes_of(self, name: str, num_bytes: int, ratio: float) -> int:
        """Return the size of an item of a batch that is larger by this ratio."""
        return num_bytes if name in self.fixed else round(num_bytes * ratio)


def times_longer(ratio: float) -> float:
    """Return how much longer operators take of a batch that is larger by this ratio."""
    return FIXED_SHARE + (1.0 - FIXED_SHARE) * ratio


class UpTo(NamedTuple):
    """A plan, and the size of the largest batch that follows it, over the observed
    one's."""

    ratio: float
    plan: Plan


def scaled(profile: Profile, ratio: float, growth: Growth | None = None) -> Profile:
    """Return the profile of a step whose saved tensors are larger by this ratio: so are
    its operators' times and memory. The host's work and the weights stay.

    What a smaller batch needs beside its saved tensors is taken for as much as the
    observed one's: weights' gradients are among it.
    """
    growth = growth or Growth()
    others, longer = max(1.0, ratio), times_longer(ratio)
    kinds = {
        kind: tuple(
            replace(
                item,
                num_bytes=growth.bytes_of(item.name, item.num_bytes, ratio),
                recipe_ms=item.recipe_ms * longer,
                made_ms=item.made_ms * longer,
            )
            for item in items
        )
        for kind, items in profile.kinds.items()
    }
    marks = tuple(
        replace(mark, ms=mark.ms * longer, other_bytes=round(mark.other_bytes * others))
        for mark in profile.marks
    )
    regions = {
        kind: tuple(
            replace(
                run,
                ms=run.ms * longer,
                other_bytes=round(run.other_bytes * others),
                parts=tuple(replace(part, ms=part.ms * longer) for part in run.parts),
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

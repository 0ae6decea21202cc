"""A profile at another batch size: numbers scale, places stay."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple

from ssdtrain.jsonfile import Duration, Natural
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.profile import Item, Profile
from ssdtrain.plan.simulate import simulate
from ssdtrain.plan.timeline import Timeline

FIXED_SHARE = 0.3
"""Part of a step's times that does not grow with its batch, until steps of two sizes
were measured (`fixed_share`): weights are read, and their gradients written, for a
batch of any size. It is one model's: twelve layers of 4B took an H200 117 ms for 2379
tokens, 184 for 5365 and 257 for 8192, of which some 60 are that part."""
APART = 0.2
"""By how much the sizes of two steps must differ, as a part of the larger one: of
others the difference in time is that of any two steps."""
MOST_SHARE = 0.9
"""What hardly grows was bound by something else, such as the host."""


class BytesByGrowth(NamedTuple):
    """Bytes by how they grow."""

    fixed: int = 0
    even: int = 0
    square: int = 0

    def even_ratio(self, ratio: float) -> float:
        """Return by how much what grows evenly does, where that or all together grows
        by this ratio, whichever is more."""
        more = ratio * sum(self) - self.fixed
        if not self.square or more <= 0.0 or math.isinf(ratio):
            return ratio
        root = math.sqrt(self.even**2 + 4.0 * self.square * more)
        return min(ratio, (root - self.even) / (2.0 * self.square))


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What is known of a step of another size than that everything grows evenly."""

    fixed: tuple[str, ...] = ()
    """Names of items that have one size at any size of the batch."""
    squares: Mapping[str, tuple[Natural, ...]] = field(default_factory=dict)
    """By kind of lane, the items that grow with the square, as an attention's scores
    do with the length of its sequence."""
    fixed_share: Duration = FIXED_SHARE
    """Part of the observed step's times that does not grow."""

    def bytes_of(self, name: str, num_bytes: int, ratio: float) -> int:
        """Return about the size of an item of a batch that is larger by this ratio, for
        pinned memory: more is made where it is asked for."""
        return num_bytes if name in self.fixed else round(num_bytes * ratio)

    def exponents(self, kind: str, items: Sequence[Item | Order]) -> list[int]:
        """Return with which power of what grows evenly each item grows."""
        squares = set(self.squares.get(kind, ()))
        return [
            0 if item.name in self.fixed else 1 + (number in squares)
            for number, item in enumerate(items)
        ]

    def sums(self, kind: str, items: Sequence[Item | Order]) -> BytesByGrowth:
        """Add up what these items have."""
        sums = [0, 0, 0]
        for item, exponent in zip(items, self.exponents(kind, items), strict=True):
            sums[exponent] += item.num_bytes
        return BytesByGrowth(*sums)

    def times_longer(self, ratio: float) -> float:
        """Return how much longer operators take of a batch that is larger by this
        ratio."""
        return self.fixed_share + (1.0 - self.fixed_share) * ratio


class StepTime(NamedTuple):
    """Of one step that was measured."""

    num_bytes: int
    """Saved for backward: its size."""
    ms: float


def fixed_share(steps: Sequence[StepTime], num_bytes: int) -> float | None:
    """Return the part that does not grow of the time of a step that saves `num_bytes`;
    None where no two of these steps differ enough in size.

    Two steps tell how much longer a larger one takes. The middle of what all pairs say
    counts, so that a single step that was disturbed does not.
    """
    slopes = [
        (more.ms - less.ms) / (more.num_bytes - less.num_bytes)
        for less, more in combinations(sorted(steps), 2)
        if more.num_bytes - less.num_bytes > APART * more.num_bytes
    ]
    if not slopes:
        return None
    slope = statistics.median(slopes)
    start_ms = statistics.median(step.ms - slope * step.num_bytes for step in steps)
    step_ms = start_ms + slope * num_bytes
    if step_ms <= 0.0:
        return None
    return min(MOST_SHARE, max(0.0, start_ms / step_ms))


class UpTo(NamedTuple):
    """A plan, and the size of the largest batch that follows it, over the observed
    one's."""

    ratio: float
    plan: Plan


def scaled(profile: Profile, ratio: float, growth: Growth | None = None) -> Profile:
    """Return the profile of a step whose saved tensors are larger by this ratio: so are
    its operators' times and memory. The host's work and the weights stay.

    What a smaller batch needs besides its saved tensors is taken for as much as the
    observed one's: weights' gradients are among it.
    """
    growth = growth or Growth()
    others, longer = max(1.0, ratio), growth.times_longer(ratio)
    ratios = {}
    for kind, items in profile.kinds.items():
        even = growth.sums(kind, items).even_ratio(ratio)
        ratios[kind] = [even**each for each in growth.exponents(kind, items)]
    kinds = {
        kind: tuple(
            replace(
                item,
                num_bytes=round(item.num_bytes * own),
                recipe_ms=item.recipe_ms * longer,
                made_ms=item.made_ms * longer,
            )
            for item, own in zip(items, ratios[kind], strict=True)
        )
        for kind, items in profile.kinds.items()
    }
    marks = []
    for mark in profile.marks:
        more = max(others, ratios[profile.lanes[mark.lane]][mark.item])
        other_bytes = round(mark.other_bytes * more)
        marks.append(replace(mark, ms=mark.ms * longer, other_bytes=other_bytes))
    regions = {
        kind: tuple(
            replace(
                run,
                ms=run.ms * longer,
                other_bytes=round(run.other_bytes * others),
                small_bytes=round(run.small_bytes * others),
                parts=tuple(replace(part, ms=part.ms * longer) for part in run.parts),
            )
            for run in runs
        )
        for kind, runs in profile.regions.items()
    }
    return replace(
        profile,
        kinds=kinds,
        marks=tuple(marks),
        regions=regions,
        has_quiet_calls=profile.has_quiet_calls and ratio == 1.0,
    )


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

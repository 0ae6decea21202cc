"""Plans in which some regions run again."""

from collections.abc import Callable

import ssdtrain
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Item
from ssdtrain.plan.regions import by_yield, spread, with_regions
from ssdtrain.plan.schedule import schedule
from ssdtrain.plan.timeline import Timeline


def some_again(
    session: ssdtrain.Session,
    place: Callable[[Item], Placement],
    num_again: int | None = None,
    num_storing: int | None = 0,
) -> Plan:
    """A plan of the observed step.

    Args:
        session: which has observed one.
        place: where an item is that no region makes again.
        num_again: regions that run again; None: all.
        num_storing: of them, those whose attention is stored; None: all.
    """
    assert session.profile is not None
    timeline = Timeline(session.profile)
    placements = {
        kind: [place(item) for item in items]
        for kind, items in timeline.profile.kinds.items()
    }
    chosen = spread(timeline)[:num_again]
    storing = by_yield(timeline)[:num_storing]
    orders = schedule(timeline, with_regions(timeline, placements, chosen, storing))
    return Plan(orders=orders, policy="some regions")


def recipes_beside(others: Placement) -> Callable[[Item], Placement]:
    """Recipes make what they can; the others are placed so."""
    return lambda item: Placement.RECOMPUTE if item.recipe else others

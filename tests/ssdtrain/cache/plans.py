"""Plans made of the one in force."""

from dataclasses import replace

import ssdtrain
from ssdtrain.plan.choose import options
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Order, Plan
from ssdtrain.plan.regions import spread, with_regions
from ssdtrain.plan.schedule import Style, schedule
from ssdtrain.plan.timeline import Timeline


def all_moved(session: ssdtrain.Session) -> Plan:
    """The plan in force, but everything leaves at once and comes back at its use."""
    plan = session.plan
    assert plan is not None
    orders = {
        kind: tuple(
            Order(
                name=order.name,
                num_bytes=order.num_bytes,
                placement=Placement.OFFLOAD,
                release_after=1,
                load_at=at if at % 2 else 0,
            )
            for at, order in enumerate(reversed(own))
        )
        for kind, own in plan.orders.items()
    }
    return Plan(orders={kind: own[::-1] for kind, own in orders.items()}, policy="all")


def none_again(plan: Plan) -> Plan:
    """The plan, but nothing is made again, by recipes or in regions: all that is saved
    leaves at once, and comes back when backward begins."""
    orders = {
        kind: tuple(
            replace(
                order,
                placement=Placement.OFFLOAD,
                release_after=1,
                load_at=0,
                load_batch=0,
            )
            for order in own
        )
        for kind, own in plan.orders.items()
    }
    return Plan(orders=orders, policy="none again")


def misnamed(plan: Plan) -> Plan:
    """The plan, but no lane saves what it expects from the middle on."""
    orders = {
        kind: tuple(
            replace(order, name="nothing") if 2 * number > len(own) else order
            for number, order in enumerate(own)
        )
        for kind, own in plan.orders.items()
    }
    return Plan(orders=orders, policy="misnamed")


def nearly_all_kept(session: ssdtrain.Session) -> Plan:
    """The plan in force, but nothing leaves, except the first tensor: a plan that keeps
    all installs no hooks."""
    plan = session.plan
    assert plan is not None
    keep = {"placement": Placement.KEEP, "release_after": 0, "load_at": 0}
    move = {"placement": Placement.OFFLOAD, "release_after": 1, "load_at": 0}
    orders = {
        kind: tuple(
            replace(order, **(keep if at else move))  # type: ignore[arg-type]
            for at, order in enumerate(own)
        )
        for kind, own in plan.orders.items()
    }
    return Plan(orders=orders, policy="all")


def every_other_moved(session: ssdtrain.Session) -> Plan:
    """`all_moved`, but items of odd number stay."""
    orders = {
        kind: tuple(
            replace(order, placement=Placement.KEEP, release_after=0, load_at=0)
            if number % 2
            else order
            for number, order in enumerate(own)
        )
        for kind, own in all_moved(session).orders.items()
    }
    return Plan(orders=orders, policy="every other")


def moved_in_front(session: ssdtrain.Session, num_moved: int) -> Plan:
    """The first items of a lane leave at once and come back when backward begins; all
    others stay."""
    orders = {
        kind: tuple(
            replace(order, load_at=0)
            if number < num_moved
            else replace(order, placement=Placement.KEEP, release_after=0, load_at=0)
            for number, order in enumerate(own)
        )
        for kind, own in all_moved(session).orders.items()
    }
    return Plan(orders=orders, policy="in front")


def rebuilding(session: ssdtrain.Session, others: Placement = Placement.KEEP) -> Plan:
    """Everything that a recipe can make is made, everything else stays or moves."""
    profile = session.profile
    assert profile is not None and session.plan is not None
    orders = {}
    for kind, own in session.plan.orders.items():
        items = profile.kinds[kind]
        moves = others is not Placement.KEEP
        orders[kind] = tuple(
            replace(
                order,
                placement=others if item.recipe is None else Placement.RECOMPUTE,
                release_after=2 if moves and item.recipe is None else 0,
                load_at=0,
            )
            for order, item in zip(own, items, strict=True)
        )
    return Plan(orders=orders, policy="rebuilding")


def rows_of(session: ssdtrain.Session) -> list[str]:
    """Names of the rows of all tables."""
    assert session.cache.is_idle
    tables = session.cache.tables.tables.values()
    return [type(row).__name__ for table in tables for row in table.rows]


def moved_and_again(session: ssdtrain.Session) -> Plan:
    """Every second region runs again, what recipes can make is made outside of them,
    and everything else moves."""
    profile = session.profile
    assert profile is not None
    timeline = Timeline(profile)
    ways = (Placement.RECOMPUTE, Placement.OFFLOAD, Placement.KEEP)
    placed = {
        kind: [next(w for w in ways if w in options(timeline, item)) for item in items]
        for kind, items in profile.kinds.items()
    }
    again = [region for region in spread(timeline) if region[1] % 2 == 0]
    placements = with_regions(timeline, placed, again)
    orders = schedule(timeline, placements, Style(window_bytes=1))
    return Plan(orders=orders, policy="moved and again")

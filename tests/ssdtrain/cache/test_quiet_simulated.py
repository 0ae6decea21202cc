"""The simulator's layers without hooks are the table's: [Note: quiet calls]."""

import random
from dataclasses import replace

import pytest
from torch import nn

import ssdtrain
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Item, Profile
from ssdtrain.plan.schedule import Late, Style, schedule
from ssdtrain.plan.simulate import Run
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.cache.steps import train
from tests.ssdtrain.cache.test_quiet import (
    NUM_LAYERS,
    NUM_STEPS,
    SETTINGS,
    WIDTH,
    Model,
    in_a_row,
    step,
)


class Region(nn.Sequential):
    """A layer without side effects, so that it may be a region."""

    def __init__(self) -> None:
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        super().__init__(nn.LayerNorm(WIDTH), up, nn.Tanh(), down)


def drawn(profile: Profile, draw: random.Random) -> Plan:
    """Some tensors of one layer leave, and come back some uses earlier than they
    must."""
    layer = draw.randrange(NUM_LAYERS)

    def place(item: Item) -> Placement:
        leaves = item.region == layer and draw.random() < 0.6
        return Placement.OFFLOAD if leaves else Placement.KEEP

    placements = {
        kind: [place(item) for item in items] for kind, items in profile.kinds.items()
    }
    orders = schedule(Timeline(profile), placements, Style(late=Late.WAIT))
    earlier = {
        kind: tuple(
            replace(order, load_at=max(0, order.load_at - draw.randrange(6)))
            if order.release_after
            else order
            for order in own
        )
        for kind, own in orders.items()
    }
    return Plan(orders=earlier, policy="drawn")


@pytest.mark.parametrize("seed", range(8))
def test_the_simulator_knows_which_layers_see_hooks(seed: int) -> None:
    net = Model(in_a_row)
    net.layers = nn.ModuleList(Region() for _ in range(NUM_LAYERS))
    with ssdtrain.offload(net, **SETTINGS, recompute="regions") as session:
        for number, _ in enumerate(train(net, step, NUM_STEPS)):
            if number == 3:
                assert session.profile is not None
                session.follow(drawn(session.profile, random.Random(seed)))
        assert session.plan is not None and session.profile is not None
        (table,) = session.cache.tables.tables.values()
        timeline = Timeline(session.profile)
        marks = Run(timeline, session.plan.orders).hooked_marks()
        runs = {run for run, on in zip(timeline.run_of_mark, marks, strict=True) if on}
        assert {*range(NUM_LAYERS)} - runs == {*table.passages}
        assert 0 < len(table.passages) < NUM_LAYERS

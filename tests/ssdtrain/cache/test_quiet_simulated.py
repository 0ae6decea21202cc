"""The simulator's layers without hooks are the table's: [Note: quiet calls]."""

import random
from dataclasses import replace

import pytest
from torch import nn

import ssdtrain
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.plan import Plan
from ssdtrain.plan.profile import Profile
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


def some_moved(profile: Profile, draw: random.Random, num_layers: int) -> Plan:
    """Some tensors of so many layers leave, and come back some uses earlier than they
    must."""
    layers = draw.sample(range(NUM_LAYERS), num_layers)
    placements = {
        kind: [
            Placement.OFFLOAD
            if item.region in layers and draw.random() < 0.6
            else Placement.KEEP
            for item in items
        ]
        for kind, items in profile.kinds.items()
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
    return Plan(orders=earlier, policy="some moved")


@pytest.mark.parametrize("seed", range(8))
def test_the_simulator_knows_which_layers_see_hooks(seed: int) -> None:
    net = Model(in_a_row)
    net.layers = nn.ModuleList(Region() for _ in range(NUM_LAYERS))
    with ssdtrain.offload(net, **SETTINGS, recompute="regions") as session:
        for number, _ in enumerate(train(net, step, NUM_STEPS)):
            if number == 3:
                assert session.profile is not None
                draw = random.Random(seed)
                session.follow(some_moved(session.profile, draw, 1))
        assert session.plan is not None and session.profile is not None
        (table,) = session.cache.tables.tables.values()
        timeline = Timeline(session.profile)
        marks = Run(timeline, session.plan.orders).hooked_marks()
        runs = {run for run, on in zip(timeline.run_of_mark, marks, strict=True) if on}
        assert {*range(NUM_LAYERS)} - runs == {*table.passages}
        assert 0 < len(table.passages) < NUM_LAYERS

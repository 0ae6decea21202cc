"""Orders and rules are carried out by one executor."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.cache.state import RecordState
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.rule import KEEP_ALL, Rule
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import all_moved

pytestmark = pytest.mark.usefixtures("virtual_time")

ROWS, WIDTH, NUM_LAYERS = 16, 32, 6
ONE = ROWS * WIDTH * 4
SETTINGS: dict[str, Any] = {
    "max_overhead": 0.01,
    "target": "host",
    "min_bytes": 1,
    "recompute": "off",
    "window_bytes": 2 * ONE,
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*(part for pair in layers for part in pair))


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.ones(ROWS, WIDTH)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("rule", [Rule(), Rule(Placement.OFFLOAD_IF_IN_TIME), KEEP_ALL])
def test_a_rule_holds_for_what_no_order_names(rule: Rule) -> None:
    """For each record when it is saved: with another rule the next step goes another
    way, and its tail stays, as backward asks for that at once."""
    theirs, model = step(net()), net()
    with ssdtrain.offload(model, plan="offload-all", **SETTINGS) as session:
        session.cache.cursor.rule = rule
        for _ in range(3):
            assert same_bits(step(model), theirs)
            session.hints.step_end()
        first, *_, last = session.steps
    assert first.bytes_offloaded + first.bytes_kept == first.bytes_saved
    if rule is KEEP_ALL:
        assert first.bytes_offloaded == last.bytes_offloaded == 0
    elif rule == Rule():
        assert first.bytes_kept == 0
        assert last.bytes_kept == 2 * ONE, "a window's worth"


def test_a_lane_that_leaves_its_plan_goes_by_the_rule() -> None:
    """Under the same steps, moved by orders before and by the rule behind."""
    model = net()
    settings = {**SETTINGS, "max_overhead": 1.0}
    with ssdtrain.offload(model, plan="auto", **settings) as session:
        for _ in range(4):
            step(model)
            session.hints.step_end()
        session.follow(all_moved(session))
        step(model)
        session.hints.step_end()
        planned = session.steps[-1]
        session.cache.cursor.rule = KEEP_ALL
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        model(torch.sin(x) * x).sum().backward()
        strayed = session.steps[-1]
    assert planned.bytes_kept == 0 and not planned.fallbacks
    assert strayed.bytes_offloaded == ONE, "it left its plan behind its first tensor"
    assert strayed.fallbacks and strayed.bytes_kept + ONE == strayed.bytes_saved


def test_what_backward_asks_for_first_is_loaded_ahead() -> None:
    model = net()
    settings = {**SETTINGS, "prefetch_bytes": ONE, "window_bytes": 1}
    with ssdtrain.offload(model, plan="offload-all", **settings) as session:
        cache = session.cache
        with session.hints.forward():
            loss = model(torch.ones(ROWS, WIDTH)).sum()
            lane = cache.lanes.current
        records = [record for each in lane.records if (record := each()) is not None]
        away, last = RecordState.AWAY, RecordState.LEAVING
        assert [each.state for each in records] == [away] * NUM_LAYERS + [last]
        cache.prefetch(lane)
        states = [each.state for each in records[-3:]]
        assert states == [away, RecordState.RETURNING, last], "a tensor ahead"
        loss.backward()

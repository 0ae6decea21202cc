"""What becomes of what no order names."""

import pytest

from ssdtrain.plan.placement import Placement
from ssdtrain.plan.rule import KEEP_ALL, Rule

AWAY = [Placement.OFFLOAD, Placement.OFFLOAD_IF_IN_TIME]


@pytest.mark.parametrize("placement", AWAY)
def test_all_but_a_lanes_last_ones_leaves(placement: Placement) -> None:
    rule = Rule(placement)
    lefts = [-1, 0, 99, 100, 1000]
    found = [rule.place(left, tail_bytes=100, held=False) for left in lefts]
    last = Placement.KEEP_LAST
    assert found == [placement, last, last, placement, placement]


def test_what_its_owner_holds_stays_where_that_is_asked_for() -> None:
    for rule in (Rule(), Rule(spares_held=True)):
        found = rule.place(-1, 100, held=True)
        expected = Placement.KEEP if rule.spares_held else Placement.OFFLOAD
        assert found is expected
        assert rule.place(-1, 100, held=False) is Placement.OFFLOAD


@pytest.mark.parametrize("left", [-1, 0, 1000])
def test_a_rule_that_keeps_drains_no_window(left: int) -> None:
    """`KEEP_LAST` would release others for what stays anyway."""
    assert KEEP_ALL.place(left, 100, held=False) is Placement.KEEP

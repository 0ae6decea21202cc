"""Plans of others, beside which a search's plan is judged."""

from dataclasses import replace

import pytest

from ssdtrain.plan.baselines import last_module
from ssdtrain.plan.placement import Placement
from ssdtrain.plan.profile import Mark
from ssdtrain.plan.timeline import Timeline
from tests.ssdtrain.plan.profiles import chain


@pytest.mark.parametrize("empty_lane", [0, 1])
def test_a_lane_without_items_ends_no_search(empty_lane: int) -> None:
    """An interrupt may come before a lane's first tensor: such a lane says nothing,
    and stands in no other lane's place."""
    profile = chain(8)

    def moved(mark: Mark) -> Mark:
        return replace(mark, lane=1 - empty_lane)

    both = replace(
        profile,
        lanes=("model/0", "model/0"),
        marks=tuple(map(moved, profile.marks)),
    )
    found = last_module(Timeline(both))
    assert found == last_module(Timeline(profile))
    assert Placement.OFFLOAD in found["model/0"]


def test_a_kind_none_of_whose_lanes_has_items_is_kept() -> None:
    """As it has nothing to move."""
    profile = replace(chain(4), marks=())
    assert set(last_module(Timeline(profile))["model/0"]) == {Placement.KEEP}

"""One observed step: what it switches on, and what one that is given up leaves."""

from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.cache.cursor import Unobserved
from ssdtrain.counters import Trace
from ssdtrain.observe.hostprices import HostPrices
from ssdtrain.observe.observation import Observation
from ssdtrain.observe.room import Room

pytestmark = pytest.mark.usefixtures("virtual_time")


class Watched:
    """A small model of which steps are observed by hand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        self.model = nn.Sequential(*parts)
        self.session = ssdtrain.offload(
            self.model, target="host", min_bytes=1, plan="offload-all"
        )
        self.cache: Any = self.session.cache
        self.trace = Trace(enabled=False)
        self.prices = HostPrices(self.cache)
        self.observation = Observation(
            self.cache,
            self.prices,
            Room(self.cache.device),
            self.trace,
            [self.model],
            {"told": "by hand"},
        )

    def observe(self) -> None:
        """As a planner does at the start of a step."""
        self.observation.begin()
        self.cache.cursor.step_starts()

    def step(self) -> None:
        self.model(torch.ones(4, 8)).sum().backward()
        self.session.hints.step_end()

    @property
    def is_clean(self) -> bool:
        cache = self.cache
        return (
            cache.meter is None
            and not cache.ledger.clock.keep_spans
            and not self.trace.enabled
            and type(cache.cursor.observer) is Unobserved
            and not self.observation.is_under_way
        )


def test_an_observed_step_becomes_a_profile() -> None:
    own = Watched()
    own.step()
    assert own.is_clean
    own.observe()
    assert own.observation.is_under_way and own.trace.enabled
    own.step()
    profile = own.observation.end(is_first=True)
    assert own.is_clean and profile is not None
    assert profile.notes["told"] == "by hand"
    assert own.prices.costs is None, "here the host is the device"
    ((_, items),) = profile.kinds.items()
    num_bytes = sum(item.num_bytes for item in items)
    assert own.observation.saved_bytes == num_bytes > 0
    assert {item.module for item in items} == {"0.0", "0.1", "1.1", "2.1"}
    own.session.close()


def test_one_that_is_given_up_leaves_nothing() -> None:
    own = Watched()
    own.step()
    own.observe()
    own.model(torch.ones(4, 8))
    own.observation.stop()
    own.observation.stop()
    assert own.is_clean
    own.session.close()

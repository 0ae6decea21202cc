"""Which steps have their hooks timed."""

from types import SimpleNamespace
from typing import Any

import pytest

from ssdtrain.observe import hostprices
from ssdtrain.observe.hostprices import FIRST_SAMPLE, SAMPLED_STEPS, HostPrices
from ssdtrain.plan.profile import HostCosts

PROBED_MS, SAMPLED_MS = 1.0, 3.0


class Meter:
    """Finds that each region call takes so long."""

    def __init__(self, *args: Any, **more: Any) -> None:
        """Whatever it is to time."""

    def costs(self, before: HostCosts) -> HostCosts:
        return HostCosts(region_ms=SAMPLED_MS)


class Prices:
    """Of a cache on a GPU, whose own chain takes a millisecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str = "cuda") -> None:
        monkeypatch.setattr(hostprices, "HostMeter", Meter)
        probed = HostCosts(region_ms=PROBED_MS)
        monkeypatch.setattr(hostprices, "host_costs", lambda device: probed)
        clock = SimpleNamespace(now=lambda: 0.0, num_begun=0)
        self.cache: Any = SimpleNamespace(
            device=SimpleNamespace(torch_device=SimpleNamespace(type=kind)),
            ledger=SimpleNamespace(clock=clock),
            offloader=SimpleNamespace(drain=None),
            bypass=None,
            meter=None,
        )
        self.prices = HostPrices(self.cache)
        self.prices.probe()

    def timed(self, num: int) -> list[int]:
        """Which of so many steps are timed."""
        found = []
        for number in range(1, num + 1):
            self.prices.sample(lambda kind, item: "")
            if self.cache.meter is not None:
                found.append(number)
        return found


def test_one_step_in_many_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Prices(monkeypatch)
    later = FIRST_SAMPLE + SAMPLED_STEPS
    assert own.timed(later + 1) == [FIRST_SAMPLE, later]
    own.prices.planned()
    assert own.timed(later - 1) == [FIRST_SAMPLE]


def test_who_runs_without_hooks_or_beside_no_device_times_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unhooked = Prices(monkeypatch)
    unhooked.cache.bypass = object()
    for own in (unhooked, Prices(monkeypatch, "cpu")):
        assert not own.timed(2 * SAMPLED_STEPS)


def test_a_step_that_is_timed_prices_region_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Prices(monkeypatch)
    own.timed(FIRST_SAMPLE)
    assert own.prices.costs == HostCosts(region_ms=PROBED_MS)
    own.prices.planned()  # that step has not ended: it says nothing of the next plan
    assert own.cache.meter is None
    assert own.timed(FIRST_SAMPLE + 1) == [FIRST_SAMPLE]
    assert own.prices.costs == HostCosts(region_ms=SAMPLED_MS)

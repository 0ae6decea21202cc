"""Which steps have their hooks timed."""

from types import SimpleNamespace
from typing import Any

import pytest

from ssdtrain.observe import hostprices
from ssdtrain.observe.hostprices import FIRST_SAMPLE, SAMPLED_STEPS, HostPrices
from ssdtrain.observe.hosttime import WEIGHT
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

    def steps(self, num: int, *, samples: bool = True) -> list[tuple[int, float]]:
        """Steps whose start brought other prices, and for a region call."""
        found = []
        for number in range(1, num + 1):
            costs = self.prices.step(samples=samples, module_of=lambda kind, item: "")
            if costs is not None:
                found.append((number, costs.region_ms))
        return found


def test_one_step_in_many_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An early one under a plan, whose sample takes the place of the probe's chain."""
    own = Prices(monkeypatch)
    found = own.steps(SAMPLED_STEPS + 1)
    first, later = FIRST_SAMPLE + 1, SAMPLED_STEPS + 1
    assert found == [(first, SAMPLED_MS), (later, SAMPLED_MS)]
    own.prices.planned()
    own.prices.costs = HostCosts(region_ms=PROBED_MS)
    mean_ms = PROBED_MS + WEIGHT * (SAMPLED_MS - PROBED_MS)
    assert own.steps(first) == [(first, pytest.approx(mean_ms))]
    assert own.prices.costs.region_ms == pytest.approx(mean_ms)


def test_who_does_not_search_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor who runs without hooks, nor where the host is the device."""
    assert not Prices(monkeypatch).steps(2 * SAMPLED_STEPS, samples=False)
    unhooked = Prices(monkeypatch)
    unhooked.cache.bypass = object()
    for own in (unhooked, Prices(monkeypatch, "cpu")):
        assert not own.steps(2 * SAMPLED_STEPS) and own.cache.meter is None


def test_one_meter_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Prices(monkeypatch)
    meter: Any = own.prices.listen()
    assert own.cache.meter is meter
    assert own.prices.take() is meter and own.cache.meter is None
    assert own.prices.take() is None
    own.prices.price_regions(None)
    assert own.prices.costs == HostCosts(region_ms=PROBED_MS)
    own.prices.price_regions(meter)
    assert own.prices.costs == HostCosts(region_ms=SAMPLED_MS)

"""The probe of what copies cost compute (observe/contention.py)."""

import itertools
import random
import statistics
from dataclasses import replace
from operator import mul

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssdtrain.curves import COPY_SLOWDOWN
from ssdtrain.observe import contention as module
from ssdtrain.observe.contention import (
    ASSUMED,
    COVER,
    Contention,
    believed,
    event_ms,
    measure,
    measured,
)
from ssdtrain.observe.links import fitted_links
from ssdtrain.rebuild.clock import Clock
from ssdtrain.transfer.device import Copy, CpuDevice, MemoryLevel
from ssdtrain.transfer.pinned import PinnedPool

COPIES = [Copy(True, 1000, 1.0), Copy(False, 1000, 1.0)]


class Measured(CpuDevice):
    """A CPU that has an allocator to ask, as a GPU has."""

    def memory(self) -> MemoryLevel:  # type: ignore[override]
        return MemoryLevel(0, 0, 0, 0)


def test_the_median_of_paired_ratios_counts() -> None:
    exact = measured([1.004, 1.003, 1.005, 1.004])
    assert exact is not None and exact.value == pytest.approx(0.004)
    assert 0.0 < exact.error < 0.0015
    faster = measured([0.999, 1.0, 0.998, 1.0])
    assert faster is not None and faster.value == pytest.approx(-0.0005), "signed"
    assert measured([1.004, 1.004, 1.004]) is None, "too few"
    assert believed([[1.004] * 3, []]) == ASSUMED == believed([])


@pytest.mark.parametrize(
    "ratios",
    [[1.02, 1.0, 1.03, 1.01], [1.0, 1.06, 0.97, 1.05, 1.02, 1.0]],
    ids=["few", "steps that jitter"],
)
def test_noise_is_no_measurement(ratios: list[float]) -> None:
    found = believed([ratios, ratios])
    assert found.value == pytest.approx(ASSUMED.value, abs=0.001)
    contention = Contention(found.value, None, found.error)
    assert contention.how == Contention().how == "assumed"


def drawn(draw: random.Random, slowdown: float, noise: float) -> list[float]:
    """Ratios as the probe makes them, of runs that differ by `noise`."""
    alone = [draw.gauss(1.0, noise) for _ in range(module.NUM_ROUNDS + 1)]
    beside = [draw.gauss(1.0 + slowdown, noise) for _ in range(module.NUM_ROUNDS)]
    pairs = zip(beside, alone, alone[1:], strict=False)
    return [2.0 * run / (before + after) for run, before, after in pairs]


@pytest.mark.parametrize(
    ("slowdown", "noise", "within"),
    [
        (0.004, 0.01, 0.002),
        (0.004, 0.03, 0.002),
        (0.004, 0.001, 0.001),
        (0.0, 0.0005, 0.001),
        (0.015, 0.0005, 0.002),
        (0.0, 0.03, 0.0055),
    ],
)
def test_simulated_noise_moves_the_estimate_little(
    slowdown: float, noise: float, within: float
) -> None:
    draw, near, num = random.Random(0), 0, 2000
    for _ in range(num):
        found = believed([drawn(draw, slowdown, noise) for _ in range(2)])
        near += abs(found.value - slowdown) <= within
    assert near >= 0.95 * num


@given(
    st.lists(st.floats(0.9, 1.1), min_size=4, max_size=8),
    st.lists(st.floats(0.9, 1.1), min_size=4, max_size=8),
)
def test_an_estimate_lies_between_what_is_known_and_what_was_seen(
    out: list[float], into: list[float]
) -> None:
    found = believed([out, into])
    seen = statistics.fmean([statistics.median(out), statistics.median(into)]) - 1.0
    low, high = sorted((ASSUMED.value, seen))
    assert max(0.0, low) - 1e-12 <= found.value <= max(0.0, high) + 1e-12
    assert 0.0 <= found.error <= ASSUMED.error


def test_a_quiet_device_is_measured() -> None:
    draw = random.Random(1)
    found = believed([drawn(draw, 0.008, 0.0005) for _ in range(2)])
    assert Contention(found.value, 0.0, found.error).how == "measured"


class Paced:
    """A clock of a device whose products take 0.5 ms, and drift by 1 % a run.

    Beside copies they take `slowdown` more.
    """

    def __init__(self, slowdown: float) -> None:
        self.ms = 0.0
        self.speed = 0.5
        self.slowdown = slowdown
        self.copying = False

    def now(self) -> float:
        return self.ms

    def ms_between(self, start: float, end: float) -> float:
        self.speed *= 1.01
        return end - start

    def multiply(self) -> None:
        self.ms += self.speed * (1.0 + self.slowdown * self.copying)


class Copying:
    """Copies that last until somebody waits for them."""

    def __init__(self, clock: Paced) -> None:
        self.clock = clock

    def query(self) -> bool:
        return not self.clock.copying

    def synchronize(self) -> None:
        self.clock.copying = False


@pytest.mark.parametrize("slowdown", [0.0, 0.004, 0.02])
def test_a_drifting_clock_cancels(
    slowdown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Paced(slowdown)
    probe = object.__new__(module._Probe)
    probe._clock = clock  # type: ignore[assignment]
    probe._last = Copying(clock)
    probe._num_products = 20
    monkeypatch.setattr(probe, "_multiply", clock.multiply)
    monkeypatch.setattr(probe, "_copy_ms", lambda issue: 0.3)
    issued: list[int] = []

    def issue(num: int) -> None:
        issued.append(num)
        clock.copying = True

    found = measured(probe._ratios(issue))
    assert found is not None
    assert found.value == pytest.approx(slowdown, abs=1e-4)
    assert len(issued) == module.NUM_ROUNDS
    assert all(0.3 * num > 10.0 * COVER for num in issued)
    monkeypatch.setattr(Copying, "query", lambda self: True)
    assert measured(probe._ratios(issue)) is None  # the copies ended too early


@pytest.mark.parametrize(
    ("cost_ms", "found"), [(0.005, 0.005), (0.0, 0.0), (5.0, module.MOST_EVENT_MS)]
)
def test_what_an_event_costs_compute(cost_ms: float, found: float) -> None:
    """On a device that gets slower by 1 % from run to run."""
    run_ms = itertools.accumulate(itertools.repeat(1.01), mul, initial=10.0)

    def run(num_events: int) -> float:
        return next(run_ms) + num_events * cost_ms

    assert event_ms(run) == pytest.approx(found, abs=1e-4)
    links = fitted_links(COPIES, None, Contention(event_ms=cost_ms))
    assert links is not None and links.event_ms == cost_ms


def test_a_device_without_an_allocator_is_not_probed() -> None:
    device = CpuDevice()
    pool = PinnedPool(device, 1 << 26)
    clock = Clock(torch.device("cpu"))
    assert measure(device, pool, clock, COPIES) == Contention()
    device.close()


@pytest.mark.parametrize("cap_bytes", [1 << 26, 1 << 20], ids=["room", "no room"])
def test_the_probe_gives_its_buffers_back(
    cap_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SIDE": 16, "LEAST_MOVED_BYTES": 1, "NUM_ROUNDS": 2}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "PROBE_BYTES", 1 << 20)
    device = Measured()
    pool = PinnedPool(device, cap_bytes)
    found = measure(device, pool, Clock(torch.device("cpu")), COPIES)
    assert pool.used_bytes == 0
    assert (found.duplex_slowdown is None) == (cap_bytes == 1 << 20)
    device.close()


def test_copies_beside_others_are_not_the_rule() -> None:
    alone = [Copy(True, 10**9, 20.0)] * 5
    beside = [Copy(True, 10**9, 40.0)] * 4 + [Copy(True, 10**6, 10.0)] * 20
    links = fitted_links([*beside, *alone], None, Contention())
    assert links is not None
    assert links.d2h.bytes_per_second == pytest.approx(50e9, rel=1e-3)


def test_what_cannot_be_told_is_assumed() -> None:
    links = fitted_links(COPIES, None, Contention())
    assert links is not None and links.copy_slowdown == COPY_SLOWDOWN
    told = fitted_links(COPIES, None, Contention(0.02, 0.07))
    assert told == replace(links, copy_slowdown=0.02, duplex_slowdown=0.07)

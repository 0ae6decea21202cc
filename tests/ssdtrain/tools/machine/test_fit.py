"""Fitted curves against links whose true times are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.tools.machine.fit import fit_corners, fit_curve, level
from ssdtrain.tools.machine.links import Sample

SIZES = [4096 * 2**step for step in range(17)]


def test_an_ideal_link_is_recovered() -> None:
    samples = [Sample(size_bytes=m, seconds=1e-5 + m / 5e10) for m in SIZES]
    curve = fit_curve(samples)
    assert curve.bytes_per_second == pytest.approx(5e10, rel=0.02)
    assert curve.startup_seconds == pytest.approx(1e-5, rel=0.02)
    assert curve.fit_error < 0.1
    # Also between the samples, and beyond them.
    for m in (6000, 100_000, 3_000_000, 50_000_000, 4_000_000_000):
        assert curve.seconds(m) == pytest.approx(1e-5 + m / 5e10, rel=0.12)


def test_a_link_whose_bandwidth_is_a_sigmoid() -> None:
    def rate(m: float) -> float:
        return 10 ** (2.0 / (1 + np.exp(-0.6 * (np.log2(m) - 19.0))) + 8.3)

    samples = [Sample(size_bytes=m, seconds=m / rate(m)) for m in SIZES]
    curve = fit_curve(samples)
    for m in (m * 1.4 for m in SIZES[3:-1]):
        assert curve.seconds(m) == pytest.approx(m / rate(m), rel=0.15)


def test_a_cache_that_flatters_middle_sizes_does_not_set_the_peak() -> None:
    rates = [2e10 if m < 1 << 22 else 8e9 for m in SIZES]
    samples = [
        Sample(size_bytes=m, seconds=1e-6 + m / r)
        for m, r in zip(SIZES, rates, strict=True)
    ]
    assert fit_curve(samples).bytes_per_second == pytest.approx(8e9, rel=0.02)


def test_few_sizes_that_hide_their_startup_time() -> None:
    # As seen on PCIe 5: 1 MiB takes hardly longer than 4 KiB, 8 MiB is linear.
    times = {4096: 17e-6, 65536: 17.6e-6, 1 << 20: 21e-6, 1 << 23: 155e-6}
    curve = fit_curve([Sample(size_bytes=m, seconds=s) for m, s in times.items()])
    assert curve.seconds(1 << 23) == pytest.approx(155e-6, rel=0.15)


def test_one_outlier_does_not_lift_all_larger_sizes() -> None:
    times = [1e-5 + m / 5e10 for m in SIZES]
    times[2] *= 30
    curve = fit_curve(
        [Sample(size_bytes=m, seconds=t) for m, t in zip(SIZES, times, strict=True)]
    )
    assert curve.seconds(SIZES[-1]) == pytest.approx(times[-1], rel=0.05)
    assert curve.fit_error > 0.5, "an outlier must show in the stated error"


def protocols(seed: int) -> list[Sample]:
    """A collective: at every size the fastest of three protocols, each with a latency
    and a rate, measured to 2 %."""
    draw = np.random.default_rng(seed)
    latency = draw.uniform(5e-6, 9e-6)
    ways = [
        (latency, draw.uniform(15e9, 40e9)),
        (latency * 1.6, draw.uniform(90e9, 140e9)),
        (latency * draw.uniform(2.2, 4.0), draw.uniform(250e9, 330e9)),
    ]
    return [
        Sample(
            size_bytes=m,
            seconds=min(s + m / r for s, r in ways) * np.exp(draw.normal(0.0, 0.02)),
        )
        for m in (4096 * 2**step for step in range(18))
    ]


def test_corners_of_changing_protocols() -> None:
    """Half of the sizes predict the others, better than one sigmoid does."""
    errors: dict[str, list[float]] = {"sigmoid": [], "corners": []}
    for seed in range(12):
        samples = protocols(seed)
        for name, fit in (("sigmoid", fit_curve), ("corners", fit_corners)):
            half = fit(samples[::2])
            errors[name] += [
                abs(half.seconds(s.size_bytes) / s.seconds - 1) for s in samples[1::2]
            ]
    found = {name: float(np.mean(each)) for name, each in errors.items()}
    assert found["corners"] < 0.8 * found["sigmoid"] and found["corners"] < 0.04


def test_corners_never_fall_and_go_on_beyond_both_ends() -> None:
    times = [1e-5, 0.9e-5, 1.1e-5, 2e-5, 4e-5, 8e-5]  # the second is noise
    sizes = [2**step for step in range(16, 22)]
    curve = fit_corners(
        [Sample(size_bytes=m, seconds=t) for m, t in zip(sizes, times, strict=True)]
    )
    many = [curve.seconds(m) for m in np.geomspace(1, 2**26, 400)]
    assert np.all(np.diff(many) >= 0)
    assert curve.seconds(1) == curve.startup_seconds == curve.seconds(sizes[0])
    assert curve.seconds(3 * 2**18) == pytest.approx(3e-5)
    rate = (2**26 - 2**21) / (curve.seconds(2**26) - curve.seconds(2**21))
    assert rate == pytest.approx(curve.bytes_per_second)
    assert 0.0 < curve.fit_error < 0.1


@pytest.mark.parametrize(
    "points",
    [[(4096, 1e-5), (8192, 2e-5)], [(1, 1.0), (2, 0.0), (3, 1.0)], [(5, 1.0)] * 3],
)
def test_too_little_to_fit(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="three sizes"):
        fit_curve([Sample(size_bytes=m, seconds=t) for m, t in points])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12))
def test_level_is_the_isotonic_projection(values: list[float]) -> None:
    levelled = level(np.array(values))
    assert np.all(np.diff(levelled) >= -1e-12)
    assert levelled.sum() == pytest.approx(sum(values), abs=1e-9)
    assert level(levelled) == pytest.approx(levelled)
    best = float(((levelled - values) ** 2).sum())
    running = np.maximum.accumulate(values)
    assert best <= float(((running - values) ** 2).sum()) + 1e-9

"""Fitted curves against links whose true times are known."""

import numpy as np
import pytest

from ssdtrain.tools.machine.fit import fit_corners, fit_curve
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

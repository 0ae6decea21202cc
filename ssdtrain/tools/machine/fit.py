"""From samples to a `Curve`: the fit of Lin's Eq. 5.2, with numpy alone.

[Note: variable projection]
The sigmoid is linear in its height and base once steepness and middle are fixed.
So the fit is a search over two numbers with a 2 x 2 least-squares inside, which
needs no start value, no scipy, and cannot diverge. The slope of the bandwidth is
capped at one (twice the bytes, at most twice the bandwidth): a steeper sigmoid
would say that a larger transfer takes less time.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ssdtrain.curves import Curve, Knot, Sigmoid
from ssdtrain.tools.machine.links import Sample

# A time within this fraction of the smallest transfer's still counts as flat, and
# one within 5 % of the line as linear.
FLAT_TOLERANCE = 0.1
LINEAR_TOLERANCE = 0.05
LINEAR_RANGE = 16
"""BW_max comes from the sizes within this factor of the largest."""
MAX_SLOPE = math.log10(2.0)


def fit_curve(samples: Sequence[Sample]) -> Curve:
    """Fit the three-piece curve. Raises ValueError: fewer than three sizes, or a time
    or size that is not positive."""
    ordered = sorted(samples, key=lambda sample: sample.size_bytes)
    sizes = np.array([s.size_bytes for s in ordered], dtype=np.float64)
    times = np.array([s.seconds for s in ordered], dtype=np.float64)
    if len(set(sizes)) < 3 or sizes[0] <= 0 or times.min() <= 0:
        raise ValueError(
            "fit_curve expects at least three sizes with positive bytes and seconds, "
            f"got {[(s.size_bytes, s.seconds) for s in ordered]}"
        )
    times = np.exp(level(np.log(times)))
    startup, peak = _startup_and_peak(sizes, times)
    small, large = _breakpoints(sizes, times, peak)
    middle = (sizes >= small) & (sizes <= large)
    if middle.sum() < 4:  # four unknowns
        middle[:] = True
    rates = sizes[middle] / times[middle]
    sigmoid = _fit_sigmoid(np.log2(sizes[middle]), np.log10(rates))
    draft = Curve(
        startup_seconds=startup,
        bytes_per_second=peak,
        small_bytes=int(small),
        large_bytes=int(large),
        sigmoid=sigmoid,
        fit_error=0.0,
    )
    return _judged(draft, ordered)


def _judged(draft: Curve, samples: Sequence[Sample]) -> Curve:
    errors = [abs(draft.seconds(s.size_bytes) / s.seconds - 1) for s in samples]
    return replace(draft, fit_error=float(max(errors)))


def fit_corners(samples: Sequence[Sample]) -> Curve:
    """Fit a curve that goes straight from one measured size to the next, for times that
    have corners; beyond the largest, on at the rate of `fit_curve`. Raises ValueError:
    as `fit_curve` does."""
    curve = fit_curve(samples)
    by_size: dict[int, list[float]] = {}
    for sample in sorted(samples, key=lambda sample: sample.size_bytes):
        by_size.setdefault(sample.size_bytes, []).append(math.log(sample.seconds))
    means = level(np.array([sum(logs) / len(logs) for logs in by_size.values()]))
    knots = tuple(
        Knot(num_bytes=size, seconds=math.exp(mean))
        for size, mean in zip(by_size, means, strict=True)
    )
    draft = replace(curve, startup_seconds=knots[0].seconds, knots=knots)
    return _judged(draft, samples)


def level(values: np.ndarray) -> np.ndarray:
    """Return the nearest sequence that never falls (pool adjacent violators): link time
    cannot fall as the size grows."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, num_last), (before, num_before) = pools.pop(), pools.pop()
            count = num_last + num_before
            mean = (last * num_last + before * num_before) / count
            pools.append((mean, count))
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])


def _startup_and_peak(sizes: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """t_s, and BW_max as the slope over all bytes of the largest sizes: `t_s + m / BW`
    has the start-up time already, and caches make middle sizes faster than the link."""
    startup = float(times[0])
    large = sizes >= sizes[-1] / LINEAR_RANGE
    spare = np.maximum(times[large] - startup, times[large] * 1e-3)
    return startup, float(sizes[large].sum() / spare.sum())


def _breakpoints(
    sizes: np.ndarray, times: np.ndarray, peak: float
) -> tuple[float, float]:
    """m1: last size of the flat piece. m2: first size from which all are full."""
    flat = np.flatnonzero(times <= (1 + FLAT_TOLERANCE) * times[0])
    small = sizes[flat[-1]]
    line = times[0] + sizes / peak
    off = np.flatnonzero(np.abs(line - times) > LINEAR_TOLERANCE * times)
    large = sizes[min(off[-1] + 1, len(sizes) - 1)] if len(off) else small
    return float(small), float(max(small, large))


def _fit_sigmoid(x: np.ndarray, y: np.ndarray) -> Sigmoid:
    """Least squares over (steepness, middle), refined twice. See the Note above."""
    steep_low, steep_high = 0.05, 3.0
    mid_low, mid_high = float(x[0]) - 4.0, float(x[-1]) + 4.0
    best = (math.inf, 1.0, float(x.mean()), 0.0, float(y.mean()))
    for _ in range(4):
        for steep in np.geomspace(steep_low, steep_high, 24):
            for middle in np.linspace(mid_low, mid_high, 33):
                best = min(best, _project(x, y, float(steep), float(middle)))
        steep_low, steep_high = best[1] / 1.3, best[1] * 1.3
        width = (mid_high - mid_low) / 12
        mid_low, mid_high = best[2] - width, best[2] + width
    _, steepness, middle, height, base = best
    return Sigmoid(height=height, steepness=steepness, middle=middle, base=base)


def _project(
    x: np.ndarray, y: np.ndarray, steep: float, middle: float
) -> tuple[float, float, float, float, float]:
    """(squared error, steepness, middle, height, base) of the best height, base."""
    s = 1.0 / (1.0 + np.exp(-steep * (x - middle)))
    spread = s - s.mean()
    norm = float(spread @ spread)
    height = float(spread @ (y - y.mean())) / norm if norm > 1e-12 else 0.0
    height = min(height, 4 * MAX_SLOPE / steep)
    base = float(y.mean() - height * s.mean())
    error = y - height * s - base
    return float(error @ error), steep, middle, height, base

"""The request model against the published counts and equations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydirect.coalesce import (
    LINE_BYTES,
    Access,
    header_share,
    indexed_loads,
    requests_of,
    row_requests,
    traversal_requests,
)

RANDOM = np.random.default_rng(0)


def sizes(access: Access) -> list[int]:
    """Row 1 of a table of 480-byte rows, as the first of a result."""
    warps, elements = indexed_loads(np.array([1]), 120, access)
    return [size for _, size in requests_of(warps, elements * 4)]


def test_row_of_480_bytes_takes_8_requests_and_5_shifted() -> None:
    assert sizes(Access.INDEXED) == [32, 96, 32, 96, 32, 96, 32, 64]
    assert sizes(Access.SHIFTED) == [128, 128, 128, 32, 64]


@pytest.mark.parametrize(
    ("row_bytes", "indexed", "shifted"),
    [
        (1024, (8, 8), (8, 8)),
        (1028, (16.5, 17.1), (10.1, 10.6)),
        (1036, (16.5, 17.1), (10.1, 10.6)),
        (1044, (16.5, 17.1), (10.1, 10.6)),
        (2312, (35.6, 36.6), (20.0, 20.6)),
    ],
)
def test_requests_a_row_of_random_gathers(
    row_bytes: int, indexed: tuple[float, float], shifted: tuple[float, float]
) -> None:
    rows = RANDOM.integers(0, 10**6, 1000)
    for access, (low, high) in ((Access.INDEXED, indexed), (Access.SHIFTED, shifted)):
        found = row_requests(rows, row_bytes, access)
        assert low <= found.total / len(rows) <= high
        assert found.useful_bytes == len(rows) * row_bytes


def test_wire_efficiency_ranks_the_kernels() -> None:
    rows = RANDOM.integers(0, 10**6, 1000)
    whole = row_requests(rows, 1024, Access.INDEXED).wire_efficiency
    for row_bytes in (1028, 1036, 1044):
        naive = row_requests(rows, row_bytes, Access.INDEXED).wire_efficiency / whole
        shifted = row_requests(rows, row_bytes, Access.SHIFTED).wire_efficiency / whole
        aligned = row_requests(rows, row_bytes, Access.ALIGNED).wire_efficiency / whole
        assert 0.70 < naive < 0.82 and 0.88 < shifted < 0.95
        assert shifted < aligned <= 1


def degrees(kind: str) -> np.ndarray:
    if kind == "poisson 32":
        return RANDOM.poisson(32, 50_000)
    if kind == "constant 71":
        return np.full(50_000, 71)
    sigma = 0.8
    mean = np.log(222) - sigma**2 / 2
    return np.rint(RANDOM.lognormal(mean, sigma, 30_000)).astype(np.int64)


@pytest.mark.parametrize(
    ("kind", "merged", "aligned", "fewer"),
    [
        ("poisson 32", 0.39, 0.49, 0.125),
        ("constant 71", 0.40, 0.72, 0.26),
        ("lognormal 222", 0.465, 0.90, 0.288),
    ],
)
def test_traversal_shares_of_whole_lines(
    kind: str, merged: float, aligned: float, fewer: float
) -> None:
    """EMOGI's counters: GAP-urand, a graph of the mean degree, MOLIERE_2016."""
    offsets = np.concatenate([[0], np.cumsum(degrees(kind))])
    plain = traversal_requests(offsets, Access.MERGED)
    better = traversal_requests(offsets, Access.ALIGNED)
    assert plain.full_share == pytest.approx(merged, abs=0.01)
    assert better.full_share == pytest.approx(aligned, abs=0.015)
    assert 1 - better.total / plain.total == pytest.approx(fewer, abs=0.006)
    assert better.moved_bytes / better.useful_bytes < 1.10


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    width=st.integers(1, 150),
    access=st.sampled_from([Access.INDEXED, Access.SHIFTED]),
)
def test_the_shift_is_a_permutation_inside_each_row(
    rows: list[int], width: int, access: Access
) -> None:
    warps, elements = indexed_loads(np.array(rows), width, access)
    assert (np.diff(warps) >= 0).all()
    for number, row in enumerate(rows):
        part = elements[number * width : (number + 1) * width]
        assert sorted(part) == list(range(row * width, (row + 1) * width))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    words=st.integers(1, 80),
    access=st.sampled_from([Access.MERGED, Access.ALIGNED]),
)
def test_interval_counts_equal_load_by_load_counts(
    rows: list[int], words: int, access: Access
) -> None:
    loads: list[tuple[int, int]] = []
    warp = 0
    for row in rows:
        begin, end = row * words, (row + 1) * words
        start = begin - begin % 32 if access is Access.ALIGNED else begin
        for first in range(start, end, 32):
            span = range(max(begin, first), min(first + 32, end))
            loads += [(warp, 4 * i) for i in span]
            warp += 1
    pairs = np.array(loads)
    slow = [size for _, size in requests_of(pairs[:, 0], pairs[:, 1])]
    fast = row_requests(np.array(rows), 4 * words, access)
    assert fast.counts == tuple(slow.count(32 * k) for k in (1, 2, 3, 4))
    assert fast.moved_bytes == sum(slow)


def test_headers_take_a_third_of_small_requests() -> None:
    assert header_share(32) == pytest.approx(0.36, abs=0.001)
    assert header_share(LINE_BYTES) == pytest.approx(0.123, abs=0.001)


def test_errors() -> None:
    with pytest.raises(ValueError, match="a multiple of 4, got 10"):
        row_requests(np.array([0]), 10, Access.MERGED)
    with pytest.raises(ValueError, match="one thread"):
        row_requests(np.array([0]), 8, Access.STRIDED)
    with pytest.raises(ValueError, match="merged or aligned"):
        traversal_requests(np.array([0, 3]), Access.SHIFTED)

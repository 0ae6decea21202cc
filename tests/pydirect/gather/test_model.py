"""The chooser's model: what it must say at the ends of its range."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydirect.gather.model import (
    Rates,
    Workload,
    page_ns,
    predict_ms,
    reference_rates,
    touched_pages,
    worth_a_trial,
)
from pydirect.gather.request import Path

GIB = 1 << 30
RATES = Rates(
    link_gbps=51.0,
    dma_gbps=55.0,
    direct_ms=0.02,
    sorted_ms=0.06,
    random_ns=30.0,
    sort_ns=0.1,
    radix_ns=0.6,
    page_ns=((16_384, 18.0), (262_144, 24.0)),
    sync_ms=0.1,
    cpu_ms=0.1,
    cpu_row_ns=2.0,
    cpu_byte_ns=0.045,
    dma_call_us=4.0,
    dma_index_ns=1.0,
)


def work(num: int, row: int, table: int = 16 * GIB, **more: float) -> Workload:
    return Workload(num_indices=num, row_bytes=row, table_bytes=table, **more)


@pytest.mark.parametrize(
    ("workload", "path"),
    [
        # Long rows hide their translations: sorting costs and saves nothing.
        (work(100_000, 16384), Path.DIRECT),
        # Many short rows share pages once they are in order.
        (work(4_000_000, 128), Path.SORTED),
        # A handful is not worth ordering.
        (work(100, 128), Path.DIRECT),
        # Long runs need no kernel: the copy engine is the fastest on the link.
        (work(100_000, 16384, run_rows=20_000.0), Path.DMA),
        # Repeats cross the link once.
        (work(1_000_000, 2048, distinct_share=0.1), Path.SORTED),
    ],
)
def test_choice(workload: Workload, path: Path) -> None:
    assert worth_a_trial(RATES, workload)[0] is path


def test_slow_translation_leaves_short_rows_to_the_cpu() -> None:
    slow = dataclasses.replace(RATES, random_ns=100.0, page_ns=((1, 100.0),))
    assert worth_a_trial(slow, work(200_000, 128))[0] is Path.CPU


# Pinned memory of 16 GiB on an H200: the rates, and milliseconds of each path.
PINNED = dataclasses.replace(
    RATES,
    link_gbps=51.46,
    direct_ms=0.021,
    sorted_ms=0.082,
    random_ns=30.4,
    sort_ns=0.007,
    page_ns=((16_384, 17.8), (65_536, 19.1), (262_144, 24.4)),
    cpu_ms=0.76,
    cpu_row_ns=0.78,
    cpu_byte_ns=0.0369,
)
TAKEN = [
    (1_000_000, 256, {"direct": 32.5, "sorted": 6.49, "cpu": 10.8}),
    (1_000_000, 400, {"direct": 33.6, "sorted": 8.92, "cpu": 17.6}),
    (1_000_000, 4096, {"direct": 80.0, "sorted": 80.1, "cpu": 127.6}),
    (200_000, 128, {"direct": 6.18, "sorted": 3.25, "cpu": 2.10}),
    (200_000, 512, {"direct": 6.87, "sorted": 3.52, "cpu": 3.99}),
    (200_000, 4096, {"direct": 16.1, "sorted": 16.1, "cpu": 25.5}),
    (50_000, 128, {"direct": 1.25, "sorted": 0.78, "cpu": 1.04}),
    (50_000, 2052, {"direct": 2.14, "sorted": 2.26, "cpu": 3.71}),
]


@pytest.mark.parametrize(("num", "row", "taken"), TAKEN)
def test_measured_times_are_foretold(
    num: int, row: int, taken: dict[str, float]
) -> None:
    workload = work(num, row, aligned=row % 32 == 0)
    for path, ms in taken.items():
        assert predict_ms(PINNED, workload, Path(path)) == pytest.approx(ms, rel=0.25)
    best = min(taken, key=taken.__getitem__)
    assert Path(best) in worth_a_trial(PINNED, workload)


@given(num=st.integers(1, 10**7), row=st.integers(1, 1 << 14))
def test_what_is_tried_is_within_reach_of_the_best(num: int, row: int) -> None:
    workload = work(num, row)
    times = {path: predict_ms(RATES, workload, path) for path in Path}
    tried = worth_a_trial(RATES, workload)
    assert times[tried[0]] == min(times.values()) > 0
    assert [times[p] for p in tried] == sorted(times[p] for p in tried)
    for path in Path:
        assert (path in tried) == (times[path] <= 3.0 * times[tried[0]])


def test_small_pages_cost_more_on_larger_tables() -> None:
    """The rates recorded for pinned memory take rows' costs from translation."""
    costs = [reference_rates(n * GIB, large_pages=False).random_ns for n in (1, 4, 16)]
    assert costs == pytest.approx([9.4, 21.0, 29.8], rel=0.06)
    large = reference_rates(16 * GIB, large_pages=True)
    assert large.random_ns < 4 and large.dma_gbps < 20


def test_touched_pages_is_bounded_by_rows_and_pages() -> None:
    few = touched_pages(10, work(10, 1, 16 * GIB))
    assert few == pytest.approx(10, rel=1e-3)
    all_of_them = touched_pages(10**9, work(10**9, 0, 16 * GIB))
    assert all_of_them == pytest.approx(16 * GIB / (1 << 16))


def test_the_cost_of_a_page_lies_between_the_recorded_numbers() -> None:
    costs = ((16_384, 18.0), (65_536, 20.0), (262_144, 25.0))
    rates = dataclasses.replace(RATES, page_ns=costs)
    assert page_ns(rates, 10) == pytest.approx(18.0)
    assert page_ns(rates, 32_768) == pytest.approx(19.0)
    assert page_ns(rates, 10**7) == pytest.approx(25.0)

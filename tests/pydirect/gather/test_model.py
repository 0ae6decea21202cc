"""The chooser's model: what it must say at the ends of its range."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydirect.gather.calibrate import fit_pages, size_class
from pydirect.gather.model import (
    Rates,
    Workload,
    choose_path,
    predict_ms,
    touched_pages,
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
    page_ns=20.0,
    page_bytes=1 << 16,
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
    assert choose_path(RATES, workload) is path


def test_slow_translation_leaves_short_rows_to_the_cpu() -> None:
    slow = dataclasses.replace(RATES, random_ns=100.0, page_ns=100.0)
    assert choose_path(slow, work(200_000, 128)) is Path.CPU


@given(num=st.integers(1, 10**7), row=st.integers(1, 1 << 14))
def test_choice_has_the_least_prediction(num: int, row: int) -> None:
    workload = work(num, row)
    times = {path: predict_ms(RATES, workload, path) for path in Path}
    assert times[choose_path(RATES, workload)] == min(times.values())
    assert min(times.values()) > 0


def test_touched_pages_is_bounded_by_rows_and_pages() -> None:
    few = touched_pages(10, work(10, 1, 16 * GIB), 1 << 16)
    assert few == pytest.approx(10, rel=1e-3)
    all_of_them = touched_pages(10**9, work(10**9, 0, 16 * GIB), 1 << 16)
    assert all_of_them == pytest.approx(16 * GIB / (1 << 16))


@pytest.mark.parametrize("page_bytes", [1 << 14, 1 << 16, 1 << 18])
def test_fit_finds_the_page_that_made_the_times(page_bytes: int) -> None:
    times = {
        n: (touched_pages(n, work(n, 128), page_bytes) * 21.0 + n * 0.1) / 1e6
        for n in (50_000, 200_000, 1_000_000)
    }
    found, cost = fit_pages(times, table_bytes=16 * GIB, sort_ns=0.1)
    assert found == page_bytes
    assert cost == pytest.approx(21.0, rel=1e-3)


def test_size_classes_are_powers_of_two() -> None:
    assert size_class(1) == 0
    assert size_class(16 * GIB) == 8
    assert size_class(16 * GIB + 5) == 8
    assert size_class(48 * GIB) in (9, 10)

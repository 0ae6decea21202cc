"""The translation-reach model against what was measured."""

import pytest

from pydirect.translation import (
    GIB,
    H200_CELLS,
    H200_LINK_GB_S,
    Measured,
    fit_translation,
)

MODEL = fit_translation(H200_CELLS, link_gb_s=H200_LINK_GB_S)


@pytest.mark.parametrize("cell", H200_CELLS, ids=str)
def test_every_measured_cell_within_six_percent(cell: Measured) -> None:
    predicted = MODEL.random_gb_s(cell.row_bytes, cell.table_bytes)
    assert predicted == pytest.approx(cell.gb_s, rel=0.06)


def test_rows_a_second_fall_with_the_table_and_not_with_the_row() -> None:
    for gib, millions in ((1, 106), (4, 47), (16, 33)):
        rate = 1e3 / MODEL.random_row_ns(128, gib * GIB)
        assert rate == pytest.approx(millions, rel=0.06)
    times = [MODEL.random_row_ns(128, gib * GIB) for gib in (1, 2, 4, 8, 16, 48, 480)]
    assert times == sorted(times)
    assert times[-1] < 1.1 * times[-3]  # levels are exhausted: the curve flattens


def test_sorting_restores_the_link() -> None:
    for row_bytes in (128, 512, 1024):
        assert MODEL.sorted_gb_s(row_bytes, 16 * GIB, 4_000_000) == H200_LINK_GB_S
    few = MODEL.sorted_gb_s(128, 16 * GIB, 20_000)
    assert MODEL.random_gb_s(128, 16 * GIB) < few < H200_LINK_GB_S


def test_leave_one_table_out() -> None:
    """Fitted on 1 and 4 GiB with two levels, 16 GiB is predicted within a fourth."""
    seen = [c for c in H200_CELLS if c.table_bytes < 16 * GIB]
    model = fit_translation(seen, link_gb_s=H200_LINK_GB_S, reaches_bytes=(0, GIB))
    for cell in H200_CELLS:
        if cell.table_bytes == 16 * GIB:
            predicted = model.random_gb_s(cell.row_bytes, cell.table_bytes)
            assert predicted == pytest.approx(cell.gb_s, rel=0.30)


def test_costs_are_not_negative_and_few_cells_are_refused() -> None:
    assert all(cost >= 0 for cost in MODEL.miss_ns)
    with pytest.raises(ValueError, match="measure smaller rows"):
        fit_translation(H200_CELLS[-3:], link_gb_s=H200_LINK_GB_S)

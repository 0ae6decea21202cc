"""How much of a forward a device waits, from what its profiler saw."""

import pytest

from recipes.bench.models.idle import MARK, Span, idle_share


def spans(*rows: tuple[str, int, int, int]) -> list[Span]:
    return [Span(*row) for row in rows]


MARKS = spans((MARK, 7, 0, 10), (MARK, 7, 110, 120))


def test_a_device_that_works_all_the_time_waits_for_nothing() -> None:
    assert idle_share([*MARKS, *spans(("gemm", 7, 10, 60), ("gemm", 7, 60, 110))]) == 0


def test_gaps_count_and_other_streams_do_not() -> None:
    other = spans(("gemm", 7, 20, 70), ("Memcpy DtoH", 9, 10, 110))
    assert idle_share([*other, *MARKS]) == pytest.approx(0.5)


def test_kernels_that_overlap_count_once() -> None:
    assert idle_share(
        [*MARKS, *spans(("a", 7, 10, 60), ("b", 7, 20, 60), ("c", 7, 50, 85))]
    ) == pytest.approx(0.25)


def test_the_last_forward_counts_and_nothing_behind_it() -> None:
    later = spans((MARK, 7, 200, 210), ("gemm", 7, 210, 300), (MARK, 7, 310, 320))
    behind = spans(("gemm", 7, 320, 500))
    assert idle_share([*behind, *later, *MARKS]) == pytest.approx(0.1)


@pytest.mark.parametrize("found", [[], MARKS[:1], [*MARKS, *MARKS[:1]]])
def test_forwards_without_marks_are_refused(found: list[Span]) -> None:
    with pytest.raises(ValueError, match="two marks"):
        idle_share(found)

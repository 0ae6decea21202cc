"""Property tests of the slot table against a model: a set of intervals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.storage.base import Slot
from ssdtrain.storage.slots import FreeSpace, SlotTable, round_up

PAGE = 4096
# A program: sizes to take, mixed with "free the n-th live slot".
PROGRAMS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 40 * PAGE)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
    ),
    max_size=120,
)


def take(table: SlotTable, num_bytes: int, extent_bytes: int = 64 * PAGE) -> Slot:
    """As a storage does it: least used file, grown when nothing fits."""
    capacity = table.capacity_for(num_bytes)
    file = table.by_use()[0]
    slot = table.take(file, capacity)
    if slot is None:
        missing = table.missing_bytes(file, capacity)
        table.extend(file, round_up(missing, extent_bytes))
        slot = table.take(file, capacity)
    assert slot is not None
    return slot


def run(table: SlotTable, program: list[tuple[str, int]]) -> list[Slot]:
    live: list[Slot] = []
    for what, number in program:
        if what == "take":
            live.append(take(table, number))
        elif live:
            table.give(live.pop(number % len(live)))
    return live


@settings(deadline=None, max_examples=60)
@given(PROGRAMS, st.integers(1, 3))
def test_slots_are_disjoint_and_sums_right(
    program: list[tuple[str, int]], num_files: int
) -> None:
    table = SlotTable()
    for _ in range(num_files):
        table.add_file()
    live = run(table, program)
    for file in range(num_files):
        ends = 0
        for slot in sorted(s for s in live if s.file == file):
            assert slot.offset >= ends
            ends = slot.offset + slot.capacity_bytes
    assert table.used_bytes == sum(s.capacity_bytes for s in live)
    assert table.num_slots == len(live)
    for slot in live:
        table.give(slot)
    assert table.used_bytes == 0
    # All neighbours joined: one free block a file, as long as the file.
    for space in table.files:
        assert space.num_blocks <= 1
        assert space.free_bytes == space.end_bytes


@settings(deadline=None, max_examples=40)
@given(PROGRAMS)
def test_repeating_a_step_grows_nothing(program: list[tuple[str, int]]) -> None:
    table = SlotTable()
    table.add_file()
    held = []
    for _ in range(3):
        for slot in run(table, program):
            table.give(slot)
        held.append(table.allocated_bytes)
    assert held[0] == held[1] == held[2]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=60),
    st.randoms(use_true_random=False),
)
def test_neighbours_join_in_any_order(sizes: list[int], random: object) -> None:
    space = FreeSpace()
    space.extend(sum(sizes))
    starts = [space.take(size) for size in sizes]
    assert space.num_blocks == 0
    blocks = list(zip(starts, sizes, strict=True))
    random.shuffle(blocks)  # type: ignore[attr-defined]
    for start, size in blocks:
        assert start is not None
        space.give(start, size)
    assert space.num_blocks == 1
    assert space.take(sum(sizes)) == 0


def test_best_fit_takes_the_smallest_block_that_fits() -> None:
    space = FreeSpace()
    space.extend(100)
    starts = {size: space.take(size) for size in (30, 1, 12, 2, 20, 3)}
    for size in (30, 12, 20):
        space.give(starts[size], size)  # type: ignore[arg-type]
    assert space.take(11) == starts[12]
    assert space.take(20) == starts[20]
    assert space.take(25) == starts[30]
    assert space.take(50) is None


def test_growth_uses_the_free_tail() -> None:
    table = SlotTable()
    table.add_file(10 * PAGE)
    kept = table.take(0, 4 * PAGE)
    assert kept is not None
    assert table.missing_bytes(0, 6 * PAGE) == 0
    assert table.missing_bytes(0, 9 * PAGE) == 3 * PAGE


def test_files_alternate() -> None:
    table = SlotTable()
    for _ in range(3):
        table.add_file()
    assert [take(table, PAGE).file for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte, got 0"):
        SlotTable().capacity_for(0)

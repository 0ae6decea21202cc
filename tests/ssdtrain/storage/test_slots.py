"""Property tests of the slot table against a model: a set of intervals."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.storage.base import Slot
from ssdtrain.storage.slots import SlotTable, round_up

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
    """As a storage does it: grown when nothing fits."""
    capacity = round_up(num_bytes)
    slot = table.take(capacity)
    if slot is None:
        table.extend(round_up(table.missing_bytes(capacity), extent_bytes))
        slot = table.take(capacity)
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


def of_length(num_bytes: int) -> SlotTable:
    table = SlotTable()
    table.extend(num_bytes)
    return table


@settings(deadline=None, max_examples=60)
@given(PROGRAMS)
def test_slots_are_disjoint_and_sums_right(program: list[tuple[str, int]]) -> None:
    table = SlotTable()
    live = run(table, program)
    ends = 0
    for slot in sorted(live):
        assert slot.offset >= ends
        ends = slot.offset + slot.capacity_bytes
    assert ends <= table.end_bytes
    assert table.used_bytes == sum(s.capacity_bytes for s in live)
    for slot in live:
        table.give(slot)
    assert table.used_bytes == 0
    # All neighbours joined: one free block, as long as the file.
    assert table.num_free_blocks <= 1
    if table.end_bytes:
        assert table.take(table.end_bytes) == Slot(0, 0, table.end_bytes)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=60),
    st.randoms(use_true_random=False),
)
def test_neighbours_join_in_any_order(sizes: list[int], random: object) -> None:
    table = of_length(sum(sizes))
    slots = [table.take(size) for size in sizes]
    assert table.num_free_blocks == 0
    random.shuffle(slots)  # type: ignore[attr-defined]
    for slot in slots:
        assert slot is not None
        table.give(slot)
    assert table.num_free_blocks == 1
    assert table.take(sum(sizes)) == Slot(0, 0, sum(sizes))


def test_best_fit_takes_the_smallest_block_that_fits() -> None:
    table = of_length(100)
    slots = {size: table.take(size) for size in (30, 1, 12, 2, 20, 3)}
    for size in (30, 12, 20):
        slot = slots[size]
        assert slot is not None
        table.give(slot)
    for size, home in ((11, 12), (20, 20), (25, 30)):
        found, expected = table.take(size), slots[home]
        assert found is not None and expected is not None
        assert found.offset == expected.offset
    assert table.take(50) is None


def test_growth_uses_the_free_tail() -> None:
    table = of_length(10 * PAGE)
    assert table.take(4 * PAGE) is not None
    assert table.missing_bytes(6 * PAGE) == 0
    assert table.missing_bytes(9 * PAGE) == 3 * PAGE

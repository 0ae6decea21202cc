"""Held steps in parts: how long they are, how many, and what they tell together."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ssdtrain.observe.heldparts import (
    LEAST_OF_STEP,
    MOST_OF_STEP,
    MOST_PARTS,
    HeldLooks,
    dealt,
    room_ms,
    together,
)
from ssdtrain.observe.paced import HOLD_FACTOR, HOLD_MS
from ssdtrain.plan.calibrate import Pace, Segment

NUM_OPERATORS = 10
"""Of a segment, launched one after the other."""
OWN_MS = tuple(0.2 + 0.1 * (number % 5) for number in range(120))
"""Of segments, on the device."""
HOST_MS = tuple(0.9 + 0.3 * (number % 4) for number in range(120))


def run(
    holds_ms: Mapping[int, float],
    own_ms: tuple[float, ...] = OWN_MS,
    host_ms: tuple[float, ...] = HOST_MS,
) -> tuple[Pace, float]:
    """A step on a device beside its host: what it tells, and how long it takes."""
    host = ready = 0.0
    came, begins = [], []
    for mark, (own, launches) in enumerate(zip(own_ms, host_ms, strict=True)):
        came.append(max(ready, host))
        ready = came[-1] + holds_ms.get(mark, 0.0)
        begins.append(ready)
        for _ in range(NUM_OPERATORS):
            host += launches / NUM_OPERATORS
            ready = max(ready, host) + own / NUM_OPERATORS
    came.append(max(ready, host))
    segments = tuple(
        Segment(start=mark, ms=after - begun, host_ms=launches)
        for mark, (begun, after, launches) in enumerate(
            zip(begins, came[1:], host_ms, strict=True)
        )
    )
    pace = Pace(
        num_marks=len(own_ms),
        head_ms=1.0,
        head_host_ms=1.0,
        segments=segments,
        end=len(own_ms),
    )
    return pace, came[-1]


def holds_of(pace: Pace) -> dict[int, float]:
    return {each.start: HOLD_MS + HOLD_FACTOR * each.host_ms for each in pace.segments}


def test_parts_tell_what_one_long_step_would() -> None:
    """A host that bounds the step: held at every look it takes nearly twice as long.
    Each part takes no more than it may, and together they know every segment."""
    before, plain_ms = run({})
    assert plain_ms > 1.5 * sum(OWN_MS)
    whole, whole_ms = run(holds_of(before))
    assert whole_ms > MOST_OF_STEP * plain_ms
    parts = dealt(holds_of(before), room_ms(plain_ms, plain_ms))
    assert 1 < len(parts) <= MOST_PARTS
    assert sorted(mark for part in parts for mark in part) == list(range(len(OWN_MS)))
    told = []
    for part in parts:
        pace, part_ms = run(part)
        assert part_ms <= MOST_OF_STEP * plain_ms < 2.0 * plain_ms
        assert max(each.ms for each in pace.segments) > max(OWN_MS), "some are not held"
        told.append(HeldLooks(part, pace))
    found = together(before, told)
    assert found is not None
    for both in (found, whole):
        assert [each.ms for each in both.segments] == pytest.approx(OWN_MS)


def test_waits_are_dealt_in_turn() -> None:
    """The host comes up between two of them."""
    parts = dealt(dict.fromkeys(range(9), 1.0), 3.0)
    assert [list(part) for part in parts] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize("most_ms", [0.0, 0.5, 1.0, 2.5, 10.0, 1e9])
def test_no_part_waits_for_longer_and_there_are_few(most_ms: float) -> None:
    holds_ms = {mark: 1.0 + mark % 7 for mark in range(100)}
    parts = dealt(holds_ms, most_ms)
    assert len(parts) <= MOST_PARTS
    assert all(0.0 < sum(part.values()) <= most_ms for part in parts)
    every = [each for part in parts for each in part.items()]
    assert len(every) == len(dict(every)) and set(every) <= set(holds_ms.items())
    assert (len(every) == len(holds_ms)) == (most_ms == 1e9)


def test_one_long_wait_makes_no_further_steps() -> None:
    """It would find no room in them either."""
    assert dealt({0: 1.0, 1: 9.0, 2: 1.0}, 2.0) == [{0: 1.0, 2: 1.0}]


def test_hooks_take_some_of_the_room() -> None:
    assert room_ms(100.0, 90.0) == pytest.approx(100.0 * (MOST_OF_STEP - 1))
    assert room_ms(100.0, 120.0) == pytest.approx(100.0 * MOST_OF_STEP - 120.0)
    assert room_ms(100.0, 300.0) == pytest.approx(100.0 * LEAST_OF_STEP)


def test_what_no_part_held_takes_as_much_less_as_usual() -> None:
    """Its launches are not read as the device's time."""
    before, _ = run({}, (1.0,) * 4, (4.0,) * 4)
    part = {0: 7.0, 2: 7.0}
    pace, _ = run(part, (1.0,) * 4, (4.0,) * 4)
    later = replace(pace, head_ms=0.25)
    found = together(before, [HeldLooks(part, pace), HeldLooks({}, later)])
    assert found is not None and found.head_ms == 0.25
    first, second, third, last = (each.ms for each in found.segments)
    assert (first, third) == (pytest.approx(1.0), pytest.approx(1.0))
    usual = sorted([1.0 / before.segments[n].ms for n in (0, 2)])
    assert second == pytest.approx(sum(usual) / 2 * before.segments[1].ms)
    assert last < 0.5 * before.segments[3].ms


def test_nothing_that_was_held_tells_nothing() -> None:
    pace, _ = run({})
    assert together(pace, []) is None
    assert together(pace, [HeldLooks({}, pace)]) is None

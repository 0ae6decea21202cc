"""A profile of a model with more layers, from one with a few: layers that repeat save
the same tensors and take the same time. Seconds instead of minutes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ssdtrain.plan.profile import Item, Mark, Phase, Profile, RegionRun

NONE = -1


class Repeated(NamedTuple):
    """Region calls that are repeated."""

    first: int
    """The first of them."""
    length: int
    """How many of them are one period."""
    times: int
    """How often the period comes more than once."""
    weight_bytes: int
    """Gradients that the period's backward makes; 0: they are there before the step."""


def deeper(profile: Profile, by: Repeated) -> Profile:
    """Return the profile of one lane with a period of its region calls repeated;
    weights, optimizer and update are unchanged: the caller knows them."""
    [kind] = profile.lanes
    items, runs = profile.kinds[kind], profile.regions[kind]
    call_of = _calls_of(items, runs)
    forward = [mark for mark in profile.marks if mark.phase is Phase.FORWARD]
    packed = [(mark.item, call_of[mark.item]) for mark in forward]
    groups = _grouped([call for _, call in packed], by)
    numbers: dict[tuple[int, int], int] = {}
    marks: list[Mark] = []
    for at, copy in groups:
        item = forward[at].item
        number = numbers.setdefault((item, copy), len(numbers))
        marks.append(replace(forward[at], item=number))
    order = sorted(numbers, key=numbers.__getitem__)
    calls = _grouped(range(len(runs)), by)
    call_number = {place: number for number, place in enumerate(calls)}

    def placed(item: int, copy: int) -> int:
        return numbers.get((item, copy), numbers[(item, 0)])

    def of_call(call: int, copy: int) -> int:
        return NONE if call == NONE else call_number[(call, copy)]

    new_items = tuple(
        replace(
            items[item],
            inputs=tuple(placed(each, copy) for each in items[item].inputs),
            region=of_call(items[item].region, copy),
            serves=of_call(items[item].serves, copy),
        )
        for item, copy in order
    )
    backward = [mark for mark in profile.marks if mark.phase is Phase.BACKWARD]
    where = _in_backward(backward, call_of, items)
    for at, copy in _grouped(where, by, reverse=True):
        mark = backward[at]
        other = mark.other_bytes + by.weight_bytes * _behind(where[at], copy, by)
        marks.append(replace(mark, item=placed(mark.item, copy), other_bytes=other))
    new_runs = tuple(
        replace(
            runs[call],
            inputs=tuple(placed(each, copy) for each in runs[call].inputs),
            other_bytes=runs[call].other_bytes
            + by.weight_bytes * _behind(call, copy, by),
            parts=tuple(
                replace(part, items=tuple(placed(each, copy) for each in part.items))
                for part in runs[call].parts
            ),
        )
        for call, copy in calls
    )
    return replace(
        profile, kinds={kind: new_items}, regions={kind: new_runs}, marks=tuple(marks)
    )


def raised(profile: Profile, first: int, num_bytes: int) -> Profile:
    """Return the profile of one lane with so many bytes more in use in the backward of
    a region's call and of those before it. `first`: its number; negative: from the end.
    """
    [kind] = profile.lanes
    items, runs = profile.kinds[kind], profile.regions[kind]
    first = range(len(runs))[max(first, -len(runs))]
    call_of = _calls_of(items, runs)
    inside = [
        at
        for at, mark in enumerate(profile.marks)
        if mark.phase is Phase.BACKWARD and NONE < call_of[mark.item] <= first
    ]
    late = range(min(inside), max(inside) + 1) if inside else range(0)

    def more(one: Mark | RegionRun, is_late: bool) -> Any:
        extra = num_bytes if is_late else 0
        return replace(one, other_bytes=one.other_bytes + extra)

    return replace(
        profile,
        marks=tuple(more(mark, at in late) for at, mark in enumerate(profile.marks)),
        regions={kind: tuple(more(run, at <= first) for at, run in enumerate(runs))},
    )


def _behind(call: int, copy: int, by: Repeated) -> int:
    """Return how many further copies of the period have ended in backward."""
    if call >= by.first + by.length or call == NONE:
        return 0
    return by.times - copy if call >= by.first else by.times


def _calls_of(items: Sequence[Item], runs: Sequence[RegionRun]) -> list[int]:
    """Return in which call each item is packed; NONE: outside of all."""
    found = [max(item.region, item.serves) for item in items]
    for number, run in enumerate(runs):
        for item in run.inputs:
            shared = sum(item in other.inputs for other in runs) > 1
            if found[item] == NONE and not shared:
                found[item] = number
    return found


def _in_backward(
    marks: Sequence[Mark], call_of: Sequence[int], items: Sequence[Item]
) -> list[int]:
    """Return the call of each mark of backward: what several calls read belongs to the
    one that runs."""
    last_pack = max((at for at, call in enumerate(call_of) if call != NONE), default=0)
    found: list[int] = []
    now = NONE
    for mark in marks:
        call = call_of[mark.item]
        if call != NONE:
            now = call
        elif mark.item > last_pack:
            now = NONE
        found.append(now)
    return found


def _grouped(
    calls: Sequence[int], by: Repeated, *, reverse: bool = False
) -> list[tuple[int, int]]:
    """Return (place, copy) of a sequence in which the period is repeated."""
    inside = [
        at for at, call in enumerate(calls) if by.first <= call < by.first + by.length
    ]
    if not inside:
        return [(at, 0) for at in range(len(calls))]
    start, end = min(inside), max(inside) + 1
    copies = range(by.times + 1)
    order = copies[::-1] if reverse else copies
    middle = [(at, copy) for copy in order for at in range(start, end)]
    before, after = range(start), range(end, len(calls))
    return [*((at, 0) for at in before), *middle, *((at, 0) for at in after)]


def calls_of(num_calls: int, by: Repeated) -> list[int]:
    """Return the number of the call that each call of the deeper model is like."""
    return [call for call, _ in _grouped(range(num_calls), by)]

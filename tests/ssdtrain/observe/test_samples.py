"""Which tensors are rebuilt to learn what all rebuilds take."""

from collections import Counter
from dataclasses import replace

import pytest

from ssdtrain.observe.samples import (
    MOST_PARTS,
    NUM_REGIONS,
    NUM_SAMPLES,
    Sample,
    Sampling,
    samplings,
)
from ssdtrain.plan.profile import Item, Profile
from tests.ssdtrain.plan.profiles import chain

KEYS = ("a", "b", "c")


def profile_of(*items: Item, num_lanes: int = 1) -> Profile:
    lanes = ("model/0",) * num_lanes
    return replace(chain(2), lanes=lanes, kinds={"model/0": items}, marks=())


def samples(profile: Profile, least_bytes: int, most: int) -> list[list[Sample]]:
    """Of each step."""
    return [sorted(part.samples) for part in samplings(profile, least_bytes, most)]


def layers(num_layers: int) -> Profile:
    """Of each layer, three tensors that recipes make, by one name and three sizes, and
    one of the same name and size as the first that none makes."""
    own = [
        Item(name="Mul", num_bytes=8 << number, recipe=key, recipe_ms=1.0)
        for number, key in enumerate(KEYS)
    ]
    return profile_of(*[Item(name="Mul", num_bytes=8), *own] * num_layers)


def sizes(parts: list[list[Sample]]) -> Counter[int]:
    return Counter(each.num_bytes for part in parts for each in part)


def test_a_few_of_each_recipe_and_size_from_all_over_the_step() -> None:
    (part,) = samples(layers(36), 1, 470)
    assert sizes([part]) == {8: NUM_SAMPLES, 16: NUM_SAMPLES, 32: NUM_SAMPLES}
    turns = [each.turn for each in part if each.num_bytes == 16]
    assert turns == [3, 10, 18, 25, 32]
    # Those of the other name that looks alike are passed by.
    assert all(each.turn % 2 for each in part if each.num_bytes == 8)
    (part,) = samples(layers(2), 1, 470)
    assert sizes([part]) == {8: 2, 16: 2, 32: 2}


@pytest.mark.parametrize("most", range(1, 20))
def test_no_step_rebuilds_more_than_it_has_room_for(most: int) -> None:
    """One of each comes first, and a further step is for one of each alone."""
    parts = samples(layers(36), 1, most)
    assert len(parts) == -(-len(KEYS) // most) <= MOST_PARTS
    assert all(0 < len(part) <= most for part in parts)
    assert set(sizes(parts)) == {8, 16, 32}
    every = [each for part in parts for each in part]
    assert len(set(every)) == len(every)
    assert max(sizes(parts).values()) - min(sizes(parts).values()) <= 1


def test_where_there_is_no_room_for_all_there_are_few_steps() -> None:
    """Those that are many come first."""
    items = [
        Item(name=f"{number}", num_bytes=8, recipe=f"{number}", recipe_ms=1.0)
        for number in range(20)
        for _ in range(1 + number)
    ]
    parts = samples(profile_of(*items), 1, 2)
    assert [len(part) for part in parts] == [2] * MOST_PARTS
    found = {each.name for part in parts for each in part}
    assert found == {"14", "15", "16", "17", "18", "19"}
    assert samples(profile_of(*items), 1, 0) == []
    assert samples(profile_of(Item(name="a", num_bytes=8)), 1, 9) == []


def test_what_is_not_there_or_too_small_is_not_asked_for() -> None:
    """A recipe's own copies and regions' inputs are not saved where neither is."""
    own = Item(name="a", num_bytes=8, recipe="r", recipe_ms=1.0)
    profile = profile_of(own, replace(own, owner=0), replace(own, serves=0), own)
    assert samples(profile, 1, 9) == [[Sample("a", 8, 0), Sample("a", 8, 1)]]
    assert samples(profile, 9, 9) == []


def test_a_tensor_is_known_by_its_turn_among_those_that_look_alike() -> None:
    sampling = Sampling([Sample("a", 8, 1), Sample("b", 8, 0)], ())
    asked = [("a", 8), ("a", 16), ("b", 8), ("a", 8), ("a", 8), ("b", 8)]
    found = [sampling.has(*each) for each in asked]
    assert found == [False, False, True, True, False, False]


def test_they_are_from_a_few_layers() -> None:
    """And from those that alone have one; what lies in no layer has hooks anyway."""
    own = [
        Item(name="a", num_bytes=8, recipe="r", recipe_ms=1.0, region=region)
        for region in range(36)
        for _ in range(2)
    ]
    items = [
        *(replace(own[0], num_bytes=16, region=-1), *own),
        *(replace(own[0], name="b", region=34), replace(own[-1], recipe="s")),
    ]
    (part,) = samplings(profile_of(*items), 1, 99)
    assert part.regions == {6, 18, 30, 35} and len(part.regions) == NUM_REGIONS + 1
    # By name and size alone, as many in the last of these as before it: "s" is there.
    assert part.samples == {
        *(Sample("a", 16, 0), Sample("a", 8, 8)),
        *(Sample("a", 8, turn) for turn in (0, 2, 4, 5, 7)),
    }
    every = range(-1, 36)
    assert {number for number in every if part.may_have(number)} == part.regions
    (part,) = samplings(layers(2), 1, 99)  # of no known region
    assert not part.regions and all(map(part.may_have, every))


def test_turns_go_on_over_the_lanes_of_a_step() -> None:
    own = Item(name="a", num_bytes=8, recipe="r", recipe_ms=1.0)
    (part,) = samples(profile_of(own, num_lanes=3), 1, 9)
    assert [each.turn for each in part] == [0, 1, 2]

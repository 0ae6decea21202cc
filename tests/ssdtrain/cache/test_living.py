"""A set of objects that others own."""

import gc
import weakref

from ssdtrain.cache.living import FEWEST, Living


class Thing:
    pass


def num_references() -> int:
    return sum(type(each) is weakref.ref for each in gc.get_objects())


def test_members_are_those_that_live() -> None:
    things, known = [Thing() for _ in range(3)], Living[Thing]()
    for thing in things:
        known.add(thing)
        known.add(thing)
    assert list(known) == things and all(thing in known for thing in things)
    assert Thing() not in known
    known.discard(things[1])
    known.discard(Thing())
    assert list(known) == [things[0], things[2]]
    del things[2], thing
    gc.collect()
    assert list(known) == [things[0]] and known
    known.clear()
    assert not known and things[0] not in known


def test_one_that_is_gone_is_not_taken_for_another() -> None:
    known, ids = Living[Thing](), set()
    for _ in range(100):  # their addresses are used again
        thing = Thing()
        assert thing not in known
        known.add(thing)
        ids.add(id(thing))
    assert len(ids) < 100


def test_it_stays_small_and_its_members_die_without_python() -> None:
    known, before = Living[Thing](), num_references()
    for _ in range(100 * FEWEST):
        thing = Thing()
        known.add(thing)
        assert all(each.__callback__ is None for each in weakref.getweakrefs(thing))
    assert num_references() - before <= 2 * FEWEST

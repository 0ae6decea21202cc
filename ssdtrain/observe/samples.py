"""Which tensors are rebuilt in a step that asks what rebuilds take.

[Note: sampled rebuilds]
Rebuilds of one recipe and size take as long as one another, so some of them tell of
all. Each costs the step a wait of the device ([Note: held in parts] in heldparts.py).
What is neither moved nor rebuilt costs the host as well, by the general path: a step of
176 ms took 605 where each tensor went that way and 470 were rebuilt. So the samples are
from a few of the model's layers, and the others run without hooks. A tensor is known by
what made it, and by how many like it came before under hooks: its number in the lane is
another one where recipes or regions store less.
(tests/ssdtrain/observe/test_samples.py)
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from ssdtrain.plan.calibrate import rebuild_key
from ssdtrain.plan.profile import Item, Profile

T = TypeVar("T")

NUM_SAMPLES = 5
"""Rebuilds of a recipe and size. Their middle counts."""
NUM_REGIONS = 3
"""Layers that they are from, and those that alone have one."""
MOST_PARTS = 3
"""Steps that have any at most."""


class Sample(NamedTuple):
    """One tensor of a step."""

    name: str
    num_bytes: int
    turn: int
    """Tensors before it of this name and size, in these regions or in none."""


class Sampling:
    """Says of the tensors of one step which ones are among some samples."""

    def __init__(self, samples: Iterable[Sample], regions: Iterable[int]) -> None:
        self.samples, self.regions = frozenset(samples), frozenset(regions)
        self._turns: Counter[tuple[str, int]] = Counter()

    def has(self, name: str, num_bytes: int) -> bool:
        """Return whether the next tensor of this name and size is."""
        turn = self._turns[name, num_bytes]
        self._turns[name, num_bytes] += 1
        return Sample(name, num_bytes, turn) in self.samples

    def may_have(self, region: int) -> bool:
        """Return whether they were chosen of those of this region call; of any, where
        nobody knows which tensors are whose."""
        return not self.regions or region in self.regions


def samplings(profile: Profile, least_bytes: int, most: int) -> list[Sampling]:
    """Return which tensors to rebuild, step by step: one of each recipe and size
    before any other of it, and those first that are many.

    Args:
        profile: of a step like these.
        least_bytes: smaller tensors are not rebuilt.
        most: rebuilds that a step has room for.
    """
    regions = _some_regions(profile, least_bytes)
    every = [_spread(own) for own in _alike(profile, least_bytes, regions)]
    if not every or most < 1:
        return []
    num_parts = min(MOST_PARTS, -(-len(every) // most))
    in_turn = [one for each in zip_longest(*every) for one in each if one is not None]
    chosen = in_turn[: num_parts * most]
    return [Sampling(chosen[number::num_parts], regions) for number in range(num_parts)]


def _saved(profile: Profile) -> Iterator[Item]:
    """Return the tensors of a step that autograd itself saves."""
    for lane in range(len(profile.lanes)):
        for item in profile.items_of(lane):
            if item.owner < 0 and item.serves < 0:
                yield item


def _key_of(item: Item, least_bytes: int) -> str | None:
    """Return what rebuilds like this one are told by; None: nothing rebuilds it."""
    if item.recipe is None or item.num_bytes < least_bytes:
        return None
    return rebuild_key(item.recipe, item.num_bytes)


def _some_regions(profile: Profile, least_bytes: int) -> set[int]:
    """Return some region calls which have all that is rebuilt in any."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for item in _saved(profile):
        key = _key_of(item, least_bytes)
        if key is not None:
            found[key].add(item.region)
    every = sorted({region for own in found.values() for region in own if region >= 0})
    some = set(_spread(every, NUM_REGIONS))
    for own in found.values():
        if not own & {*some, -1}:
            some.add(min(own))
    return some


def _alike(profile: Profile, least_bytes: int, regions: set[int]) -> list[list[Sample]]:
    """Return the tensors of these regions, or of none, that recipes make, by recipe and
    size."""
    turns: Counter[tuple[str, int]] = Counter()
    found: defaultdict[str, list[Sample]] = defaultdict(list)
    for item in _saved(profile):
        if item.region >= 0 and item.region not in regions:
            continue
        what, key = (item.name, item.num_bytes), _key_of(item, least_bytes)
        if key is not None:
            found[key].append(Sample(*what, turns[what]))
        turns[what] += 1
    return sorted(found.values(), key=len, reverse=True)


def _spread(own: list[T], most: int = NUM_SAMPLES) -> list[T]:
    """Return some of them, from all over the step."""
    num = min(len(own), most)
    return [own[(2 * n + 1) * len(own) // (2 * num)] for n in range(num)]

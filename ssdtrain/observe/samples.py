"""Which tensors are rebuilt in a step that asks what rebuilds take.

[Note: sampled rebuilds]
Rebuilds of one recipe and size take as long as one another, so some of them tell of
all. Each costs the step a wait of the device ([Note: held in parts] in heldparts.py),
and to look for its recipe costs the host some more: in other tensors' place nobody
looks for one. A tensor is known by what made it, and by how many like it came before:
its number in the lane is another one where recipes or regions store less.
(tests/ssdtrain/observe/test_samples.py)
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from ssdtrain.plan.calibrate import rebuild_key
from ssdtrain.plan.profile import Profile

NUM_SAMPLES = 5
"""Rebuilds of a recipe and size. Their middle counts."""
MOST_PARTS = 3
"""Steps that have any at most."""


class Sample(NamedTuple):
    """One tensor of a step."""

    name: str
    num_bytes: int
    turn: int
    """Tensors before it of this name and size."""


class Sampling:
    """Says of the tensors of one step which ones are among some samples."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = frozenset(samples)
        self._turns: Counter[tuple[str, int]] = Counter()

    def has(self, name: str, num_bytes: int) -> bool:
        """Return whether the next tensor of this name and size is."""
        turn = self._turns[name, num_bytes]
        self._turns[name, num_bytes] += 1
        return Sample(name, num_bytes, turn) in self._samples


def samples(profile: Profile, least_bytes: int, most: int) -> list[list[Sample]]:
    """Return which tensors to rebuild, step by step: one of each recipe and size
    before any other of it, and those first that are many.

    Args:
        profile: of a step like these.
        least_bytes: smaller tensors are not rebuilt.
        most: rebuilds that a step has room for.
    """
    every = [_spread(own) for own in _alike(profile, least_bytes)]
    if not every or most < 1:
        return []
    num_parts = min(MOST_PARTS, -(-len(every) // most))
    in_turn = [one for each in zip_longest(*every) for one in each if one is not None]
    chosen = in_turn[: num_parts * most]
    return [chosen[number::num_parts] for number in range(num_parts)]


def _alike(profile: Profile, least_bytes: int) -> list[list[Sample]]:
    """Return the tensors that autograd itself saves and recipes make, by recipe and
    size."""
    turns: Counter[tuple[str, int]] = Counter()
    found: defaultdict[str, list[Sample]] = defaultdict(list)
    for lane in range(len(profile.lanes)):
        for item in profile.items_of(lane):
            if item.owner >= 0 or item.serves >= 0:
                continue
            what = item.name, item.num_bytes
            if item.recipe is not None and item.num_bytes >= least_bytes:
                key = rebuild_key(item.recipe, item.num_bytes)
                found[key].append(Sample(*what, turns[what]))
            turns[what] += 1
    return sorted(found.values(), key=len, reverse=True)


def _spread(own: list[Sample]) -> list[Sample]:
    """Return some of them, from all over the step."""
    num = min(len(own), NUM_SAMPLES)
    return [own[(2 * n + 1) * len(own) // (2 * num)] for n in range(num)]

"""What a region call has stored of attention, and what its re-run takes of it.

See [Note: stored attention] in regions/attention.py.
"""

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from ssdtrain.cache.context import CacheContext
from ssdtrain.cache.handles import KeptHandle
from ssdtrain.cache.identity import check_version
from ssdtrain.cache.moved import MovedHandle
from ssdtrain.cache.record import (
    NO_ITEM,
    Handle,
    Kept,
    Lane,
    RecordView,
    item_of,
    part_of,
)
from ssdtrain.cache.rows import KeptItemHandle
from ssdtrain.regions.attention import (
    Attention,
    RerunAttention,
    is_attentions,
    windows_around,
    windows_of,
)


class Spare(NamedTuple):
    """A stored tensor of a region's forward, for its re-run. It keeps nothing alive,
    and its use is none that the plan counts."""

    owner: "weakref.ref[Any]"
    """A handle of autograd's, or the tensor that one keeps."""
    version: int

    @classmethod
    def of(cls, handle: Any) -> "Spare | None":
        """Of a tensor that was just saved; None: it is not stored as it is."""
        if type(handle) is KeptHandle:
            return cls(weakref.ref(handle[0]), handle[1])
        if type(handle) in (KeptItemHandle, MovedHandle):
            return cls(weakref.ref(handle), 0)
        if type(handle) is not Handle:
            return None
        source = handle.source
        if isinstance(source, Kept):
            return cls(weakref.ref(source.tensor), source.version)
        if isinstance(source, RecordView) and source.record.region is None:
            return cls(weakref.ref(handle), 0)
        return None

    def tensor(self, cache: Any) -> Tensor | None:
        """The tensor, brought back if it was moved; None: autograd has let go of it.

        Raises:
            InPlaceError: it was changed after it was saved.
        """
        owner = self.owner()
        if isinstance(owner, Tensor):
            check_version(owner, self.version, "an attention's result")
            return owner
        if type(owner) is KeptItemHandle:
            check_version(owner.tensor, owner.version, owner.row.name)
            return owner.tensor
        if type(owner) is MovedHandle:
            return owner.look()
        if owner is None:
            return None
        source = owner.source
        source.check()
        found: Tensor = source.view.rebuild(cache.moves.fetch(source.record))
        return found


class StoredAttention:
    """The attention calls of one region call, from its forward to its re-runs.

    Args:
        known: what is known of them in the region.
        path: of the region.
        lane: of the call.
    """

    def __init__(
        self, cache: CacheContext, known: Attention, path: str, lane: Lane
    ) -> None:
        self._cache = cache
        self._known = known
        self._path = path
        self._lane = lane
        self._spares: dict[int, Spare] = {}
        """Results that are stored, by place."""
        self._items: dict[int, int] = {}
        """In the observed step: of what has a record or is small, by place."""
        self._outputs: list[int] = []
        """The same: places of what an attention operator made."""

    def packed(self, number: int, tensor: Tensor, handle: Handle) -> None:
        """The general path has served the tensor at this place."""
        if self._cache.cursor.observer.listens:
            self._items[number] = item_of(handle, self._lane)
            # What wraps its bytes answers no operator.
            if part_of(handle) is handle and is_attentions(tensor):
                self._outputs.append(number)
        self.stored(number, handle)

    def small(self, number: int) -> None:
        """In the observed step the tensor at this place is below `min_bytes`: no item,
        but it may stay."""
        self._items[number] = NO_ITEM

    def expects(self, number: int) -> bool:
        """Whether the tensor at this place may be a result of attention."""
        return number in self._known.places

    def stored(self, number: int, handle: Any) -> None:
        """The tensor at this place may be stored."""
        if self.expects(number):
            spare = Spare.of(handle)
            if spare is not None:
                self._spares[number] = spare

    def watched(self, num_places: int) -> RerunAttention:
        """For a re-run: the calls to learn of, or to answer.

        Raises:
            InPlaceError: a stored result was changed after it was saved.
        """
        cache = self._cache
        if cache.cursor.observer.listens:
            windows = windows_around(self._outputs, num_places)
            return RerunAttention(windows, {}, now=cache.ledger.clock.now)
        stored: dict[int, Tensor] = {}
        for number, spare in self._spares.items():
            tensor = spare.tensor(cache)
            if tensor is not None:
                # An alias that becomes a part of the re-run's graph.
                stored[number] = tensor.detach()
        if not stored:
            return RerunAttention((), stored)
        spots = [
            spot
            for spot in self._known.of(num_places)
            if stored.keys() >= set(spot.places)
        ]
        check = self._check if spots and cache.verifier.draws() else None
        return RerunAttention(windows_of(spots), stored, check)

    def _check(self, stored: Tensor, computed: Tensor) -> None:
        text = (
            f"an attention in {self._path} ran again, and what it gave is not what is "
            "stored of it"
        )
        self._cache.verifier.compare(stored, computed, text)

    def learn(
        self, seen: RerunAttention, lane: int, region: int, num_places: int
    ) -> None:
        """Remember what a re-run has shown in the observed step, and tell the observer.

        Args:
            lane, region: their numbers, for the observer.
        """
        observer = self._cache.cursor.observer
        if not self._items:
            return
        self._known.learn(num_places, [each.spot for each in seen.learnt])
        for learnt in seen.learnt:
            places = learnt.spot.places
            if all(
                place in self._items for place in places
            ):  # else no item of a plan's
                own = frozenset(self._items[place] for place in places) - {NO_ITEM}
                observer.attention(lane, region, own, learnt.before, learnt.behind)

    def is_lost(self, seen: RerunAttention) -> bool:
        """Whether the re-run must be done again, without what is stored."""
        if seen.is_wrong:
            self._spares.clear()
        return seen.is_wrong

"""Graphs made of a caller's tensors, found again while the tensors are unchanged.

[Note: unchanged tensors] A graph is found by the identity of its tensors, held weakly:
an entry goes when one of its tensors dies, so an id that is used again finds nothing.
It is used only if every tensor has the version, memory and layout that it had.
Inference tensors have no version and are not kept. What `.data`, numpy or another
library wrote leaves no trace in a version: on a CPU the values are compared with a
copy, on a GPU a digest is compared without waiting (see `hector.runtime.watch`).
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hector.graph import HeteroGraph
from hector.runtime.watch import Watch, watch


@dataclass(frozen=True)
class _Entry:
    """A graph, and its tensors as they were."""

    refs: tuple["weakref.ref[Tensor]", ...]
    states: tuple[Hashable, ...]
    watch: Watch
    graph: HeteroGraph


class GraphCache:
    """At most `capacity` graphs, the least recently used one leaves first."""

    def __init__(self, capacity: int = 8) -> None:
        self.capacity = capacity
        self._num_made = 0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[type["GraphCache"], tuple[int]]:
        # Copied and saved without its graphs.
        return GraphCache, (self.capacity,)

    def get(
        self,
        tensors: Sequence[Tensor],
        facts: Hashable,
        make: Callable[[bool], HeteroGraph],
    ) -> HeteroGraph:
        """The graph of these tensors, made when there is none that is up to date.

        `facts` is whatever else the graph depends on. `make` is told whether the graph
        is one of many similar ones: more were made than are kept, as with mini-batches.
        """
        if any(t.is_inference() for t in tensors):
            return make(self._num_made > self.capacity)
        key = (facts, *map(id, tensors))
        found = self._entries.get(key)
        if found is not None and _up_to_date(found, tensors):
            self._entries.move_to_end(key)
            # A graph that is used again is worth what is prepared for it.
            self._num_made = 0
            return found.graph
        self._entries.pop(key, None)
        self._num_made += 1
        entry = self._enter(key, tensors, make(self._num_made > self.capacity))
        while len(self._entries) > self.capacity:
            self._entries.popitem(last=False)
        return entry.graph

    def clear(self) -> None:
        self._entries.clear()

    def _enter(
        self, key: Hashable, tensors: Sequence[Tensor], graph: HeteroGraph
    ) -> _Entry:
        own = weakref.ref(self)

        def gone(_: object) -> None:
            cache = own()
            if cache is not None:
                cache._entries.pop(key, None)

        entry = _Entry(
            refs=tuple(weakref.ref(t, gone) for t in tensors),
            states=tuple(map(state_of, tensors)),
            watch=watch(tensors),
            graph=graph,
        )
        if graph.state.watch is None:
            graph.state.watch = entry.watch
        self._entries[key] = entry
        return entry


def _up_to_date(entry: _Entry, tensors: Sequence[Tensor]) -> bool:
    return (
        all(ref() is t for ref, t in zip(entry.refs, tensors, strict=True))
        and all(s == state_of(t) for s, t in zip(entry.states, tensors, strict=True))
        and entry.watch.unchanged(tensors)
    )


def state_of(t: Tensor) -> Hashable:
    """What differs after a change that PyTorch knows of, or after `set_`."""
    layout = (t.dtype, t.shape, t.stride()) if t.layout is torch.strided else ()
    # Inference tensors have no version.
    version = None if t.is_inference() else t._version
    return (version, t.data_ptr(), *layout)

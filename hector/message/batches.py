"""What user functions get: features of edges, and of nodes with their mailbox."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor


class FeatureView(Mapping[str, Any]):
    """Map feature names to rows, gathered when they are asked for."""

    def __init__(self, get: Callable[[str], Any], names: Collection[str]) -> None:
        self._get, self._names = get, names

    def __getitem__(self, name: str) -> Any:
        return self._get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class EdgeBatch:
    """Give a message function the rows of `src`, `dst` and the edge (`data`) by
    name."""

    def __init__(
        self,
        features: tuple[FeatureView, FeatureView, FeatureView],
        ends: Callable[[], tuple[Tensor, Tensor, Tensor]],
        softmax: Callable[[Any], Any],
    ) -> None:
        self.src, self.dst, self.data = features
        self._ends, self._softmax = ends, softmax

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return sources, destinations and ids of the edges, int64 [edges] each."""
        return self._ends()

    def batch_size(self) -> int:
        """Return how many edges there are."""
        return self._ends()[0].numel()

    def softmax(self, score: Any) -> Any:
        """Return the softmax of edge rows over the edges with the same destination."""
        return self._softmax(score)


class NodeBatch:
    """Give a reduce or apply function node rows (`data`); in a reduce function
    `mailbox` holds the messages [nodes, degree, ...]."""

    def __init__(
        self,
        data: FeatureView,
        mailbox: Mapping[str, Any],
        ids: Callable[[], Tensor],
    ) -> None:
        self.data, self.mailbox, self._ids = data, mailbox, ids

    def nodes(self) -> Tensor:
        """Return the ids of the nodes, int64 [nodes]."""
        return self._ids()

    def batch_size(self) -> int:
        """Return how many nodes there are."""
        return self._ids().numel()

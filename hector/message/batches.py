"""What user functions get: features of edges, and of nodes with their mailbox."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class Features:
    """Features by name, gathered when they are asked for."""

    def __init__(self, get: Callable[[str], Any]) -> None:
        self._get = get

    def __getitem__(self, name: str) -> Any:
        return self._get(name)


class EdgeBatch:
    """The argument of message functions: `src`, `dst` and `data` by name."""

    def __init__(
        self,
        features: tuple[Features, Features, Features],
        ends: Callable[[], tuple[Tensor, Tensor, Tensor]],
        softmax: Callable[[Any], Any],
    ) -> None:
        self.src, self.dst, self.data = features
        self._ends, self._softmax = ends, softmax

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, destinations and ids of the edges."""
        return self._ends()

    def batch_size(self) -> int:
        return self._ends()[0].numel()

    def softmax(self, score: Any) -> Any:
        """Softmax of edge rows over the edges with the same destination."""
        return self._softmax(score)


class NodeBatch:
    """The argument of reduce and apply functions: `data`, and `mailbox` with messages
    [nodes, degree, ...] in a reduce function."""

    def __init__(
        self,
        data: Features,
        mailbox: Mapping[str, Any],
        ids: Callable[[], Tensor],
    ) -> None:
        self.data, self.mailbox, self._ids = data, mailbox, ids

    def nodes(self) -> Tensor:
        """Ids of the nodes."""
        return self._ids()

    def batch_size(self) -> int:
        return self._ids().numel()

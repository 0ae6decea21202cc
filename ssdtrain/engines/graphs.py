"""CUDA graphs: where a capture ends.

A stream that was forked in a capture must be joined where the capture ends, and nothing
that runs in the model knows where that is: a graph may hold a forward, or an iteration.
So `torch.cuda.CUDAGraph.capture_end` is wrapped, which `torch.cuda.graph` and
`make_graphed_callables` call on the stream that is captured.
(tests/ssdtrain/engines/test_graphs.py)
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ssdtrain.engines.patch import Patches, Shared

NAME = "capture_end"


class HearsEnds(Protocol):
    """Who is told of each capture's end."""

    def ends(self) -> None:
        """A capture is about to end."""


class CaptureEnd(Shared[HearsEnds]):
    """`CUDAGraph.capture_end`, with what is called before it."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        self.replace(kind, NAME, self._wrapped)

    def _wrapped(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(graph: Any) -> Any:
            try:
                for user in self.users:
                    user.ends()
            finally:
                # It ends in any case; where it was invalidated, torch says why.
                found = plain(graph)
            return found

        return capture_end


def hear_captures(user: HearsEnds, patches: Patches) -> bool:
    """Have `user.ends` called before each capture ends, as long as the user lives.

    Returns:
        Whether it will be.
    """
    kind: Any = torch.cuda.CUDAGraph
    if NAME not in vars(kind):
        return False
    shared: CaptureEnd = Shared.at(kind) or CaptureEnd(kind)
    shared.add(user)
    patches.also(functools.partial(shared.remove, user))
    return True

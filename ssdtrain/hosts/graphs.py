"""CUDA graphs: where a capture ends.

A stream that was forked in a capture must be joined where the capture ends, and nothing
that runs in the model knows where that is: a graph may hold a forward, or an iteration.
So `torch.cuda.CUDAGraph.capture_end` is wrapped, which `torch.cuda.graph` and
`make_graphed_callables` call on the stream that is captured. One wrapper serves all
sessions; the last one that closes takes it off.
(tests/ssdtrain/hosts/test_graphs.py)
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ssdtrain.hosts.patch import Patches, weakly

NAME = "capture_end"


class CaptureEnd:
    """`CUDAGraph.capture_end`, with what is called before it."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._plain: Callable[..., Any] = vars(kind)[NAME]
        self._before: list[Callable[[], None]] = []

        @functools.wraps(self._plain)
        def capture_end(graph: Any) -> Any:
            try:
                for call in list(self._before):
                    call()
            finally:
                # It ends in any case; where it was invalidated, torch says why.
                found = self._plain(graph)
            return found

        self.method = capture_end
        capture_end.__dict__[NAME] = self

    def add(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call this as well; returns what takes it off."""
        self._before.append(call)

        def undo() -> None:
            if call in self._before:
                self._before.remove(call)
            if not self._before and vars(self._kind).get(NAME) is self.method:
                setattr(self._kind, NAME, self._plain)

        return undo


def attach(ends: Callable[[], None], patches: Patches) -> bool:
    """Have `ends`, a bound method, called before each capture ends.

    Returns:
        Whether it will be.
    """
    kind: Any = torch.cuda.CUDAGraph
    if NAME not in vars(kind):
        return False
    method = vars(kind)[NAME]
    found = getattr(method, "__dict__", {}).get(NAME)
    if not isinstance(found, CaptureEnd):
        found = CaptureEnd(kind)
        setattr(kind, NAME, found.method)
    patches.also(found.add(weakly(ends)))
    return True

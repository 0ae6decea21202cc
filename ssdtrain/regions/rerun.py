"""Runs a forward again and hands out what autograd saves in it.

It is not torch's checkpoint: inside that one's re-run torch's own hook is the innermost
one, and ours would see nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _Stop(BaseException):
    """The last tensor that is needed has been saved. No `except Exception` of a model
    may swallow it."""


Taker = Callable[[int, Tensor], None]
"""May keep an alias of the tensor's bytes, but not the tensor: it holds the graph."""


class Collector:
    """The hooks of one re-run: tells each saved tensor by its place in the forward."""

    def __init__(self, take: Taker, num_places: int, *, stops_early: bool) -> None:
        self._take = take
        self._num_places = num_places
        self._stops_early = stops_early
        # Of a backward inside the forward nothing was counted.
        self._task = torch._C._current_graph_task_id()
        self.num_taken = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Hand a saved tensor out."""
        counts = torch._C._current_graph_task_id() == self._task
        # Asking whether something is a parameter is a call of Python: seldom needed.
        base = tensor._base
        plain = type(tensor) is Tensor and (base is None or type(base) is Tensor)
        if not counts or (not plain and is_parameter(tensor)):
            return tensor.detach()
        number, self.num_taken = self.num_taken, self.num_taken + 1
        if number < self._num_places:
            self._take(number, tensor)
        if self._stops_early and self.num_taken == self._num_places:
            raise _Stop
        return tensor.detach()

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run the forward up to the last place that is needed."""
        hooks = torch.autograd.graph.saved_tensors_hooks
        try:
            with hooks(self.pack, _as_it_is):
                forward(*args, **kwargs)
        except _Stop:
            pass


def _as_it_is(tensor: Tensor) -> Tensor:
    """For a backward inside the forward. Nodes hold it: it must not hold the collector,
    which may hold what they made, or no garbage collection finds the cycle."""
    return tensor


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter or a view of one: those are not counted."""
    if isinstance(tensor, nn.Parameter):
        return True
    base = tensor._base
    return base is not None and isinstance(base, nn.Parameter)

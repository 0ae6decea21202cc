"""Runs a forward again and hands out what autograd saves in it.

It is not torch's checkpoint: inside that one's re-run torch's own hook is the innermost
one, and ours would see nothing.

[Note: the end of a re-run]
A re-run stops, by an exception, behind the last tensor that is needed: what follows is
often a matrix product. Code that is not there to be left in the middle would tell: it
has set something that it sets back at its end (a flag, a depth), or it has a `try` or a
`with` around the operator that saved. Such a forward runs to its end.
(tests/ssdtrain/regions/test_end.py)
"""

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn


class _Stop(BaseException):
    """The last tensor that is needed has been saved."""


OURS = frozenset(("torch", "ssdtrain"))
"""Packages whose own code may be left in the middle."""
Taker = Callable[[int, Tensor], None]
"""May keep an alias of the tensor's bytes, but not the tensor: it holds the graph."""


class Collector:
    """The hooks of one re-run: tells each saved tensor by its place in the forward.

    Args:
        take: is given each tensor as well; None: nobody is.
        num_places: of the forward.
        may_stop: asked behind the last tensor whether the rest may be left out.
    """

    def __init__(
        self, take: Taker | None, num_places: int, *, may_stop: Callable[[], bool]
    ) -> None:
        self._take = take
        self._num_places = num_places
        self._may_stop = may_stop
        # Of a backward inside the forward nothing was counted.
        self._task = torch._C._current_graph_task_id()
        self.num_taken = 0
        self.found: list[Tensor] = []
        """Aliases of what was saved, without its graph."""

    def pack(self, tensor: Tensor) -> Tensor:
        """Hand a saved tensor out."""
        counts = torch._C._current_graph_task_id() == self._task
        # Asking whether something is a parameter is a call of Python: seldom needed.
        base = tensor._base
        plain = type(tensor) is Tensor and (base is None or type(base) is Tensor)
        if not counts or (not plain and is_parameter(tensor)):
            return tensor.detach()
        number, self.num_taken = self.num_taken, self.num_taken + 1
        alias = tensor.detach()
        self.found.append(alias)
        if self._take is not None and number < self._num_places:
            self._take(number, tensor)
        if self.num_taken == self._num_places and self._may_stop():
            if not is_caught(sys._getframe(1)):
                raise _Stop
        return alias

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run the forward up to the last place that is needed."""
        hooks = torch.autograd.graph.saved_tensors_hooks
        try:
            with hooks(self.pack, _as_it_is):
                forward(*args, **kwargs)
        except _Stop:
            pass


def is_caught(frame: Any) -> bool:
    """Whether an exception in this frame of Python would meet code of the program's own
    on its way to the forward that runs again; see [Note: the end of a re-run]."""
    while frame is not None and frame.f_code is not Collector.run.__code__:
        for part in _guarded(frame.f_code):
            # `nn.Module` has a `try` around every forward, for `Exception` alone.
            if frame.f_lasti in part and not _is_ours(frame.f_globals):
                return True
        frame = frame.f_back
    return False


def _is_ours(space: dict[str, Any]) -> bool:
    return str(space.get("__name__")).partition(".")[0] in OURS


@functools.lru_cache(maxsize=4096)
def _guarded(code: CodeType) -> tuple[range, ...]:
    """Offsets of instructions in a `try` or a `with`."""
    table = getattr(dis, "_parse_exception_table", None)
    if table is not None:
        return tuple(range(each.start, each.end) for each in table(code))
    blocks = ("SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH")  # Python 3.10
    some = any(step.opname in blocks for step in dis.get_instructions(code))
    return (range(len(code.co_code)),) if some else ()


def _as_it_is(tensor: Tensor) -> Tensor:
    """For a backward inside the forward. Nodes hold it: it must not hold the collector,
    which may hold what they made, or no garbage collection finds the cycle."""
    return tensor


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter or a view of one: those are not counted."""
    return isinstance(tensor, nn.Parameter) or views_parameter(tensor)


def views_parameter(tensor: Tensor) -> bool:
    """Whether it is a view of a parameter."""
    base = tensor._base
    # Torch asks in Python whether something is a parameter.
    return base is not None and type(base) is not Tensor and is_parameter(base)


def as_part(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The same bytes as a view of a parameter: latents that a model hands to its first
    layer (a perceiver's resampler) are no more counted in the re-run than before."""
    owner = nn.Parameter(tensor, requires_grad)
    with torch.set_grad_enabled(requires_grad):
        return owner.view(owner.shape)

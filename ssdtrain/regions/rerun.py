"""Runs a forward again and hands out what autograd saves in it.

It is not torch's checkpoint: inside that one's re-run torch's own hook is the innermost
one, and ours would see nothing.

[Note: the end of a re-run]
A re-run stops, by an exception, after the last tensor that is needed: what follows is
often a matrix product. Code that is not there to be left in the middle would tell: it
has set something that it sets back at its end (a flag, a depth), or it has a `try` or a
`with` around the operator that saved. Such a forward runs to its end.
(tests/ssdtrain/regions/test_end.py)
"""

import dis
import sys
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter


class _Stop(BaseException):
    """The last tensor that is needed has been saved."""


OURS = frozenset(("torch", "ssdtrain"))
"""Packages whose own code may be left in the middle."""
MOST_KNOWN = 4096
"""Pieces of code of which is remembered where a re-run must not end."""
Taker = Callable[[int, Tensor], None]
"""May keep an alias of the tensor's bytes, but not the tensor: it holds the graph."""


class Collector:
    """Takes what one re-run saves, tensor by tensor, in the order of the forward.

    Args:
        take: is given each tensor as well; None: nobody is.
        num_places: of the forward.
        may_stop: asked after the last tensor whether the rest may be left out.
        aside: ids of tensors that count as little as parameters do, while it runs.
    """

    def __init__(
        self,
        take: Taker | None,
        num_places: int,
        *,
        may_stop: Callable[[], bool],
        aside: Collection[int] = (),
    ) -> None:
        self._take = take
        self._num_places = num_places
        self._may_stop = may_stop
        self._aside = aside
        self.found: list[Tensor] = []
        """Aliases of what was saved, without its graph."""

    def _pack(self) -> Callable[[Tensor], Tensor]:
        """The hook that takes a saved tensor."""
        take, found, num_places = self._take, self.found, self._num_places
        add, task_now = found.append, torch._C._current_graph_task_id
        aside = self._aside
        task = task_now()

        def pack(tensor: Tensor) -> Tensor:
            alias = tensor.detach()
            if task_now() != task:  # of a backward inside the forward nothing counts
                return alias
            # Asking whether something is a parameter is two calls of Python.
            kind, base = type(tensor), tensor._base
            if kind is Parameter or type(base) is Parameter:
                return alias
            plain = kind is Tensor and (base is None or type(base) is Tensor)
            if not plain and is_parameter(tensor):
                return alias
            if aside and (id(tensor) in aside or id(base) in aside):
                return alias
            add(alias)
            number = len(found)
            if take is not None and number <= num_places:
                take(number - 1, tensor)
            if number == num_places and self._may_stop():
                if not is_caught(sys._getframe(1)):
                    raise _Stop
            return alias

        return pack

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run the forward up to the last place that is needed."""
        hooks = torch.autograd.graph.saved_tensors_hooks
        try:
            with hooks(self._pack(), _as_it_is):
                forward(*args, **kwargs)
        except _Stop:
            pass


def is_caught(frame: Any) -> bool:
    """Whether an exception in this frame of Python would meet code of the program's own
    on its way to the forward that runs again; see [Note: the end of a re-run]."""
    while frame is not None and frame.f_code is not Collector.run.__code__:
        for part in _GUARDED.of(frame):
            if frame.f_lasti in part:
                return True
        frame = frame.f_back
    return False


class _Guarded:
    """Offsets of instructions in a `try` or a `with` of the program's own, of code that
    was looked at. By identity: to hash code takes longer than to run over a frame."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[CodeType, tuple[range, ...]]] = {}

    def of(self, frame: Any) -> tuple[range, ...]:
        """Of the code of a frame of Python."""
        code = frame.f_code
        known = self._known.get(id(code))
        if known is not None:
            return known[1]
        module = str(frame.f_globals.get("__name__"))
        # `nn.Module` has a `try` around every forward, for `Exception` alone.
        found = () if module.partition(".")[0] in OURS else _guarded(code)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[id(code)] = code, found
        return found


def _guarded(code: CodeType) -> tuple[range, ...]:
    table = getattr(dis, "_parse_exception_table", None)
    if table is not None:
        return tuple(range(each.start, each.end) for each in table(code))
    blocks = ("SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH")  # Python 3.10
    some = any(step.opname in blocks for step in dis.get_instructions(code))
    return (range(len(code.co_code)),) if some else ()


_GUARDED = _Guarded()


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

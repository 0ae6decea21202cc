"""Calls of layers in which a plan does nothing: they run without hooks.

[Note: quiet calls]
Under hooks each saved tensor costs the host some microseconds, also one that stays.
A plan often acts in a part of the layers only. Where every row of a layer's call keeps
its tensor and is quiet (`[Note: compiled plan]` in table.py), later lanes take our
hooks off torch's stack for that call: autograd saves as without us, which is all that
these rows do. They are passed over, and booked as the plan has them.
The hooks stay on where the lane has left its table, or is at another row of it than the
plan's, where tensors are of another size (`[Note: sizes]`), and where somebody else's
hooks are on top. They stay on as well where others are below: those would see tensors
of some layers, in some steps. A checkpoint around the whole model runs it again without
ours, and takes the first tensors of that run for the few that it saw.
So whatever a forward does, more is kept at worst, as without us.
(tests/ssdtrain/cache/test_quiet.py)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.cache.record import Lane
from ssdtrain.cache.rows import (
    KeptRow,
    ParameterRow,
    ParameterViewRow,
    Row,
    WrappedRow,
)
from ssdtrain.cache.spec import Spec
from ssdtrain.counters import Count, Counters

LEAST_ROWS = 3
"""Below, taking the hooks off and putting them back costs as much as they do."""


class Passage(NamedTuple):
    """The rows of one call of a layer."""

    first: int
    end: int
    num_calls: int
    """Calls of layers inside of it."""
    sizes: tuple[torch.Size, ...]
    """Of its arguments."""
    parameter_bytes: int
    """Of parameters saved in scopes of `ssdtrain.no_offload()` inside of it."""

    def is_quiet(self, rows: Sequence[Row]) -> bool:
        """Whether nothing happens to any of its tensors."""
        own = rows[self.first : self.end]
        return len(own) >= LEAST_ROWS and all(map(_stays, own))


def _stays(row: Row) -> bool:
    bare = row.inner if type(row) is WrappedRow else row
    return type(bare) in (KeptRow, ParameterRow, ParameterViewRow)


class ForwardHooks(saved_tensors_hooks):
    """The hooks of one forward. They may be off for a while.

    A forward may open hooks of its own in one layer and close them in another one, or
    after its end. Torch takes off what is on top, so ours are put where they were, and
    taken from where they are.
    An interrupt may come between any two lines here. What is said before it is done is
    mended where the forward ends (`TensorCache.forward_ends`).
    """

    def __init__(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        # As torch's own, without a call more.
        self.pack_hook, self.unpack_hook = pack, unpack
        self._are_off = False
        self.are_alone = False
        """Whether no others are below."""

    def __enter__(self) -> None:
        self.are_alone = _top(True) is None
        _push(self.pack_hook, self.unpack_hook)

    def take_off(self) -> None:
        """Take them off torch's stack, on top of which they are, alone."""
        self._are_off = True
        _pop()

    def put_back(self) -> None:
        """Put them below what was opened meanwhile."""
        above = self._pop_above()
        _push(self.pack_hook, self.unpack_hook)
        self._are_off = False
        _push_again(above)

    def _pop_above(self) -> list[Any]:
        """Take off what is above ours; all, if ours are not there."""
        above = []
        while (top := _top(True)) is not None and top[0] is not self.pack_hook:
            _pop()
            above.append(top)
        return above

    def __exit__(self, *error: object) -> None:
        if self._are_off:
            return
        top = _top(True)
        if top is not None and top[0] is self.pack_hook:
            _pop()
            return
        above = self._pop_above()
        if _top(True) is None:
            # Somebody has closed others, from below, and that took ours.
            above = above[1:]
        else:
            _pop()
        _push_again(above)


_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks
_top = torch._C._autograd._top_saved_tensors_default_hooks


def _push_again(hooks: list[Any]) -> None:
    for pack, unpack in reversed(hooks):
        _push(pack, unpack)


class WithoutHooks:
    """Around a call of a layer of which nobody asks what it saves: no hooks."""

    def __init__(self, hooks: ForwardHooks) -> None:
        self._hooks = hooks

    def __enter__(self) -> None:
        self._hooks.take_off()

    def __exit__(self, *error: object) -> None:
        self._hooks.put_back()


class Quietly(WithoutHooks):
    """Around a quiet call of a lane that follows its table: no hooks."""

    def __init__(
        self, hooks: ForwardHooks, lane: Lane, rows: Iterator[Row], of: Passage
    ) -> None:
        super().__init__(hooks)
        self._lane, self._rows, self._passage = lane, rows, of

    def __enter__(self) -> None:
        passage = self._passage
        number = passage.end - passage.first
        next(islice(self._rows, number, number), None)
        self._lane.num_regions += passage.num_calls
        super().__enter__()


class Watched:
    """Around a call of a lane whose plan is compiled: notes which rows are its."""

    def __init__(
        self,
        passages: dict[int, Passage],
        lane: Lane,
        specs: list[Spec],
        counters: Counters,
        arguments: Iterable[Any],
    ) -> None:
        self._passages, self._lane, self._specs = passages, lane, specs
        self._number = lane.num_regions - 1
        self._counters = counters
        self._sizes = sizes_of(arguments)

    def __enter__(self) -> None:
        self._first = len(self._specs)
        self._parameter_bytes = self._counters.of(Count.PARAMETERS)

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            return
        inside = self._lane.num_regions - 1 - self._number
        own = self._specs[self._first :]
        parameter_bytes = self._counters.of(Count.PARAMETERS) - self._parameter_bytes
        parameter_bytes -= sum(s.num_bytes for s in own if s.parameter is not None)
        self._passages[self._number] = Passage(
            self._first, len(self._specs), inside, self._sizes, max(0, parameter_bytes)
        )


def sizes_of(arguments: Iterable[Any]) -> tuple[torch.Size, ...]:
    """Of the tensors among them. No function mode sees the question."""
    with torch._C.DisableTorchFunction():
        return tuple(
            each.shape
            for each in arguments
            if isinstance(each, Tensor) and not each.is_nested
        )


Around = WithoutHooks | Watched
"""What is around a call of a layer that does not run again."""

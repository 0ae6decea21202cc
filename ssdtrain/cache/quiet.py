"""Calls of layers in which a plan does nothing: they run without hooks.

[Note: quiet calls]
Under hooks each saved tensor costs the host some microseconds, also one that stays.
A plan often acts in a part of the layers only. Where every row of a layer's call keeps
its tensor and is quiet (`[Note: compiled plan]` in table.py), later lanes take our
hooks off torch's stack for that call: autograd saves as without us, which is all that
these rows do. They are passed over, and booked as the plan has them.
The hooks stay on where the lane has left its table, or is at another row of it than the
plan's, where tensors are of another size (`[Note: sizes]`), and where somebody else's
hooks are on top. So whatever a forward does, more is kept at worst, as without us.
(tests/ssdtrain/cache/test_quiet.py)
"""

from collections.abc import Sequence
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from ssdtrain.cache.rows import (
    KeptRow,
    ParameterRow,
    ParameterViewRow,
    Row,
    WrappedRow,
)

LEAST_ROWS = 3
"""Below, taking the hooks off and putting them back costs as much as they do."""


class Passage(NamedTuple):
    """The rows of one call of a layer."""

    first: int
    end: int
    num_calls: int
    """Calls of layers inside of it."""

    def is_quiet(self, rows: Sequence[Row]) -> bool:
        """Whether nothing happens to any of its tensors."""
        own = rows[self.first : self.end]
        return len(own) >= LEAST_ROWS and all(map(_stays, own))


def _stays(row: Row) -> bool:
    bare = row.inner if type(row) is WrappedRow else row
    return type(bare) in (KeptRow, ParameterRow, ParameterViewRow)


class ForwardHooks(saved_tensors_hooks):
    """The hooks of one forward. They may be off for a while.

    An interrupt may come between any two lines here. What is said before it is done is
    mended where the forward ends (`TensorCache.forward_ends`).
    """

    def __init__(self, pack: Any, unpack: Any) -> None:
        super().__init__(pack, unpack)
        self._are_off = False

    def take_off(self) -> None:
        """Take them off torch's stack, on top of which they are."""
        self._are_off = True
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def put_back(self) -> None:
        """Put them on top again."""
        torch._C._autograd._push_saved_tensors_default_hooks(
            self.pack_hook, self.unpack_hook
        )
        self._are_off = False

    def __exit__(self, *error: object) -> None:
        if not self._are_off:
            super().__exit__(*error)


class Quietly:
    """Around a quiet call of a lane that follows its table: no hooks."""

    def __init__(self, hooks: ForwardHooks, lane: Any, rows: Any, of: Passage) -> None:
        self._hooks, self._lane, self._rows, self._passage = hooks, lane, rows, of

    def __enter__(self) -> None:
        first, end, num_calls = self._passage
        number = end - first
        next(islice(self._rows, number, number), None)
        self._lane.num_regions += num_calls
        self._hooks.take_off()

    def __exit__(self, *error: object) -> None:
        self._hooks.put_back()


class Watched:
    """Around a call of a lane whose plan is compiled: notes which rows are its."""

    def __init__(self, passages: dict[int, Passage], lane: Any, specs: Any) -> None:
        self._passages, self._lane, self._specs = passages, lane, specs
        self._number = lane.num_regions - 1

    def __enter__(self) -> None:
        self._first = len(self._specs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            inside = self._lane.num_regions - 1 - self._number
            found = Passage(self._first, len(self._specs), inside)
            self._passages[self._number] = found

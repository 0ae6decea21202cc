"""The arguments of a region's call, stored until its forward runs again.

See [Note: regions] in regioncall.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ssdtrain.cache.cursor import Cursor
from ssdtrain.cache.digest import Digests, word_bytes
from ssdtrain.cache.handles import KeptHandle
from ssdtrain.cache.identity import is_plain, stamp_of
from ssdtrain.cache.ledger import Ledger
from ssdtrain.cache.record import Holding, Lane, item_of
from ssdtrain.counters import Count
from ssdtrain.regions.arguments import Arguments
from ssdtrain.regions.rerun import as_part, views_parameter


def offsets_of(tensor: Tensor) -> Tensor | None:
    """What tells the lengths of a nested tensor from those of all others; None: there
    is nothing."""
    if tensor.layout is not torch.jagged:
        return None
    # Of the class that all jagged tensors have; torch's stubs know plain ones alone.
    found: Tensor = tensor.offsets()  # type: ignore[attr-defined]
    return found


def is_bare(tensor: Tensor) -> bool:
    """Whether it is plain bytes without a gradient, or that an operator made: no leaf
    that gets one, no part of such a leaf or of a parameter."""
    if not is_plain(tensor):
        return False
    base = tensor._base
    if base is not None and (type(base) is not Tensor or base.is_leaf):
        return type(base) is Tensor and not (base.requires_grad or tensor.requires_grad)
    return tensor.grad_fn is not None or (
        type(tensor) is Tensor and not tensor.requires_grad
    )


NO_ARGUMENTS = Arguments(0, (), [])


class Input(tuple[Any, bool, bool, bool]):
    """A tensor among the arguments: its handle, whether it requires a gradient, whether
    it is a parameter, and whether it is a view of one: what is saved of that has no
    place. A tuple: made without a call of Python."""

    __slots__ = ()


class Inputs:
    """The arguments of one call, and whether its forward has left them as they were.

    Args:
        number: of the call in its lane.
        holding: of the call: where bytes are booked.
    """

    def __init__(
        self,
        cursor: Cursor,
        ledger: Ledger,
        lane: Lane,
        number: int,
        holding: Holding,
    ) -> None:
        self.makes_lengths = False
        """Whether the call saves a nested tensor of lengths that no argument has."""
        self._cursor = cursor
        self._ledger = ledger
        self._lane = lane
        self._number = number
        self._holding = holding
        self._leaves: list[Any] = []
        self._arguments = NO_ARGUMENTS
        self._versions: list[tuple[Tensor, int]] = []
        """The tensors, while the forward runs, and their versions before it."""
        self._contents: list[Tensor | None] = []
        """Digests of their bytes before it, in a call that is not trusted yet."""

    def store(
        self,
        leaves: list[Any],
        arguments: Arguments,
        pack: Callable[[Tensor], Any],
        digests: Digests | None,
        *,
        keeps: bool,
    ) -> None:
        """Store the arguments.

        Args:
            pack: the session's hook.
            digests: of a call that is not trusted yet: a kernel may write to an input
                past its version.
            keeps: whether they stay, and nobody asks which items they are.
        """
        self._arguments = arguments
        stored: dict[int, Input] = {}
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._leaves.append(leaf)
                continue
            key = id(leaf)
            if key in stored:  # code may ask whether `key is value`
                self._leaves.append(stored[key])
                continue
            self._versions.append((leaf, leaf._version))
            # Torch asks in Python whether something is a parameter.
            is_parameter = type(leaf) is not Tensor and isinstance(leaf, nn.Parameter)
            handle = self._kept(leaf) if keeps and is_bare(leaf) else pack(leaf)
            viewed = not is_parameter and leaf._base is not None
            is_part = viewed and views_parameter(leaf)
            own = Input((handle, leaf.requires_grad, is_parameter, is_part))
            stored[key] = own
            self._leaves.append(own)
            if self._cursor.observer.listens:
                self._tell(handle)
        if digests is not None:
            self._contents = [self._digest(leaf, digests) for leaf in self.tensors]

    def _digest(self, leaf: Tensor, digests: Digests) -> Tensor | None:
        if not is_plain(leaf) or leaf.device != digests.device:
            return None
        if isinstance(leaf, nn.Parameter):
            return None
        with torch.no_grad():
            return digests.of(leaf.detach(), word_bytes(leaf))

    def _kept(self, tensor: Tensor) -> KeptHandle:
        """The handle of an argument that stays, and of which nobody wants a record."""
        key = stamp_of(tensor), tensor._version
        if key not in self._lane.inputs:
            self._lane.inputs.add(key)
            base = tensor._base
            # A view holds all that its operator made; of data it is a part alone.
            num_bytes = (tensor if base is None or base.is_leaf else base).nbytes
            self._holding.live_bytes += num_bytes
            self._ledger.live(num_bytes)
            self._ledger.counters.add_all(
                {Count.SAVED: num_bytes, Count.KEPT: num_bytes}
            )
        return KeptHandle((tensor.detach(), tensor._version))

    def _tell(self, handle: Any) -> None:
        cursor = self._cursor
        item = item_of(handle, self._lane)
        if item >= 0:
            cursor.observer.reads(cursor.of(self._lane).number, self._number, item)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among them, once each; none once the forward has ended."""
        return [tensor for tensor, _ in self._versions]

    @property
    def booked(self) -> set[Any]:
        """Storages and versions of plain ones, whose bytes are booked."""
        plain = (each for each in self._versions if is_plain(each[0]))
        return {(stamp_of(tensor), version) for tensor, version in plain}

    def note_lengths(self, tensor: Tensor) -> None:
        """Note what the call saves. A nested tensor that a re-run makes has lengths of
        its own, which equal no other's; those of an argument are the argument's."""
        if not tensor.is_nested:
            return
        offsets = offsets_of(tensor)
        own = (offsets_of(leaf) for leaf in self.tensors if leaf.is_nested)
        if offsets is None or all(offsets is not each for each in own):
            self.makes_lengths = True

    def are_unchanged(self) -> bool:
        """Whether no version says that the forward wrote to one."""
        for tensor, version in self._versions:
            if tensor._version != version:
                return False
        return self._arguments.are_unchanged

    def are_same_bytes(self, digests: Digests) -> bool:
        """Whether their bytes are the same, as far as digests were taken."""
        for tensor, before in zip(self.tensors, self._contents, strict=False):
            now = None if before is None else self._digest(tensor, digests)
            if before is not None and (now is None or not torch.equal(now, before)):
                return False
        return True

    def forward_ended(self) -> None:
        """Let go of the tensors themselves."""
        self._versions.clear()

    def values(
        self, unpack: Callable[[Any], Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments and keywords for a re-run; what was one tensor is one again.

        Args:
            unpack: the session's hook.
        """
        made: dict[int, Tensor] = {}
        values = list(self._leaves)
        for at, leaf in enumerate(values):
            if type(leaf) is not Input:
                continue
            key = id(leaf)
            if key not in made:
                handle, requires_grad, is_parameter, is_part = leaf
                kept = type(handle) is KeptHandle
                tensor = handle.get() if kept else unpack(handle)
                if not is_parameter:
                    tensor = tensor.detach()
                    if is_part:
                        tensor = as_part(tensor, requires_grad)
                    elif requires_grad:
                        tensor.requires_grad_()
                made[key] = tensor
            values[at] = made[key]
        return self._arguments.of(values)

"""Saved-tensor hooks that move tensors and check nothing: what moving costs at least.

The same copies as a plan's, out and back, into the same kind of places, made by the
same calls in C. What is not there is all that makes them safe or worth it: versions,
identity, releases in the order of compute, loads ahead, counters. Gradients are right
as long as no step differs from the first one and nothing is changed in place.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ssdtrain.counters import Fallback
from ssdtrain.transfer.copies import PinnedBuffer, buffer_for, copies_of
from ssdtrain.transfer.cuda import open_device
from ssdtrain.transfer.pinned import PinnedPool

MOST_BYTES = 4 << 30
"""Of pinned memory."""


class Held:
    """One tensor that has left, and comes back at its first use."""

    __slots__ = ("place", "sent", "target")

    def __init__(self, place: PinnedBuffer, sent: Tensor) -> None:
        self.place = place
        self.sent = sent
        self.target: Tensor | None = None


class BareHooks:
    """Moves what the first forward saved first, each of its storages once.

    Args:
        parameters: that stay, and views of them.
        least_bytes: what is smaller stays.
    """

    def __init__(
        self,
        device: torch.device,
        parameters: Collection[Tensor],
        least_bytes: float,
    ) -> None:
        self.num_moved = 0
        """Tensors that each forward sends away."""
        self._device = open_device(device)
        self._copies = copies_of(self._device, _refuse)
        self._pool = PinnedPool(self._device, MOST_BYTES)
        self._owned = {each.untyped_storage().data_ptr() for each in parameters}
        self._least_bytes = least_bytes
        self._acts: list[PinnedBuffer | int] | None = None
        """Of each call of `pack`, as the first forward told: a place to send it to, the
        number of the tensor whose bytes it has as well, or -1: it stays."""
        self._found: dict[int, int] = {}
        """Number of the tensor that moves, by its storage in the first forward."""

    def __call__(self) -> Any:
        """The hooks, around one forward."""
        self._device.cut_stalls()  # its waits are timed in the first steps
        if self._acts is None:
            self._acts = []
            learn = partial(self._learn, self._acts)
            return torch.autograd.graph.saved_tensors_hooks(learn, lambda t: t)
        return torch.autograd.graph.saved_tensors_hooks(*self._hooks(self._acts))

    def _learn(self, acts: list[PinnedBuffer | int], tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        act: PinnedBuffer | int = -1
        if storage not in self._owned and tensor.nbytes >= self._least_bytes:
            act = self._found.get(storage, -1)
            whole = tensor.nbytes == tensor.untyped_storage().nbytes()
            if act == -1 and whole:
                found = buffer_for(self._pool, tensor.detach())
                if found is not None:
                    self._found[storage] = self.num_moved
                    self.num_moved += 1
                    act = found
        acts.append(act)
        return tensor

    def _hooks(self, acts: list[PinnedBuffer | int]) -> tuple[Callable[..., Any], ...]:
        following, copies = iter(acts).__next__, self._copies
        held: list[Held] = []

        def pack(tensor: Tensor) -> Any:
            act = following()
            if type(act) is PinnedBuffer:
                one = Held(act, tensor.detach())
                copies.out(act, one.sent)
                held.append(one)
                return one
            if act == -1:
                return tensor
            return held[act], tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(handle: Any) -> Any:
            if type(handle) is Held:
                one: Held = handle
            elif type(handle) is tuple:
                one = handle[0]
            else:
                return handle
            target = one.target
            if target is None:
                (target,) = copies.back((one.place,))
                one.target = target
                copies.arrive(one.place)
            if one is handle:
                return target
            return torch.as_strided(target, *handle[1:])

        return pack, unpack


def _refuse(reason: Fallback, detail: str) -> None:
    raise RuntimeError(f"expected copies made in C, got {reason.value}{detail}")

"""Room for tensors of all sizes, in a device whose memory is nearly used up.

[Note: torn blocks]
A caching allocator gives tensors parts of the blocks that larger ones left, and a block
can be used as a whole, or be given back, only when all of its parts are free again.
What an optimizer allocates in its first step stays forever. Where memory is short it
would tear the blocks of logits and of whole layers, and there is no room for the others
that the next step needs. So just before that step what is cached goes back to the
device: what is left are the holes between gradients. For the same reason it goes back
before the first of the steps in which all regions run again and are measured, and where
a plan is taken: the blocks are those that other tensors have left. What it costs are
the allocations of one step (75 ms of 230 for a 1B model on an H200, so none that is
timed), and only where most of the memory is reserved.

That alone is not enough: training that needs 4.2 GB under checkpointing ended out of
memory at 4.8, with 0.9 GB free in blocks that tensors of a few bytes held. So where
most of the memory is reserved the allocator is also asked for segments that grow
([Note: growing segments] in transfer/allocator.py), from then on; under a limit
for everything (`device_memory`) from the start, as the plan will use up that limit.

From then on is too late for what an optimizer keeps: before its first step less is in
use, and what is emptied then are not the blocks that gradients live in. The state fills
their holes and stays when they go: of 6.9 GB of weights and state in 12.9 GB it held
another 1.7 (0.2 in segments that grew before the first backward), and training ended
out of memory under a plan that filled the rest. So where gradients and state will take
a good part of the memory, segments grow from the start as well.

What is still free after an emptied cache lies next to what stays (`stuck_bytes`). That
is known before a plan is taken, which leaves it free. Segments that grow give back
whole pages of 20 MiB. Between two steps little lies next to little; in the middle of a
backward each hole between tensors holds parts of two pages, 0.1 to 0.6 GB of them where
training ended out of memory on an H200 (0.29 of 8.1 under a plan that left 0.28). So
where segments grow a plan leaves some pages free besides the reserve.
(tests/ssdtrain/observe/test_room.py)
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ssdtrain.cache.wrapped import unwrapped
from ssdtrain.forks import Owner
from ssdtrain.transfer.device import Device

logger = logging.getLogger(__name__)

WHOLE = "whole"
"""Memory was not short: the allocator takes segments as it did."""
GROWING = "growing"
NUM_KEPT = 3
"""Tensors that training is expected to make for each trained one: its gradient, and two
of the optimizer's, as Adam has them."""
EARLY_SHARE = 0.15
"""Part of the memory: where these take more, segments grow from the start."""


STRANDED_BYTES = 16 * 20 << 20
"""Of pages that are partly in use."""


class Room:
    """Empties the cache where memory is short, and has segments grow from then on."""

    def __init__(self, device: Device, obstacle: str = "") -> None:
        """obstacle: why segments must not grow; "": they may."""
        self._device = device
        self._owner = Owner()
        self._seen: WeakSet[Optimizer] = WeakSet()
        self._undo: Callable[[], None] | None = None
        self._obstacle = obstacle
        self.segments = WHOLE
        """`whole`, `growing`, or `whole: ` and why they do not grow although memory is
        short."""
        self.stuck_bytes = 0
        """Free, but not given back when the cache was emptied last."""

    @property
    def unusable_bytes(self) -> int:
        """What may be free in the middle of a step and of no use."""
        is_growing = self.segments == GROWING
        return max(self.stuck_bytes, STRANDED_BYTES if is_growing else 0)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """For `torch.optim.optimizer.register_optimizer_step_pre_hook`."""
        if optimizer in self._seen or self._owner.is_elsewhere:
            return
        self._seen.add(optimizer)
        if not optimizer.state:
            self.trim()

    def open(self) -> None:
        """All of the memory will be used."""
        self.grow()
        self._device.trim(0.0)

    def open_for(self, modules: Iterable[nn.Module]) -> None:
        """Much of the memory will be used, if what training keeps for the parameters of
        these modules says so."""
        capacity_bytes = self._device.capacity_bytes()
        if capacity_bytes is None:
            return
        trained_bytes = _trained_bytes(modules, self._device.torch_device.type)
        if NUM_KEPT * trained_bytes > EARLY_SHARE * capacity_bytes:
            self.open()

    def trim(self) -> None:
        """Empty the cache if most of the memory is reserved."""
        if not self._device.trim():
            return
        self.grow()
        level = self._device.memory()
        if level is not None:
            self.stuck_bytes = level.reserved_bytes - level.allocated_bytes

    def grow(self) -> None:
        """Have segments grow from now on, if they may. Asked once."""
        if self._undo is not None:
            return
        reason, self._undo = self._obstacle, _nothing
        if not reason:
            reason, self._undo = self._device.grow_segments()
        self.segments = f"{WHOLE}: {reason}" if reason else GROWING
        logger.info("ssdtrain: memory is short, segments: %s", self.segments)

    def close(self) -> None:
        """Put back what was set. Idempotent."""
        if self._undo is not None and not self._owner.is_elsewhere:
            self._undo()
            self._undo = _nothing


def _trained_bytes(modules: Iterable[nn.Module], kind: str) -> int:
    """Return the bytes of this rank's parts of what is trained on such a device."""
    trained = {
        each
        for module in modules
        for each in nn.Module.parameters(module)
        if each.requires_grad and each.device.type == kind and not is_lazy(each)
    }
    found = 0
    for each in trained:
        wrapper = unwrapped(each)
        part = each if wrapper is None else wrapper.local
        found += part.numel() * part.element_size()
    return found


def _nothing() -> None:
    """There is nothing to undo."""

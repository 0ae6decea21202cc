"""Room for an optimizer's state, in a device whose memory is nearly used up.

[Note: torn blocks]
A caching allocator gives tensors parts of the blocks that larger ones left, and a block
can be used as a whole, or be given back, only when all of its parts are free again.
What an optimizer allocates in its first step stays forever. Where memory is short it
would tear the blocks of logits and of whole layers, and there is no room for the others
that the next step needs. So just before that step what is cached goes back to the
device: the state gets blocks of its own. For the same reason it goes back before each
step in which all regions run again, the first ones and those that are measured, and
where a plan is taken: the blocks are those that other tensors have left. What it costs
are the allocations of one step, and only where most of the memory is reserved.
(tests/ssdtrain/observe/test_room.py)
"""

from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer

from ssdtrain.forks import Owner
from ssdtrain.transfer.device import Device


class Room:
    """Empties the cache before the first step of every optimizer."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._owner = Owner()
        self._seen: WeakSet[Optimizer] = WeakSet()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """For `torch.optim.optimizer.register_optimizer_step_pre_hook`."""
        if optimizer in self._seen or self._owner.is_elsewhere:
            return
        self._seen.add(optimizer)
        if not optimizer.state:
            self._device.trim()

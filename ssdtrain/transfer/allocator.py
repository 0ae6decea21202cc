"""Torch's caching allocator: segments that grow, the segment of a graph, shortages.

[Note: growing segments]
A segment of `cudaMalloc` goes back as a whole: one small tensor that lives holds all of
it. `expandable_segments` maps pages one after another, and takes single pages back. The
setting is the process's, and holds for what is allocated from then on. It stays as it
is where the user's settings name it, another allocator is in use, NCCL registers
segments (it refuses those that grow) or a CUDA graph was captured (its addresses must
stay). The last session that asked for it puts it back.
(tests/ssdtrain/transfer/test_allocator.py)

[Note: one segment]
A captured graph has a pool of its own, which stays as large as it was at most. Memory
of different segments is never joined: what a plan frees in small pieces serves no
large tensor. So what a plan needs at most is taken as one piece when the captured
forward begins, and given back to the pool, which cuts all later tensors from it.
(tests/ssdtrain/transfer/test_allocator.py)
"""

import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)

NAME = "expandable_segments"
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""What users set; torch reads the first one that is there."""
REGISTERING = (
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)
"""With one of them NCCL registers every segment."""
NEVER_SPLIT = "max_split_size_mb"
"""Where the user sets it, nothing would be cut from a graph's segment."""
SPARE_BYTES = 16 * 1024 * 1024
"""A prediction is right to some kilobytes, but a segment that is too small by one
tensor is of no use. Of 28 layers that allocate 2.442 GB at most, 2.649 GB are reserved
without it, and 2.487 GB with it."""
LEAST_BYTES = 256 * 1024 * 1024
"""Of a smaller pool little is lost."""


class TorchAllocator:
    """The one of CUDA."""

    def backend(self) -> str:
        """`native`, unless the user chose another."""
        return torch.cuda.get_allocator_backend()

    def settings(self) -> str | None:
        """What was set last, at run time or by the environment; None: this torch does
        not tell (2.11)."""
        get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
        return None if get is None else str(get())

    def set(self, settings: str) -> None:
        """Set all settings: those that are not named get their defaults."""
        own: Any = torch._C
        own._accelerator_setAllocatorSettings(settings)

    def grows(self) -> bool:
        """Whether new segments grow, as the allocator itself says: where the driver
        cannot, it takes the setting and does nothing."""
        found = torch.cuda.memory._snapshot().get("allocator_settings", {})
        return bool(found.get(NAME, False))


class GrowingSegments:
    """The setting of one process, for all who ask for it: [Note: growing segments]."""

    def __init__(
        self,
        allocator: TorchAllocator | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._allocator = allocator or TorchAllocator()
        self._environment = environment
        self._lock = threading.Lock()
        self._num_users = 0
        self._before = ""
        self._set = ""

    def use(self) -> tuple[str, Callable[[], None]]:
        """Have new segments grow.

        Returns:
            Why they do not, "" if they do; and what undoes it, to be called once.
        """
        with self._lock:
            reason = "" if self._num_users else self._begin()
            if reason:
                return reason, lambda: None
            self._num_users += 1
            return "", self._leave

    def _begin(self) -> str:
        own = self._allocator
        if own.backend() != "native":
            return f"the allocator is {own.backend()}"
        told = own.settings()
        get = self._environment.get
        by_user = next(filter(None, map(get, VARIABLES)), "")
        for settings in (told or "", by_user):
            if NAME in settings:
                return f"it is set already ({settings})"
        for name in REGISTERING:
            if get(name, "0").lower() not in ("", "0", "false"):
                return f"NCCL registers segments ({name})"
        self._before = told or by_user
        self._set = _joined(self._before, f"{NAME}:True")
        try:
            own.set(self._set)
            grows = own.grows()
        except (AttributeError, RuntimeError, ValueError) as error:
            self._restore()
            return f"torch refused it: {error}"
        if not grows:
            self._restore()
            return "the driver cannot"
        return ""

    def _leave(self) -> None:
        with self._lock:
            self._num_users -= 1
            told = self._allocator.settings()
            # Whoever has changed it meanwhile knows why.
            if not self._num_users and told in (None, self._set):
                self._restore()

    def _restore(self) -> None:
        try:
            self._allocator.set(_joined(self._before, f"{NAME}:False"))
        except (AttributeError, RuntimeError, ValueError) as error:
            logger.warning("ssdtrain: %s stays set: torch refused %s", NAME, error)


def _joined(*settings: str) -> str:
    return ",".join(each for each in settings if each)


def begin_with(
    num_bytes: int, device: torch.device, allocator: TorchAllocator | None = None
) -> bool:
    """Take one segment for a graph that needs so many bytes at most, inside its
    capture, if the allocator would cut it and the device has it: [Note: one segment].

    Returns:
        Whether it was taken.
    """
    if device.type != "cuda" or num_bytes < LEAST_BYTES:
        return False
    own = allocator or TorchAllocator()
    told = (own.settings(), *map(os.environ.get, VARIABLES))
    if own.backend() != "native" or any(NEVER_SPLIT in each for each in told if each):
        return False
    wanted_bytes = num_bytes + SPARE_BYTES
    if torch.cuda.mem_get_info(device)[0] < wanted_bytes:
        return False
    stream = torch.cuda.current_stream(device)
    address = torch.cuda.caching_allocator_alloc(wanted_bytes, device.index, stream)
    torch.cuda.caching_allocator_delete(address)
    return True


Observer = Callable[[int, int, int, int], None]
"""Device, bytes that were asked for, bytes that the device has, bytes free on it."""


def attach_observer(observer: Observer) -> None:
    """Attach it to torch's allocator; nothing where this torch cannot."""
    to = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if to is not None:
        to(observer)


class Shortages:
    """Who hears of it before the allocator says that there is no memory left.

    Torch calls an observer after the last try, in whichever thread asked for memory,
    and never takes it off. So one is attached for the process, once somebody wants to
    hear, and it asks who still does. What a listener raises takes the place of torch's
    own error, in a backward as well. (tests/ssdtrain/transfer/test_allocator.py)
    """

    def __init__(self, attach: Callable[[Observer], None] = attach_observer) -> None:
        self._attach = attach
        self._is_attached = False
        self._lock = threading.Lock()
        self._listeners: dict[int, tuple[int, Callable[[int], None]]] = {}
        self._numbers = itertools.count()

    def listen(self, device: int, hear: Callable[[int], None]) -> Callable[[], None]:
        """Have `hear` called with the bytes that were asked for on this device and are
        not there. It may raise.

        Returns:
            What ends it. Idempotent.
        """
        with self._lock:
            if not self._is_attached:
                self._attach(self._observe)
                self._is_attached = True
            number = next(self._numbers)
            self._listeners[number] = device, hear
        return lambda: self._listeners.pop(number, None) and None

    def _observe(self, device: int, asked: int, total: int, free: int) -> None:
        for own, hear in list(self._listeners.values()):
            if own == device:
                hear(asked)


GROWING = GrowingSegments()
SHORTAGES = Shortages()
"""Both of this process."""

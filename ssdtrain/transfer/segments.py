"""Segments of torch's caching allocator that grow, where memory is short.

[Note: growing segments]
A segment as `cudaMalloc` gives it goes back as a whole, or not at all: one small tensor
that lives holds all of it, and what is free in it serves only what is smaller. The
allocator's other kind (`expandable_segments`) maps pages of 2 or 20 MiB behind one
another, and takes single pages back. Which kind it takes may be changed at any time: it
holds for what is allocated from then on, blocks of both kinds live beside one another,
and what is cached of the other kind goes when the cache is emptied.

The kind is one of the process, not of a session, so it stays as it is where somebody
else has a say: where the user's own settings name it, where another allocator is in
use, where NCCL registers the allocator's segments (it refuses those that grow), where a
CUDA graph was captured (its memory has addresses that must stay), and where a drive
writes from device memory that was registered by `cudaMalloc`'s addresses. The last
session that asked puts it back: a tensor that is shared with another process
afterwards lies where it would without us.
(tests/ssdtrain/transfer/test_segments.py)
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

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


class Allocator(Protocol):
    """What is asked of torch's caching allocator."""

    def backend(self) -> str:
        """Its name."""

    def settings(self) -> str | None:
        """What was set last, at run time or by the environment; None: not known."""

    def set(self, settings: str) -> None:
        """Set all of them: those that are not named get their defaults."""

    def grows(self) -> bool:
        """Whether new segments grow."""


class TorchAllocator:
    """The one of CUDA."""

    def backend(self) -> str:
        """`native`, unless the user chose another."""
        return torch.cuda.get_allocator_backend()

    def settings(self) -> str | None:
        """Torch tells since 2.10."""
        get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
        return None if get is None else str(get())

    def set(self, settings: str) -> None:
        """By the function that this torch has: the older one, where it is there."""
        own: Any = torch._C
        older = getattr(own, "_cuda_cudaCachingAllocator_set_allocator_settings", None)
        (older or own._accelerator_setAllocatorSettings)(settings)

    def grows(self) -> bool:
        """As the allocator itself says: where the driver cannot, it takes the setting
        and does nothing."""
        found = torch.cuda.memory._snapshot().get("allocator_settings", {})
        return bool(found.get(NAME, False))


class GrowingSegments:
    """The setting of one process, for all who ask for it."""

    def __init__(
        self,
        allocator: Allocator | None = None,
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
                return reason, _nothing
            self._num_users += 1
            return "", self._leave

    def _begin(self) -> str:
        own = self._allocator
        if own.backend() != "native":
            return f"the allocator is {own.backend()}"
        told = own.settings()
        by_user = _first(self._environment, VARIABLES)
        for settings in (told or "", by_user):
            if NAME in settings:
                return f"it is set already ({settings})"
        for name in REGISTERING:
            if self._environment.get(name, "0").lower() not in ("", "0", "false"):
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


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


def _joined(*settings: str) -> str:
    return ",".join(each for each in settings if each)


def _nothing() -> None:
    """There is nothing to undo."""


GROWING = GrowingSegments()
"""Of this process."""

"""A CPU with an allocator to ask, as a GPU has: counts what operators allocate.

Its copies end at once: what a late one carries would be alive for longer, and how late
a thread is depends on the machine.
"""

import ctypes
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssdtrain.cache.keeper import CacheKeeper
from ssdtrain.rebuild import modes
from ssdtrain.transfer import offloader, pinned
from ssdtrain.transfer.device import CpuDevice, MemoryLevel
from ssdtrain.transfer.workers import Workers

COPYING = ("ssdtrain-store", "ssdtrain-load")
"""Threads of a `CpuDevice`."""


def copy_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the calling thread make the copies of every `CpuDevice`."""
    submit = Workers.submit

    def act(own: Workers, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if own._thread_name_prefix not in COPYING:
            return submit(own, function, *args)
        done: Future[Any] = Future()
        with modes.without_modes():
            done.set_result(function(*args))
        return done

    monkeypatch.setattr(Workers, "submit", act)


class Meter(TorchDispatchMode):
    """Bytes of all storages that operators of this thread made, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._host: dict[int, int] = {}
        """Where host memory begins, while it lives, and its bytes."""
        self._most_bytes = 0
        """Of all these storages, some of which may be gone."""
        self.peak_bytes = 0

    @property
    def now_bytes(self) -> int:
        """What is alive."""
        alive = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self._storages = alive
        self._most_bytes = sum(num_bytes for _, num_bytes in alive.values())
        return self._most_bytes

    def is_above(self, num_bytes: int) -> bool:
        """Whether more is alive: asks storages only where it may be."""
        return self._most_bytes > num_bytes and self.now_bytes > num_bytes

    def reset_peak(self) -> None:
        """The peak starts again from here."""
        self.peak_bytes = self.now_bytes

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is the host's."""
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if any(start <= at < start + size for start, size in [*self._host.items()]):
            return
        number = storage._cdata
        if number not in self._storages:  # held weakly, a number is not given again
            self._storages[number] = StorageWeakRef(storage), storage.nbytes()
            self._most_bytes += storage.nbytes()
            if self.is_above(self.peak_bytes):
                self.peak_bytes = self._most_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and count its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def page_aligned(self, num_bytes: int, ended: object = None) -> Tensor:
        """Host memory, which is not the device's."""
        memory = (ctypes.c_uint8 * (num_bytes + pinned.GRAIN_BYTES))()
        skip = -ctypes.addressof(memory) % pinned.GRAIN_BYTES
        start = ctypes.addressof(memory) + skip
        self._host[start] = num_bytes
        weakref.finalize(memory, self._host.pop, start).atexit = False
        view = (ctypes.c_uint8 * num_bytes).from_buffer(memory, skip)
        return torch.frombuffer(view, dtype=torch.uint8)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let every `CpuDevice` answer from this meter, and copy at once."""
        copy_at_once(monkeypatch)
        for module in (pinned, offloader):
            monkeypatch.setattr(module, "page_aligned", self.page_aligned)
        monkeypatch.setattr(
            CpuDevice,
            "memory",
            lambda device: MemoryLevel(self.now_bytes, 0, self.peak_bytes, 0),
        )
        monkeypatch.setattr(CpuDevice, "reset_peak", lambda device: self.reset_peak())
        # An allocator sees the hooks' own work as well.
        monkeypatch.setattr(modes, "ASKED", (lambda: 0, *modes.ASKED[1:]))
        # This one is a mode, under which no tensor is made again by a recipe.
        monkeypatch.setattr(CacheKeeper, "is_altered", lambda keeper: True)

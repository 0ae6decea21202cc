"""How much memory a step holds, with and without ssdtrain: on a GPU by the caching
allocator, on a CPU by an observer that hands every saved tensor back untouched."""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class MemorySample(NamedTuple):
    """Bytes held at a moment of the host's monotonic clock."""

    time_ns: int
    num_bytes: int


class MemoryMeter(Protocol):
    """A context manager around one step that sees how much memory it holds."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *failure: Any) -> None: ...

    def take(self) -> tuple[int, list[MemorySample]]:
        """Return the highest number of bytes and their curve since the last call."""


class _Held:
    """Holds a saved tensor for autograd and counts its storage."""

    __slots__ = ("_observer", "key", "tensor")

    def __init__(self, observer: "SavedObserver", tensor: Tensor, key: int) -> None:
        self._observer = observer
        self.tensor = tensor
        self.key = key

    def __del__(self) -> None:
        self._observer.release(self.key, self.tensor)


class SavedObserver:
    """Counts, around a step, the bytes of distinct storages that autograd keeps alive
    for backward, parameters and storages below `least_bytes` excluded; changes no
    value. Backward may run on another thread."""

    def __init__(self, least_bytes: int = 0) -> None:
        self._least_bytes = least_bytes
        self._lock = threading.RLock()  # a collection inside it may drop a holder
        self._holders: dict[int, int] = {}
        self._live_bytes = 0
        self._peak_bytes = 0
        self._samples: list[MemorySample] = []
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    @property
    def live_bytes(self) -> int:
        """Bytes of saved storages alive now."""
        return self._live_bytes

    def take(self) -> tuple[int, list[MemorySample]]:
        """Return the highest `live_bytes` and its curve since the last call."""
        with self._lock:
            peak, samples = self._peak_bytes, self._samples
            self._peak_bytes, self._samples = self._live_bytes, []
        return peak, samples

    def __enter__(self) -> "SavedObserver":
        self._hooks.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._hooks.__exit__(*failure)

    def _pack(self, tensor: Tensor) -> "Tensor | _Held":
        base = tensor if tensor._base is None else tensor._base
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if isinstance(base, nn.Parameter) or not plain:
            return tensor
        if tensor.untyped_storage().nbytes() < self._least_bytes:
            return tensor
        # While a holder lives its storage does, so the key cannot be reused.
        key = tensor.untyped_storage()._cdata
        with self._lock:
            count = self._holders.get(key, 0)
            self._holders[key] = count + 1
            if count == 0:
                self._change(tensor.untyped_storage().nbytes())
        # Detached: a node that saves its own result would otherwise hold itself.
        return _Held(self, tensor.detach(), key)

    @staticmethod
    def _unpack(held: "Tensor | _Held") -> Tensor:
        return held.tensor if isinstance(held, _Held) else held

    def release(self, key: int, tensor: Tensor) -> None:
        """Count a storage less: autograd dropped the object that held it."""
        with self._lock:
            self._holders[key] -= 1
            if self._holders[key] == 0:
                del self._holders[key]
                self._change(-tensor.untyped_storage().nbytes())

    def _change(self, num_bytes: int) -> None:
        self._live_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        self._samples.append(MemorySample(time.monotonic_ns(), self._live_bytes))


class SampledWatch:
    """Reads a byte count every `interval_s` seconds on a thread of its own, from
    entering to leaving, and no longer than the main thread lives."""

    def __init__(self, read: Callable[[], int], interval_s: float = 0.002) -> None:
        self._read = read
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[MemorySample] = []

    def take(self) -> tuple[int, list[MemorySample]]:
        """Return the highest sample and the curve since the last call."""
        samples, self._samples = self._samples, []
        return max((sample.num_bytes for sample in samples), default=0), samples

    def __enter__(self) -> "SampledWatch":
        self._stop.clear()
        # No daemon: at the interpreter's end that would be killed inside a C++ call,
        # which aborts the process.
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._samples.append(MemorySample(time.monotonic_ns(), self._read()))
            if self._stop.wait(self._interval_s):
                return
            if not threading.main_thread().is_alive():  # nobody leaves any more
                return


class AllocatorWatch:
    """The caching allocator's bytes above their level at the start of the step.
    `alone`: nobody else reads its maximum, so it may be reset; otherwise the highest
    sample is used."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._base_bytes = 0
        self._peak_bytes = 0
        self._sampled = SampledWatch(
            lambda: torch.cuda.memory_allocated() - self._base_bytes
        )

    def take(self) -> tuple[int, list[MemorySample]]:
        """Return the allocator's maximum (sampled if not alone) and the curve."""
        sampled, samples = self._sampled.take()
        return (self._peak_bytes if self._alone else sampled), samples

    def __enter__(self) -> "AllocatorWatch":
        torch.cuda.synchronize()
        if self._alone:
            torch.cuda.reset_peak_memory_stats()
        self._base_bytes = torch.cuda.memory_allocated()
        self._sampled.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        try:
            torch.cuda.synchronize()
        finally:
            self._sampled.__exit__(*failure)
        self._peak_bytes = torch.cuda.max_memory_allocated() - self._base_bytes

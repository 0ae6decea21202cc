"""Host memory after unified tensors: who owns it, who works on it.

A unified tensor is an ordinary `torch.Tensor` whose storage points at host memory. The
storage does not own that memory: a `Region`, kept as an attribute of the storage, does.

[Note: The storage keeps the region] PyTorch preserves the Python object of a storage
as long as the C++ storage lives, whichever wrapper is asked. So the region, and with it
the memory, lives exactly as long as the last tensor, view or saved-for-backward alias
on the storage, and is found again from any of them. GPU work in flight is covered by
`pydirect.memory`, which waits for the devices before memory is reused or unpinned.

[Note: Two sides of one memory] A GPU works on its stream's time, the host at once. The
region remembers the streams that have read and written it; before the host reads it
waits for the writers, and before the host writes it waits for both.

[Note: Versions across aliases] Autograd notices that a saved tensor was changed in
place by its version counter, and an alias on another device has a counter of its own.
Aliases that autograd may have saved are therefore remembered weakly and bumped whenever
the region is written.
"""

import functools
import threading
from typing import cast

import torch
from torch.utils.weak import TensorWeakRef

from pydirect.errors import PlacementError
from pydirect.gather.front import BoundTable
from pydirect.memory import (
    Reach,
    device_alias,
    empty_pinned,
    empty_table,
    pin,
    reach,
)
from pydirect.placement import Affinity

DEVICE_TYPE = "unified"
_ATTRIBUTE = "_pydirect_region"
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Region:
    """One piece of host memory, its affinity, its aliases and its pending GPU work."""

    def __init__(self, host: torch.Tensor, affinity: Affinity) -> None:
        """``host``: contiguous uint8 CPU tensor at the start of its storage."""
        self.host = host.untyped_storage()
        """CPU storage: keeps the memory. Pools round up: it may be longer."""
        self.num_bytes = host.numel()
        self.affinity = affinity
        self._flat = host
        self._is_managed = reach_here(host) is Reach.MANAGED
        self._device_storages: dict[torch.device, torch.UntypedStorage] = {}
        self.prepared: dict[object, BoundTable] = {}
        """Tables over the memory, made ready for gathers; pinned as long as we live."""
        self._writers: set[torch.cuda.Stream] = set()
        self._readers: set[torch.cuda.Stream] = set()
        self._reading: set[tuple[int, int]] = set()
        self._saved: list[TensorWeakRef] = []
        self.lock = threading.Lock()
        """Held while a gradient is added: backward runs in several threads."""

    @property
    def is_shared(self) -> bool:
        """Whether other processes can map the memory."""
        return bool(self.num_bytes) and self.host.is_shared()

    def on_device(self, device: torch.device) -> torch.UntypedStorage:
        """A CUDA storage over the same bytes; pins the memory at the first call."""
        storage = self._device_storages.get(device)
        if storage is None:
            self._flat = pin(self._flat)
            storage = device_alias(self._flat, device).untyped_storage()
            self._device_storages[device] = storage
        return storage

    def wait_for_gpu(self, *, before_write: bool) -> None:
        """Let the host work on the memory: see [Note: Two sides of one memory].

        Raises:
            PlacementError: managed memory in a forked process, which cannot touch it.
        """
        if in_forked_worker():
            if self._is_managed:
                raise PlacementError(
                    "a unified tensor of the parent process was used in a forked one, "
                    "which cannot touch GPU-managed memory: call share_memory_() on it "
                    "before the fork, or start workers by spawn"
                )
            return  # The parent has waited before the fork: `pydirect.sharing`.
        for stream in self._writers:
            stream.synchronize()
        self._writers.clear()
        if before_write:
            for stream in self._readers:
                stream.synchronize()
            self._readers.clear()
            self._reading.clear()

    def note_gathers(self, device: torch.device) -> None:
        """As `note_gpu_work` for reads, for work that is queued again and again."""
        handle = torch._C._cuda_getCurrentRawStream(device.index)
        if (device.index, handle) not in self._reading:
            self._reading.add((device.index, handle))
            self._readers.add(torch.cuda.current_stream(device))

    def note_gpu_work(self, stream: torch.cuda.Stream, *, wrote: bool) -> None:
        """``stream`` has been given work on the region."""
        (self._writers if wrote else self._readers).add(stream)

    def track(self, alias: torch.Tensor) -> None:
        """Remember an alias that autograd may save."""
        self._saved = [ref for ref in self._saved if ref() is not None]
        self._saved.append(TensorWeakRef(alias))

    def note_write(self) -> None:
        """See [Note: Versions across aliases]."""
        alive = [alias for ref in self._saved if (alias := ref()) is not None]
        self._saved = [TensorWeakRef(alias) for alias in alive]
        if alive:
            torch.autograd.graph.increment_version(alive)


def region_of(tensor: torch.Tensor) -> Region:
    """The region of a unified tensor.

    Raises:
        ValueError: ``tensor`` is not unified.
    """
    if tensor.device.type != DEVICE_TYPE:
        raise ValueError(
            f"expects a unified tensor, got one on {tensor.device}: make it with "
            '.to("unified") or pydirect.unify(tensor)'
        )
    return region_of_storage(tensor.untyped_storage())


def region_of_storage(storage: torch.UntypedStorage) -> Region:
    """The region of a unified storage; an empty one for a storage of no bytes.

    Raises:
        ValueError: a storage without memory.
    """
    region = getattr(storage, _ATTRIBUTE, None)
    if isinstance(region, Region):
        return region
    if storage.nbytes() == 0:
        return allocate(0, Affinity.GPU)
    if storage.data_ptr() == 0:
        raise ValueError(
            "expects memory, got a raw storage without any on the unified device: make "
            "tensors, not storages, there"
        )
    return _borrowed(storage)


def _borrowed(storage: torch.UntypedStorage) -> Region:
    """PyTorch's own C++ code made a storage over our memory, for one call (saving)."""
    raw = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        cast(torch.UntypedStorage, raw)
    )
    return Region(flat, Affinity.HOST)


def copy_region(
    source: torch.UntypedStorage, num_bytes: int, affinity: Affinity
) -> Region:
    """New memory with the first bytes of a CPU storage."""
    made = allocate(num_bytes, affinity)
    read, write = (
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)[:num_bytes]
        for storage in (source, made.host)
    )
    write.copy_(read)
    return made


def show(region: Region) -> torch.UntypedStorage:
    """A new unified storage over ``region``; see [Note: The storage keeps the region].

    ``torch._C._construct_storage_from_data_pointer`` makes a storage that owns nothing.
    """
    raw = torch._C._construct_storage_from_data_pointer(
        region.host.data_ptr(), torch.device(DEVICE_TYPE, 0), region.num_bytes
    )
    storage = cast(torch.UntypedStorage, raw)
    setattr(storage, _ATTRIBUTE, region)
    return storage


def tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int = 0,
) -> torch.Tensor:
    """A tensor on a unified storage. ``offset`` and ``stride`` in elements."""
    tensor = torch._C._acc.create_empty_tensor((0,), dtype)
    set_storage(tensor, storage, offset, size, stride)
    return tensor


def set_storage(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> None:
    """Let a unified tensor show other memory or another part of it.

    The CPU kernel is asked: it looks at sizes and never at the bytes.
    """
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
            _CPU_KEYS, tensor, storage, offset, size, stride
        )


def allocate(num_bytes: int, affinity: Affinity) -> Region:
    """New memory from the pools; plain in a forked worker and without a GPU.

    GPU-affine memory is what random reads of a GPU are fastest on (`empty_table`);
    host-affine memory is pinned, which forked workers may read too. A forked child of
    a process that uses CUDA must not touch CUDA: what it makes is plain memory of host
    affinity, whatever was asked for (``u[0] = 7`` makes a unified scalar for the 7).
    """
    if in_forked_worker():
        return Region(
            torch.empty(num_bytes, dtype=torch.uint8, device="cpu"), Affinity.HOST
        )
    if num_bytes == 0:
        host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    elif affinity is Affinity.GPU:
        host = empty_table((num_bytes,), torch.uint8)
    else:
        host = empty_pinned((num_bytes,), torch.uint8)
    return Region(host, affinity)


def reach_here(host: torch.Tensor) -> Reach:
    """How GPUs reach a CPU tensor; NONE where this process must not ask."""
    return Reach.NONE if in_forked_worker() else reach(host)


def in_forked_worker() -> bool:
    """Whether CUDA was used before this process was forked.

    PyTorch says so where CUDA was only asked for, too: then there is nothing to miss.
    """
    return _had_gpu() and bool(torch.cuda._is_in_bad_fork())


@functools.cache
def _had_gpu() -> bool:
    """Asked before any fork, by the first allocation."""
    return torch.cuda.is_available()


def alias(
    tensor: torch.Tensor, storage: torch.UntypedStorage, device: torch.device
) -> torch.Tensor:
    """``tensor``'s geometry (and conj and neg bits) on another storage of its bytes."""
    shown = torch.empty(0, dtype=tensor.dtype, device=device).set_(
        storage, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    if tensor.is_conj():
        shown = shown.conj()
    return torch._neg_view(shown) if tensor.is_neg() else shown


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a CPU tensor as uint8, shape (storage bytes,)."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        tensor.untyped_storage()
    )

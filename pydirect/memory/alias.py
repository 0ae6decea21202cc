"""CUDA tensors over host memory: zero-copy access for every CUDA kernel.

[Note: Aliases through DLPack] PyTorch builds a tensor over foreign memory from
`__cuda_array_interface__` or from DLPack. The first asks the driver which device the
pointer belongs to, and for host memory that is whichever device was current when it was
pinned: an alias for another GPU would silently be a copy of the whole table. DLPack
names the device.
"""

import ctypes
from collections.abc import Sequence

import torch

from pydirect.memory import runtime
from pydirect.memory.pinning import Pinnable, is_pinned, pin
from pydirect.memory.pool import empty_table

_DL_CPU, _DL_CUDA, _DL_UINT = 1, 2, 1


class _DLManagedTensor(ctypes.Structure):
    """The struct of DLPack before its version 1, flattened."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("num_dimensions", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("holder", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def _give_up(managed: "ctypes._Pointer[_DLManagedTensor]") -> None:
    """The last alias has died: give up the reference that `bytes_on` took. The struct
    belongs to the holder, so it is gone after this."""
    ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(managed.contents.holder))


_drop = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))(_give_up)


def device_alias(host: torch.Tensor, device: torch.device | str | int) -> torch.Tensor:
    """A tensor on ``device`` over the memory of ``host``: no byte is copied.

    Writes through either are seen by the other, after the usual synchronisation. The
    alias keeps the host memory alive, and the memory outlives GPU work on the alias.
    With ``device="cpu"`` (no GPU) the alias is a view.

    Args:
        host: contiguous CPU tensor from `pin`, `empty_pinned` or torch's pin_memory.
        device: CUDA device, or "cpu".

    Raises:
        ValueError: ``host`` is not pinned, not contiguous or not on the CPU.
    """
    target = torch.device("cuda", device) if isinstance(device, int) else device
    target = torch.device(target)
    if host.device.type != "cpu" or not host.is_contiguous():
        raise ValueError(
            f"device_alias expects a contiguous CPU tensor, got {host.device} with "
            f"strides {host.stride()}"
        )
    if target.type == "cpu":
        return host.view(host.shape)
    if target.type != "cuda" or not runtime.cuda_works():
        raise ValueError(f"device_alias expects a CUDA device, got {target}")
    if host.numel() == 0:
        return torch.empty(host.shape, dtype=host.dtype, device=target)
    if not is_pinned(host):
        raise ValueError(
            f"device_alias expects pinned memory, got a tensor of {host.nbytes} bytes "
            "that is not: pass it through pydirect.memory.pin first"
        )
    # Pinned by somebody else, it would be unpinned with their last alias.
    host = pin(host)
    gpu = torch.cuda.current_device() if target.index is None else target.index
    with torch.cuda.device(gpu):
        flat = bytes_on(host, _DL_CUDA, gpu)
    return flat.view(host.dtype).view(host.shape)


def bytes_on(host: torch.Tensor, device_type: int, device_id: int) -> torch.Tensor:
    """The bytes of ``host`` as a uint8 tensor on a DLPack device, holding ``host``.

    See [Note: Aliases through DLPack].
    """
    return _bytes_at(host.data_ptr(), host.nbytes, (device_type, device_id), host)


def cuda_bytes(
    address: int, num_bytes: int, device: torch.device, owner: object
) -> torch.Tensor:
    """A uint8 tensor on a GPU over memory that it reads; holds ``owner``."""
    gpu = torch.cuda.current_device() if device.index is None else device.index
    return _bytes_at(address, num_bytes, (_DL_CUDA, gpu), owner)


def _bytes_at(
    address: int, num_bytes: int, device: tuple[int, int], owner: object
) -> torch.Tensor:
    shape, stride = (ctypes.c_int64 * 1)(num_bytes), (ctypes.c_int64 * 1)(1)
    managed = _DLManagedTensor(
        data=address,
        device_type=device[0],
        device_id=device[1],
        num_dimensions=1,
        type_code=_DL_UINT,
        type_bits=8,
        type_lanes=1,
        shape=shape,
        strides=stride,
        byte_offset=0,
        deleter=ctypes.cast(_drop, ctypes.c_void_p),
    )
    holder = (owner, shape, stride, managed)
    managed.holder = id(holder)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new_capsule(ctypes.addressof(managed), b"dltensor", None)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))
    return torch.utils.dlpack.from_dlpack(capsule)


class HostTable:
    """Rows of equal size in host memory that GPUs read in place.

    Build it once for a feature matrix; `pydirect.gather.index_select` takes it (or its
    ``tensor``). Aliases are made on first use and kept.
    """

    def __init__(self, source: Pinnable) -> None:
        """Pin ``source`` in place; see `pydirect.memory.pin`.

        Raises:
            ValueError: ``source`` has no dimension, or cannot be pinned.
        """
        self.tensor = pin(source)
        """CPU tensor, shape (num_rows, ...)."""
        if self.tensor.dim() == 0:
            raise ValueError("HostTable expects at least one dimension (the rows)")
        self._aliases: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def empty(
        cls, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> "HostTable":
        """An uninitialised table; see `pydirect.memory.empty_table`."""
        return cls(empty_table(shape, dtype))

    @property
    def num_rows(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        rows = max(1, self.num_rows)
        return self.tensor.nbytes // rows

    @property
    def is_pinned(self) -> bool:
        return is_pinned(self.tensor)

    def alias(self, device: torch.device | str | int) -> torch.Tensor:
        """The table as a tensor on ``device``, without a copy."""
        key = torch.device("cuda", device) if isinstance(device, int) else device
        key = torch.device(key)
        if key not in self._aliases:
            self._aliases[key] = device_alias(self.tensor, key)
        return self._aliases[key]

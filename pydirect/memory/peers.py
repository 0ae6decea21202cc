"""GPU memory that the GPUs of other processes read in place (CUDA IPC).

[Note: A block of its own] A handle names a whole allocation, so what is shared does not
come from PyTorch's allocator, whose blocks hold other tensors too. The block is freed
once no tensor over it is left in this process; other processes must have let go of it
by then, which `pydirect.ranks` sees to.
"""

import ctypes

import torch

from pydirect.kernels.driver import driver
from pydirect.memory.alias import cuda_bytes

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Block:
    """Device memory that is freed, or closed, with this object."""

    def __init__(self, address: int, release: str) -> None:
        self.address = address
        self._release = getattr(driver().library, release)

    def __del__(self) -> None:
        # The driver waits for kernels that may still read. A refusal (the context is
        # gone at the end of a process) has nobody to be told.
        self._release(ctypes.c_uint64(self.address))


def create_block(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, bytes]:
    """Memory of ``device``: uint8, shape (num_bytes,), and its handle for others.

    Raises:
        CudaDriverError: not enough memory, or no CUDA IPC on this machine.
    """
    if num_bytes < 1:
        raise ValueError(f"num_bytes: expects at least 1, got {num_bytes}")
    with torch.cuda.device(device):
        address, handle = ctypes.c_uint64(), _Handle()
        driver().call(
            "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes)
        )
        block = _Block(int(address.value), "cuMemFree_v2")
        driver().call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return cuda_bytes(block.address, num_bytes, device, block), bytes(handle)


def open_block(handle: bytes, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Another process's block, read by ``device``: uint8, shape (num_bytes,).

    Raises:
        CudaDriverError: the GPUs do not reach each other.
    """
    with torch.cuda.device(device):
        address = ctypes.c_uint64()
        driver().call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        block = _Block(int(address.value), "cuIpcCloseMemHandle")
        return cuda_bytes(block.address, num_bytes, device, block)

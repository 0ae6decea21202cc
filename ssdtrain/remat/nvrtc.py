"""Compile a CUDA kernel with NVRTC, which comes with PyTorch's CUDA wheels.

The machine needs no toolkit. Everything is loaded at the first call.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class KernelUnavailableError(RuntimeError):
    """This machine cannot compile or run the kernel; the text says why."""


class Kernel:
    """One loaded kernel of one device; it stays loaded as long as the process."""

    def __init__(
        self, cubin: bytes, name: str, device: torch.device, shared_bytes: int
    ) -> None:
        """Load `cubin`, with this much dynamic shared memory for a block.

        Raises:
            KernelUnavailableError: the device refuses it.
        """
        self._cuda = _cuda()
        self._device, self._shared_bytes = device, shared_bytes
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._context = ctypes.c_void_p()
        with torch.cuda.device(device):
            number = ctypes.c_int()
            index = torch.cuda.current_device()
            self._call("cuDeviceGet", ctypes.byref(number), index)
            context = ctypes.byref(self._context)
            self._call("cuDevicePrimaryCtxRetain", context, number)
            self._call("cuCtxSetCurrent", self._context)
            self._call("cuModuleLoadData", ctypes.byref(module), cubin)
            self._call(
                "cuModuleGetFunction",
                ctypes.byref(self._function),
                module,
                name.encode(),
            )
            self._call(
                "cuFuncSetAttribute", self._function, _MAX_SHARED_BYTES, shared_bytes
            )

    def launch(
        self, grid: int, block: int, tensors: Sequence[torch.Tensor], *numbers: int
    ) -> None:
        """Run on the current stream.

        Args:
            grid: blocks.
            block: threads of a block.
            tensors: passed as pointers, first.
            numbers: passed as `long long`, behind them.
        """
        values = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        wide = [ctypes.c_longlong(number) for number in numbers]
        each = [ctypes.addressof(value) for value in (*values, *wide)]
        with torch.cuda.device(self._device):
            # A thread that has called nothing of CUDA yet has no current context.
            self._call("cuCtxSetCurrent", self._context)
            stream = torch.cuda.current_stream().cuda_stream
            self._call(
                "cuLaunchKernel",
                self._function,
                *(ctypes.c_uint(size) for size in (grid, 1, 1, block, 1, 1)),
                ctypes.c_uint(self._shared_bytes),
                ctypes.c_void_p(stream),
                (ctypes.c_void_p * len(each))(*each),
                None,
            )

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise KernelUnavailableError(f"{name} failed with CUDA driver error {code}")


_MAX_SHARED_BYTES = 8


def load(source: Path, name: str, device: torch.device, shared_bytes: int) -> Kernel:
    """Compile `source` for `device` and load its kernel `name`.

    Raises:
        KernelUnavailableError: no NVRTC, no driver, or too little shared memory.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        raise KernelUnavailableError(f"expected a CUDA device, got {device}")
    properties: Any = torch.cuda.get_device_properties(device)
    limit = properties.shared_memory_per_block_optin
    if shared_bytes > limit:
        raise KernelUnavailableError(
            f"{name} needs {shared_bytes} bytes of shared memory, {device} has {limit}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_cubin(source, f"sm_{major}{minor}", torch.version.cuda)
    return Kernel(cubin, name, device, shared_bytes)


def compile_cubin(source: Path, architecture: str, cuda_version: str) -> bytes:
    """Machine code of `source` for `architecture` (`sm_90`).

    Raises:
        KernelUnavailableError: the compiler's log, or that there is none.
    """
    nvrtc, program = _library(cuda_version), ctypes.c_void_p()
    text = source.read_bytes()
    arguments = (text, source.name.encode(), 0, None, None)
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), *arguments))
    try:
        flags = (f"--gpu-architecture={architecture}", "--std=c++17")
        encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        size = ctypes.c_size_t()
        if nvrtc.nvrtcCompileProgram(program, len(flags), encoded):
            _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            raise KernelUnavailableError(f"{source.name}: {log.value.decode()}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(code: int) -> None:
    if code:
        raise KernelUnavailableError(f"NVRTC failed with error {code}")


def _library(cuda_version: str) -> ctypes.CDLL:
    name = f"libnvrtc.so.{cuda_version.split('.')[0]}"
    wheel = importlib.util.find_spec("nvidia")
    places = list(wheel.submodule_search_locations or []) if wheel else []
    found = [str(path) for place in places for path in Path(place).rglob(name)]
    for candidate in (*found, name, "libnvrtc.so"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise KernelUnavailableError(
        f"{name} was not found: it comes with PyTorch's CUDA wheels "
        "(nvidia-cuda-nvrtc) or a CUDA toolkit"
    )


def _cuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelUnavailableError("libcuda.so.1 was not found") from error

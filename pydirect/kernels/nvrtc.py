"""Compile CUDA C++ with NVRTC, which comes with PyTorch's CUDA wheels.

The machine needs no toolkit. The result is cached on disk under the hash of source,
options and compiler version: compiling takes about a second, loading a millisecond.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch

from pydirect.kernels.cache import cache_directory, read_private, write_atomically
from pydirect.kernels.driver import Handle, Module


class KernelCompileError(RuntimeError):
    """NVRTC rejected a kernel; the text is its log."""


def load_cubin(
    source: Path, device: torch.device, options: Sequence[str] = ()
) -> Module:
    """Compile ``source`` for ``device`` (or take it from the cache) and load it."""
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        return Module(compile_cubin(source, f"sm_{major}{minor}", tuple(options)))


def compile_cubin(source: Path, architecture: str, options: tuple[str, ...]) -> bytes:
    """Machine code of ``source`` for ``architecture`` (``sm_90``).

    Raises:
        KernelCompileError: the compiler's log.
        CacheDirectoryError: the cache is open to other users.
    """
    text = source.read_bytes()
    flags = (f"--gpu-architecture={architecture}", "--std=c++17", *options)
    key = hashlib.sha256(repr((text, flags, _version())).encode()).hexdigest()[:24]
    cached = cache_directory() / f"{source.stem}-{architecture}-{key}.cubin"
    with contextlib.suppress(FileNotFoundError):
        return read_private(cached)
    cubin = _compile(text, source.name, flags)
    write_atomically(cached, cubin)
    return cubin


def _compile(text: bytes, name: str, flags: Sequence[str]) -> bytes:
    nvrtc = _library()
    program = Handle()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), text, name.encode(), 0, None, None
        ),
        "nvrtcCreateProgram",
    )
    try:
        encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if nvrtc.nvrtcCompileProgram(program, len(flags), encoded):
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise KernelCompileError(f"{name} does not compile:\n{log.value.decode()}")
        size = ctypes.c_size_t()
        _check(
            nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize"
        )
        cubin = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(code: int, call: str) -> None:
    if code:
        raise KernelCompileError(f"{call} failed with NVRTC error {code}")


def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(
        _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)),
        "nvrtcVersion",
    )
    return major.value, minor.value


@functools.cache
def _library() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise KernelCompileError(
            "this PyTorch was built without CUDA: install a CUDA build to use GPU paths"
        )
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    wheel = importlib.util.find_spec("nvidia")
    places = list(wheel.submodule_search_locations or []) if wheel else []
    found = [str(p) for place in places for p in Path(place).rglob(name)]
    for candidate in (*found, name, "libnvrtc.so"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise KernelCompileError(
        f"{name} was not found: it comes with PyTorch's CUDA wheels "
        "(nvidia-cuda-nvrtc) or a CUDA toolkit"
    )

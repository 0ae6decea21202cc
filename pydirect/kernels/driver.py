"""The CUDA driver through ctypes: modules, launches, host memory in large pages.

Only what PyTorch does not offer. The driver library comes with the GPU driver, so this
adds no dependency; nothing is loaded before `driver()` is called.
"""

import ctypes
import functools
from typing import Any, NoReturn

import torch

Handle = ctypes.c_void_p


class CudaDriverError(RuntimeError):
    """A driver call failed; ``code`` is its CUresult."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed with CUDA driver error {code}: {text}")
        self.code = code


class Driver:
    """libcuda with checked calls."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        """For calls whose failure is an answer."""

    def call(self, name: str, *arguments: object) -> None:
        """Call ``name`` and raise `CudaDriverError` unless it succeeds."""
        code = int(getattr(self.library, name)(*arguments))
        if code:
            self.fail(name, code)

    def fail(self, name: str, code: int) -> NoReturn:
        """Raise `CudaDriverError` for what ``name`` returned."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(code, ctypes.byref(text))
        raise CudaDriverError(name, code, (text.value or b"unknown").decode())


@functools.cache
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        RuntimeError: there is none; install the NVIDIA driver.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(
            "libcuda.so.1 was not found: GPU kernels need the NVIDIA driver"
        ) from error
    torch.cuda.init()
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    return Driver(library)


_Parameters = ctypes.c_void_p * 1
# Declared, arguments are converted by ctypes itself, in a fraction of the time; each
# gather makes these calls.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuLaunchKernel": (
        Handle,
        *(ctypes.c_uint,) * 7,
        Handle,
        ctypes.POINTER(ctypes.c_void_p),
        Handle,
    ),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64),
}


class Kernel:
    """One function of a loaded module; callable with a struct of arguments."""

    def __init__(self, function: Handle) -> None:
        self._function = function
        # Looked up once: one call of a gather waits for what Python takes before it.
        self._launch = driver().library.cuLaunchKernel

    def launch(
        self, *, grid: int, block: int, arguments: ctypes.Structure, stream: int
    ) -> None:
        """Launch on ``stream`` (a raw handle) with one by-value struct."""
        parameters = _Parameters(ctypes.addressof(arguments))
        code = self._launch(
            self._function, grid, 1, 1, block, 1, 1, 0, stream, parameters, None
        )
        if code:
            driver().fail("cuLaunchKernel", int(code))


class Module:
    """A loaded cubin; it stays loaded as long as the process."""

    def __init__(self, cubin: bytes) -> None:
        """Load ``cubin`` into the current device's context."""
        self._module = Handle()
        driver().call("cuModuleLoadData", ctypes.byref(self._module), cubin)
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        """The ``extern "C"`` kernel of that name."""
        if name not in self._kernels:
            function = Handle()
            driver().call(
                "cuModuleGetFunction",
                ctypes.byref(function),
                self._module,
                name.encode(),
            )
            self._kernels[name] = Kernel(function)
        return self._kernels[name]

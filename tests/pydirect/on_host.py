"""CUDA kernels built for the CPU: they run where there is no GPU, thread by thread."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest


class HostKernel:
    """Launches like `pydirect.kernels.driver.Kernel`, on the CPU."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library = library
        self._function = ctypes.cast(getattr(library, name), ctypes.c_void_p)

    def launch(
        self, *, grid: int, block: int, arguments: ctypes.Structure, stream: int
    ) -> None:
        """Each kind of arguments has a function `run_<kind>` in the library."""
        name = type(arguments).__name__.removesuffix("Args").lower()
        run = getattr(self._library, f"run_{name}")
        run(self._function, grid, block, ctypes.byref(arguments))


class HostModule:
    """Looks kernels up like `pydirect.kernels.driver.Module`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def kernel(self, name: str) -> HostKernel:
        return HostKernel(self.library, name)


def build(source: Path, out: Path, *include: Path) -> HostModule:
    """Compile a file that includes the kernels; skips where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
    paths = [*(f"-I{path}" for path in include), str(source), "-o", str(out)]
    subprocess.run([*command, *paths], check=True)
    return HostModule(ctypes.CDLL(str(out)))

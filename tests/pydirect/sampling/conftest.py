"""sample.cu built for the CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from pydirect.sampling import on_gpu

HERE = Path(__file__).parent
PRODUCT = Path(on_gpu.__file__).parent


class HostKernel:
    """Launches like `pydirect.kernels.driver.Kernel`, on the CPU."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library = library
        self._function = ctypes.cast(getattr(library, name), ctypes.c_void_p)

    def launch(
        self, *, grid: int, block: int, arguments: ctypes.Structure, stream: int
    ) -> None:
        self._library.run_sample(self._function, grid, block, ctypes.byref(arguments))


class HostModule:
    """Looks kernels up like `pydirect.kernels.driver.Module`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def kernel(self, name: str) -> HostKernel:
        return HostKernel(self._library, name)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> on_gpu.GpuHopper:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    built = tmp_path_factory.mktemp("sample") / "sample.so"
    command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
    paths = [f"-I{PRODUCT}", str(HERE / "sample_on_host.cpp"), "-o", str(built)]
    subprocess.run([*command, *paths], check=True)
    return on_gpu.GpuHopper(HostModule(ctypes.CDLL(str(built))))

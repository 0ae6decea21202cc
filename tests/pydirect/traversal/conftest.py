"""visit.cu built for the CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from pydirect.traversal import on_gpu

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
        self._library.run_visit(self._function, grid, block, ctypes.byref(arguments))


class HostModule:
    """Looks kernels up like `pydirect.kernels.driver.Module`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def kernel(self, name: str) -> HostKernel:
        return HostKernel(self.library, name)


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> HostModule:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    built = tmp_path_factory.mktemp("visit") / "visit.so"
    command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
    paths = [f"-I{PRODUCT}", str(HERE / "visit_on_host.cpp"), "-o", str(built)]
    subprocess.run([*command, *paths], check=True)
    library = ctypes.CDLL(str(built))
    library.num_loads.restype = ctypes.c_longlong
    return HostModule(library)


@pytest.fixture(scope="session")
def kernels(module: HostModule) -> on_gpu.GpuVisitor:
    """The kernels, with few threads: on the host they run one after the other."""
    return on_gpu.GpuVisitor(module, num_blocks=3, threads=64)

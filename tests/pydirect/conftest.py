"""gather.cu built for the CPU, so that its logic runs where there is no GPU; and PyG,
which warns when it is imported, where warnings are errors."""

import ctypes
import importlib
import shutil
import subprocess
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import pydirect
from pydirect.kernels import gather as kernels

pydirect.enable()

HERE = Path(__file__).parent / "kernels"
PRODUCT = Path(kernels.__file__).parent


class HostKernel:
    """Launches like `Kernel`, on the CPU."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library = library
        self._function = ctypes.cast(getattr(library, name), ctypes.c_void_p)

    def launch(
        self, *, grid: int, block: int, arguments: ctypes.Structure, stream: int
    ) -> None:
        name = type(arguments).__name__.removesuffix("Args").lower()
        run = getattr(self._library, f"run_{name}")
        run(self._function, grid, block, ctypes.byref(arguments))


class HostModule:
    """Looks kernels up like `Module`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def kernel(self, name: str) -> HostKernel:
        return HostKernel(self._library, name)


@pytest.fixture(scope="session")
def host_module(tmp_path_factory: pytest.TempPathFactory) -> HostModule:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    built = tmp_path_factory.mktemp("kernels") / "gather.so"
    command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
    paths = [f"-I{HERE}", f"-I{PRODUCT}", str(HERE / "run_on_host.cpp")]
    subprocess.run([*command, *paths, "-o", str(built)], check=True)
    return HostModule(ctypes.CDLL(str(built)))


@pytest.fixture(scope="session")
def pyg() -> ModuleType:
    """torch_geometric with its layers, imported quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_geometric = pytest.importorskip("torch_geometric")
        importlib.import_module("torch_geometric.nn")
    return torch_geometric

"""visit.cu built for the CPU."""

import ctypes
from pathlib import Path

import pytest

from pydirect.traversal import on_gpu
from tests.pydirect.on_host import HostModule, build

SOURCE = Path(__file__).with_name("visit_on_host.cpp")
PRODUCT = Path(on_gpu.__file__).parent


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> HostModule:
    built = tmp_path_factory.mktemp("visit") / "visit.so"
    module = build(SOURCE, built, PRODUCT)
    module.library.num_loads.restype = ctypes.c_longlong
    return module


@pytest.fixture(scope="session")
def kernels(module: HostModule) -> on_gpu.GpuVisitor:
    """The kernels, with few threads: on the host they run one after the other."""
    return on_gpu.GpuVisitor(module, num_blocks=3, threads=64)

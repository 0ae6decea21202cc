"""sample.cu built for the CPU."""

from pathlib import Path

import pytest

from pydirect.sampling import on_gpu
from tests.pydirect.on_host import build

SOURCE = Path(__file__).with_name("sample_on_host.cpp")
PRODUCT = Path(on_gpu.__file__).parent


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> on_gpu.GpuHopper:
    built = tmp_path_factory.mktemp("sample") / "sample.so"
    return on_gpu.GpuHopper(build(SOURCE, built, PRODUCT))

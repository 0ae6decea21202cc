"""gather.cu built for the CPU, so that its logic runs where there is no GPU; and PyG,
which warns when it is imported, where warnings are errors."""

import importlib
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import pydirect
from pydirect.datasets import NodeDataset, load
from pydirect.kernels import gather as kernels
from pydirect.sampling import GraphStatistics
from tests.pydirect.on_host import HostModule, build

pydirect.enable()

HERE = Path(__file__).parent / "kernels"
PRODUCT = Path(kernels.__file__).parent


@pytest.fixture(scope="session")
def host_module(tmp_path_factory: pytest.TempPathFactory) -> HostModule:
    built = tmp_path_factory.mktemp("kernels") / "gather.so"
    return build(HERE / "run_on_host.cpp", built, HERE, PRODUCT)


@pytest.fixture(scope="session")
def pyg() -> ModuleType:
    """torch_geometric with its layers, imported quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_geometric = pytest.importorskip("torch_geometric")
        importlib.import_module("torch_geometric.nn")
    return torch_geometric


@pytest.fixture(scope="module")
def dataset() -> NodeDataset:
    """1,500 nodes in five classes, generated."""
    statistics = GraphStatistics(
        num_nodes=1500,
        num_edges=12_000,
        num_classes=5,
        num_features=16,
        train_share=0.3,
    )
    return load("generated", statistics=statistics, device="cpu")

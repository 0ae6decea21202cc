"""PyG warns when it is imported, and warnings are errors here."""

import warnings
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def pyg() -> ModuleType:
    """torch_geometric with its layers, imported quietly."""
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_geometric = pytest.importorskip("torch_geometric")
        import torch_geometric.nn
        import torch_geometric.utils  # noqa: F401
    return torch_geometric

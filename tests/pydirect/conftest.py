"""PyG warns when it is imported, and warnings are errors here."""

import importlib
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
        importlib.import_module("torch_geometric.nn")
    return torch_geometric

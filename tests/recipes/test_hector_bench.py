"""hector's tables: what they print."""

from typing import Any

from recipes.bench.rgnn.tables import batches
from tests.recipes.written import ENVIRONMENT


def test_tables() -> None:
    drawn: dict[str, Any] = {"nodes": 10, "edges": 20, "hector_ms": 1.0, "pyg_ms": 3.0}
    cells = {
        "batch/rgcn": {**drawn, "ratio": 3.0, "largest_loss_error": 1e-7},
        "captured/hgt/aifb": {**drawn, "captured_ms": 0.5, "ratio": 6.0},
        "captured/hgt/mutag": {"error": "out of time"},
    }
    settings = {"seeds": 8, "fanouts": [3, 2]}
    data = {"cells": cells, "settings": settings, "environment": ENVIRONMENT}
    text = batches(data)
    assert "| rgcn | 10 | 20 | 1.000 | 3.000 | 3.00 | 1.0e-07 |" in text
    assert "| hgt aifb | 1.000 | 0.500 | 3.000 | 6.00 |" in text
    assert "mutag" not in text

"""The model benchmark's cells on a CPU: the same paths, tiny sizes."""

import argparse

import pytest
import torch

from recipes.bench.models import evaluation as models
from recipes.bench.offload import placement, rivals

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["bert", "gpt", "t5"])
def test_every_column_trains_alike(family: str) -> None:
    row = models.Row(family, 64, 2, batch=2, sequence=32)
    options = argparse.Namespace(precision="bf16", optimizer="sgd", steps=5)
    columns = models.columns(row, None)
    cells = {
        name: models.run_cell(row, columns[name], options, CPU)
        for name in ("keep", "offloaded", "recompute")
    }
    first = cells["keep"]["losses"]
    assert len(set(first)) > 1
    for cell in cells.values():
        assert models.bits(cell["losses"]) == models.bits(first)


def test_rivals_come_with_the_full_model_alone() -> None:
    usual = models.columns(models.Row("gpt", 8192, 4), None)
    assert set(models.columns(models.FULL, None)) - set(usual) == {
        "transformers offload=True",
        "deepspeed hidden states",
    }
    assert "ssd" in models.columns(models.FULL, "/mnt")
    assert models.bits([float("nan")]) == models.bits([float("nan")])


def test_placement_rivals_compute_the_same_losses() -> None:
    """Dressed as layers of transformers the blocks stay what they are."""
    size = placement.Size(64, 2, 2, 16)
    keep = placement.run_column(size, placement.plain, CPU, 3)
    pytest.importorskip("deepspeed")
    other = placement.run_column(size, rivals.deepspeed_offload, CPU, 3)
    assert other["losses"] == keep["losses"]

"""Campaigns in blocks: reruns go on, and what several processes found is added up."""

import os
from pathlib import Path
from typing import Any

import pytest

from recipes.bench.harness.cells import Cells
from recipes.bench.harness.records import read
from recipes.bench.safety.blocks import run_campaign


def run_block(block: int) -> dict[str, Any]:
    """Four graphs a block; block 11 has a difference."""
    different = [{"seed": 44}] if block == 11 else []
    found = {"graphs": 4, "equal": 4 - len(different), "different": different}
    return {**found, "features": {"relu": 1, f"block {block}": 1}}


def dies(block: int) -> dict[str, Any]:
    """The second block ends its process."""
    if block == 1:
        os._exit(5)
    return run_block(block)


def campaign(
    path: Path, num_graphs: int, workers: int = 1, run: Any = run_block
) -> Any:
    run_campaign(Cells(path, 60, {}), run, num_graphs, workers=workers)
    return read(path)["cells"]["campaign"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_rerun_goes_on(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "mine.json"
    assert campaign(path, 8, workers)["blocks"] == 2
    sums = campaign(path, 20, workers)
    assert sums["graphs"] == sums["equal"] == 20 and sums["blocks"] == 5
    assert sums["features"] == {"relu": 5, **{f"block {n}": 1 for n in range(5)}}
    assert sum(sums["torch"].values()) == 5


def test_a_difference_ends_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with pytest.raises(SystemExit, match="1 different: see"):
        campaign(path, 48)
    assert read(path)["cells"]["campaign"]["different"] == [{"seed": 44}]


def test_a_block_whose_process_died_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with pytest.raises(SystemExit, match="1 different"):
        campaign(path, 40, 2, dies)
    sums = read(path)["cells"]["campaign"]
    assert sums["graphs"] <= 4 and "block" in sums["different"][0]

"""Campaigns in blocks: what several processes found is added up once and in full."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.bench.harness.cells import Cells
from recipes.bench.safety.blocks import add_up, run_campaign, verdict


def run_block(block: int) -> dict[str, Any]:
    """Four graphs a block; block 11 has a difference."""
    different = [{"seed": 44}] if block == 11 else []
    found = {"graphs": 4, "equal": 4 - len(different), "different": different}
    return {**found, "features": {"relu": 1, f"block {block}": 1}}


def campaign(path: Path, first: int, num_graphs: int, *add: Path) -> dict[str, Any]:
    cells = Cells(path, 60, {})
    return run_campaign(cells, run_block, num_graphs, first_block=first, add=add)


def test_a_rerun_goes_on_and_others_are_added(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine.json", tmp_path / "theirs.json"
    campaign(mine, 0, 8)
    assert campaign(mine, 0, 12)["ranges"] == {"0": 3}
    assert verdict(campaign(theirs, 10, 8), theirs) is not None
    sums = campaign(tmp_path / "sum.json", 0, 0, mine, theirs)
    assert sums["graphs"] == 20 and sums["equal"] == 19 and sums["blocks"] == 5
    assert sums["different"] == [{"seed": 44}]
    assert sums["ranges"] == {"0": 3, "10": 2}
    assert sums["features"]["relu"] == 5 and sums["features"]["block 2"] == 1
    assert sum(sums["torch"].values()) == 5


def test_no_block_counts_twice(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    sums = campaign(first, 0, 12)
    campaign(second, 2, 4)
    with pytest.raises(ValueError, match="blocks 2 to 2, which are counted already"):
        add_up(sums, second)


def test_a_block_whose_process_died_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert verdict(campaign(path, 0, 8), path) is None
    data = json.loads(path.read_text())
    data["cells"]["campaign"]["running"] = 2
    path.write_text(json.dumps(data))
    sums = campaign(tmp_path / "sum.json", 0, 0, path)
    assert sums["unended"] == [2] and verdict(sums, path) is not None
    campaign(tmp_path / "again.json", 2, 4)
    sums = campaign(tmp_path / "all.json", 0, 0, path, tmp_path / "again.json")
    assert "unended" not in sums and verdict(sums, path) is None

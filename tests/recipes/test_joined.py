"""The joined epoch."""

import json
from pathlib import Path

from recipes.bench.harness.cli import run as bench
from recipes.bench.rgnn import joined


def test_a_joined_epoch_has_one_loss_wherever_its_rows_lie(tmp_path: Path) -> None:
    out = tmp_path / "joined.json"
    words = ["--shrink", "2000", "--batches", "3", "--share", "0.3"]
    assert bench(["rgnn.joined", *words, "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert set(cells) == set(joined.PLACES)
    assert len({tuple(cell["losses"]) for cell in cells.values()}) == 1
    for cell in cells.values():
        assert cell["batches"] == 3 and cell["over_longest_stage"] > 0

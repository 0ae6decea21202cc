"""The joined epoch."""

import json
from pathlib import Path

import pytest

from recipes.bench.harness.cli import run as bench
from recipes.bench.rgnn import joined


@pytest.mark.filterwarnings("ignore")  # of PyG's import
def test_a_joined_epoch_has_one_loss_wherever_its_rows_lie(tmp_path: Path) -> None:
    out = tmp_path / "joined.json"
    words = ["--shrink", "2000", "--batches", "3", "--share", "0.3"]
    words += ["--max-sms", "16", "8"]
    assert bench(["rgnn.joined", *words, "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    fewer = {"direct, 8 SMs", "tiered, 8 SMs"}
    assert set(cells) == {*joined.PLACES, *joined.PYG, *fewer}
    ours = [cells[name]["losses"] for name in cells if not name.startswith("pyg")]
    assert all(losses == ours[0] for losses in ours)
    for name in joined.PYG:
        assert cells[name]["losses"] == pytest.approx(ours[0], rel=1e-6)
    for cell in cells.values():
        assert cell["batches"] == 3 and cell["over_longest_stage"] > 0

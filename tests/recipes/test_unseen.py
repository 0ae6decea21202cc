"""Models beside their checkpointing, tiny ones on a CPU."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from recipes.bench.harness.cli import run
from recipes.bench.models import unseen


def test_both_sides_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen, "BLOCKS", 2)
    monkeypatch.setattr(unseen, "STEPS", 1)
    out, names = tmp_path / "out.json", ["dit/=gc", "bert/=second", "llava/overhead"]
    # No turns are taken until the ratio is exact.
    words = "models.unseen --cpu --warm-s 1 --most-s 0".split()
    assert run([*words, "--out", str(out), "--only", *names]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert set(cells) == set(names)
    for name, cell in cells.items():
        assert "error" not in cell, cell
        assert cell["upper"] >= cell["ratio"] > 0
        assert cell["base"] == unseen.BASES.get(name.split("/")[1], "plain")

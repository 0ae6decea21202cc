"""Layers, captured mini-batches and the trainer on two processes (gloo)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hector.train import ranks_script as script

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found: one launch for all tests."""
    directory = tmp_path_factory.mktemp("ranks")
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    done = subprocess.run(
        [sys.executable, *launcher, str(HERE / "ranks_script.py"), str(directory)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "bucket view strides" not in done.stderr
    for name in script.TRAININGS:
        assert len((directory / name / "metrics.jsonl").read_text().splitlines()) == 4
    return [json.loads((directory / f"{r}.json").read_text()) for r in (0, 1)]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", script.KINDS)
def test_layers(ranks: list[dict[str, Any]], kind: str, captured: bool) -> None:
    """Bit by bit what one process computes that adds both ranks' gradients: a rank
    without some types, and one without nodes."""
    losses, weights = script.steps(kind, None, captured)
    for rank, found in enumerate(ranks):
        assert found[f"{kind} {captured}"] == [losses[rank::2], weights]


@pytest.mark.parametrize("name", ["full", "one batch"])
def test_the_trainer(ranks: list[dict[str, Any]], name: str, tmp_path: Path) -> None:
    """The losses of one process but for the order of sums, the same on both ranks."""
    alone = script.make(tmp_path, **script.TRAININGS[name]).train().losses
    assert ranks[0][name] == ranks[1][name] == pytest.approx(alone, rel=1e-12)
    assert len(set(alone)) == 4


def test_small_batches_learn_and_resume(ranks: list[dict[str, Any]]) -> None:
    losses = ranks[0]["small batches"]
    assert losses == ranks[1]["small batches"] and losses[-1] < losses[0]
    assert all(found["resumed"] == losses[2:] for found in ranks)

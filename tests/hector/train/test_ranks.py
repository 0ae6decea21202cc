"""Layers, captured mini-batches and the trainer on two processes (gloo)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hector.train import ranks_script as script
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found: one launch for all tests."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks([script.__file__, directory], directory)
    assert all(
        "bucket view strides" not in (directory / f"log{rank}").read_text()
        for rank in range(2)
    )
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


def test_rows_over_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """Where features lie changes no loss."""
    assert ranks[0]["peers"] == ranks[0]["device"] == ranks[1]["peers"]


def test_small_batches_learn_and_resume(ranks: list[dict[str, Any]]) -> None:
    losses = ranks[0]["small batches"]
    assert losses == ranks[1]["small batches"] and losses[-1] < losses[0]
    assert all(found["resumed"] == losses[2:] for found in ranks)

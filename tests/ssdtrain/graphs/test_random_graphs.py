"""A sample of the random-graph campaign (`recipes/bench/graphs.py` runs it large)."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import ssdtrain

sys.path.insert(0, str(Path(__file__).parent))
from generator import Holder, difference, outcome

NUM_GRAPHS = 200


@pytest.fixture(scope="module")
def theirs() -> list[dict[str, Any]]:
    """What plain autograd makes of the graphs, among which every feature is."""
    features: Counter[str] = Counter()
    holder = Holder()
    found = [outcome(holder, seed, features) for seed in range(NUM_GRAPHS)]
    assert min(features.values()) > 5, features
    return found


@pytest.mark.parametrize("target", ["host", "tiered"])
def test_random_graphs_equal_plain_autograd(
    target: str, everything: Any, tmp_path: Path, theirs: list[dict[str, Any]]
) -> None:
    settings = {"max_overhead": 0.01, **everything, "target": target}
    if target == "tiered":
        settings |= {"directory": str(tmp_path), "host_bytes": 64 << 10}
    holder, refusals = Holder(), 0
    with ssdtrain.offload(holder, **settings) as session:
        for seed, expected in enumerate(theirs):
            found = outcome(holder, seed, Counter())
            assert difference(found, expected) is None, (
                f"seed {seed}: {difference(found, expected)}"
            )
            refusals += "text" in expected
            del found
        moved = sum(step.bytes_offloaded for step in session.steps)
    assert moved > 0
    assert 0 < refusals < NUM_GRAPHS / 2

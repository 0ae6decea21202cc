"""A sample of the campaign `recipes/bench/safety/surprises.py`."""

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from surprises import (
    OPERATORS,
    PLANS,
    SURPRISES,
    difference,
    plain,
    raised_alone,
    train,
)

NUM_MODELS = 20
FOUND = 13962350714, 13962364582, 13962126760, 13962175533
"""What campaigns have found: modes that are gone when their work is saved, and recipes
that were to read what a compiled plan moves."""


@cache
def without(seed: int) -> tuple[Any, Counter[str]]:
    """What a model gives without ssdtrain, and what it has."""
    features: Counter[str] = Counter()
    return plain(seed, features), features


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("settings", PLANS, ids=lambda s: s["plan"])
def test_models_that_change_their_ways(settings: dict[str, Any]) -> None:
    features: Counter[str] = Counter()
    alone = 0
    for seed in (*FOUND, *range(NUM_MODELS - len(FOUND))):
        theirs, met = without(seed)
        features.update(met)
        ours = train(
            seed, settings, features if settings["plan"] == "auto" else Counter()
        )
        assert difference(ours, theirs) is None, f"seed {seed}"
        alone += raised_alone(ours, theirs)
    assert alone <= NUM_MODELS // 20
    # Plans are drawn, not searched for.
    assert features["planned"] == (settings["plan"] == "auto") * NUM_MODELS
    assert sum(features[name] > 0 for name in SURPRISES) > len(SURPRISES) // 2
    assert all(features[name] > 0 for name in OPERATORS)

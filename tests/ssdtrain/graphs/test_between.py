"""What modules give one another: a sample of `recipes/bench/safety/surprises.py`."""

from collections import Counter
from typing import Any

import pytest

from tests.ssdtrain.graphs.between import PARTS, PLANS, plain, train
from tests.ssdtrain.graphs.surprises import difference, raised_alone

NUM_MODELS = 9
FOUND = 4, 73, 94
"""What campaigns have found: a question that a recipe relied upon, and nobody asked
again because another one was equal to it."""


@pytest.mark.parametrize("settings", PLANS, ids=lambda s: s.get("recompute", "auto"))
def test_what_is_written_between_modules(settings: dict[str, Any]) -> None:
    features: Counter[str] = Counter()
    alone = 0
    for seed in (*FOUND, *range(NUM_MODELS - len(FOUND))):
        theirs = plain(seed, features)
        ours = train(seed, settings, features)
        assert difference(ours, theirs) is None, f"seed {seed}"
        alone += raised_alone(ours, theirs)
    assert not alone or settings.get("recompute") == "full"
    assert features["planned"] == NUM_MODELS and features["written"] > NUM_MODELS
    assert all(features[name] > 0 for name in PARTS)

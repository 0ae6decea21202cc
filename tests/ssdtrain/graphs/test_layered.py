"""Layers that run again: a sample of `recipes/bench/safety/surprises.py`."""

from collections import Counter

import pytest

from tests.ssdtrain.graphs.layered import (
    CHANGES,
    PLANS,
    may_raise,
    plain,
    train,
)
from tests.ssdtrain.graphs.layers import OPERATORS
from tests.ssdtrain.graphs.surprises import difference, raised_alone

FIRST, NUM_MODELS = 1066, 6
"""Models with more changes and operators than most so many have; four of these are
attention's."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_run_again_under_plans_that_change() -> None:
    features: Counter[str] = Counter()
    under_plans: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + NUM_MODELS):
        theirs = plain(seed, features)
        for settings in PLANS:
            ours = train(seed, settings, under_plans)
            assert difference(ours, theirs) is None, f"seed {seed}, {settings}"
            assert may_raise(seed) or not raised_alone(ours, theirs), f"seed {seed}"
    assert under_plans["reruns"] >= 2.5 * NUM_MODELS
    assert under_plans["planned"] >= NUM_MODELS / 2
    assert sum(features[name] > 0 for name in CHANGES) > len(CHANGES) / 2
    assert sum(features[name] > 0 for name in OPERATORS) > len(OPERATORS) / 2

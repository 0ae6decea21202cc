"""What recipes read of tables: a sample of `recipes/bench/safety/surprises.py`."""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from ssdtrain.cache.moved import MovedHandle
from ssdtrain.cache.rebuilder import Rebuilder
from ssdtrain.cache.state import RecordState
from tests.ssdtrain.graphs.operands import (
    OPERATORS,
    PLANS,
    SURPRISES,
    may_raise,
    plain,
    train,
)
from tests.ssdtrain.graphs.surprises import difference, raised_alone

NUM_MODELS = 12
FOUND = (1078,)
"""What campaigns have found: a conjugated view of the bytes of a row."""


@cache
def without(seed: int) -> tuple[Any, Counter[str]]:
    """What a model gives without ssdtrain, and what it has."""
    features: Counter[str] = Counter()
    return plain(seed, features), features


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("settings", PLANS, ids=lambda s: s["min_bytes"])
def test_recipes_read_rows(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[RecordState] = Counter()
    get, use, recipes = MovedHandle.get, Rebuilder.use, [0]

    def counted(handle: MovedHandle) -> Any:
        if recipes[0]:  # one asks
            read[handle.moved.state] += 1
        return get(handle)

    def counting(rebuilder: Rebuilder, *args: Any, **settings: Any) -> Any:
        recipes[0] += 1
        try:
            return use(rebuilder, *args, **settings)
        finally:
            recipes[0] -= 1

    monkeypatch.setattr(Rebuilder, "use", counting)
    monkeypatch.setattr(MovedHandle, "get", counted)
    features: Counter[str] = Counter()
    for seed in (*FOUND, *range(NUM_MODELS - len(FOUND))):
        theirs, met = without(seed)
        features.update(met)
        ours = train(seed, settings, features)
        assert difference(ours, theirs) is None, f"seed {seed}"
        assert may_raise(seed) or not raised_alone(ours, theirs), f"seed {seed}"
    assert {RecordState.KEPT, RecordState.AWAY, RecordState.RETURNING} <= read.keys()
    assert sum(read.values()) > 10 * NUM_MODELS, read
    assert features["planned"] == NUM_MODELS
    assert sum(features[name] > 0 for name in SURPRISES) > len(SURPRISES) // 2
    assert all(features[name] > 0 for name in OPERATORS)

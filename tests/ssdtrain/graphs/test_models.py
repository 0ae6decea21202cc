"""Models that change their ways: a sample of `recipes/bench/safety/surprises.py`."""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from ssdtrain.cache.moved import MovedHandle
from ssdtrain.cache.rebuilder import Rebuilder
from ssdtrain.cache.state import RecordState
from tests.ssdtrain.graphs import (
    between,
    layered,
    layers,
    operands,
    stateful,
    surprises,
)
from tests.ssdtrain.graphs.surprises import difference, may_raise, raised_alone

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@cache
def without(generator: Any, seed: int) -> tuple[Any, Counter[str]]:
    """What a model gives without ssdtrain, and what it has."""
    features: Counter[str] = Counter()
    return generator.train(seed, None, features), features


def compared(
    generator: Any, seeds: Iterable[int], settings: dict[str, Any], met: Counter[str]
) -> tuple[Counter[str], int]:
    """What the models have, and how often ssdtrain raised alone; adds to `met` what the
    steps with it met."""
    features: Counter[str] = Counter()
    num_alone = 0
    for seed in seeds:
        theirs, own = without(generator, seed)
        features.update(own)
        ours = generator.train(seed, settings, met)
        assert difference(ours, theirs) is None, f"seed {seed}, {settings}"
        alone = raised_alone(ours, theirs)
        assert not alone or may_raise(generator, seed), f"seed {seed}, {settings}"
        num_alone += alone
    return features, num_alone


def share_of(features: Counter[str], names: Iterable[str]) -> float:
    """How many of them there are."""
    found = [features[name] > 0 for name in names]
    return sum(found) / len(found)


@pytest.mark.parametrize("settings", surprises.PLANS, ids=lambda s: s["plan"])
def test_models_that_change_their_ways(settings: dict[str, Any]) -> None:
    """Among them what campaigns have found: modes that are gone when their work is
    saved, and recipes that were to read what a compiled plan moves."""
    found = 13962350714, 13962364582, 13962126760, 13962175533
    seeds, met = [*found, *range(16)], Counter[str]()
    features, alone = compared(surprises, seeds, settings, met)
    assert alone <= len(seeds) // 20
    # Plans are drawn, not searched for.
    assert met["planned"] == (settings["plan"] == "auto") * len(seeds)
    assert share_of(features, surprises.SURPRISES) > 0.5
    assert share_of(features, surprises.OPERATORS) == 1


def test_layers_run_again_under_plans_that_change() -> None:
    """Models with more changes and operators than most so many have; four of these are
    attention's."""
    seeds, met = range(1066, 1072), Counter[str]()
    for settings in layered.PLANS:
        features, _ = compared(layered, seeds, settings, met)
    assert met["reruns"] >= 2.5 * len(seeds)
    assert met["planned"] >= len(seeds) / 2
    assert share_of(features, layered.CHANGES) > 0.5
    assert share_of(features, layers.OPERATORS) > 0.5


@pytest.mark.parametrize("settings", stateful.PLANS, ids=lambda s: s["plan"])
def test_layers_with_state(settings: dict[str, Any]) -> None:
    """Among them what campaigns have found: counts that are put back by an update that
    adds, what lies far inside, behind a weak proxy and below a cache."""
    seeds, met = range(48), Counter[str]()
    features, _ = compared(stateful, seeds, settings, met)
    assert met["reruns"] >= len(seeds) / 2 and met["refused"] >= len(seeds) / 4
    places = [name for name in features if name.startswith("place")]
    assert len(places) > 0.8 * len(stateful.PLACES)


@pytest.mark.parametrize(
    "settings", between.PLANS, ids=lambda s: s.get("recompute", "auto")
)
def test_what_is_written_between_modules(settings: dict[str, Any]) -> None:
    """Among them what campaigns have found: a question that a recipe relied upon, and
    nobody asked again because another one was equal to it."""
    seeds, met = [4, 73, 94, *range(6)], Counter[str]()
    features, alone = compared(between, seeds, settings, met)
    assert not alone or settings.get("recompute") == "full"
    assert met["planned"] == len(seeds) < features["written"]
    assert share_of(features, between.PARTS) == 1


@pytest.mark.parametrize("settings", operands.PLANS, ids=lambda s: s["min_bytes"])
def test_recipes_read_rows(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them what campaigns have found: a conjugated view of the bytes of a row."""
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
    seeds, met = [1078, *range(11)], Counter[str]()
    features, _ = compared(operands, seeds, settings, met)
    assert {RecordState.KEPT, RecordState.AWAY, RecordState.RETURNING} <= read.keys()
    assert sum(read.values()) > 10 * len(seeds), read
    assert met["planned"] == len(seeds)
    assert share_of(features, operands.SURPRISES) > 0.5
    assert share_of(features, operands.OPERATORS) == 1

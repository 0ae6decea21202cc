"""Kernel models, host tables, power, memory curves: fitted on made-up devices."""

import json
import math
import random
import statistics
from typing import Any

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight import design
from ssdtrain.tools.foresight.call import Call, KernelFamily
from ssdtrain.tools.foresight.device import DeviceCosts, from_json, load_device, to_json
from ssdtrain.tools.foresight.features import feature_names, row_of
from ssdtrain.tools.foresight.fit import errors_of, fit_forest
from ssdtrain.tools.foresight.host import HostTable
from ssdtrain.tools.foresight.power import Power
from ssdtrain.tools.foresight.spec import H100, H200, Kind
from ssdtrain.tools.foresight.trees import Forest, Tree


def made_up_us(call: Call, noise: random.Random) -> float:
    """A device with tiles of 128 x 128 and a start-up time."""
    s = call.sizes
    tiles = s["batch"] * math.ceil(s["m"] / 128) * math.ceil(s["n"] / 128)
    waves = math.ceil(tiles / 132)
    each = 2 * 128 * 128 * max(64.0, s["k"]) / 6e6
    memory = call.num_bytes / 2.8e6
    return (3.0 + max(waves * each, memory)) * noise.gauss(1.0, 0.01)


def made_up_times(count: int) -> list[tuple[Call, float]]:
    noise = random.Random(1)
    drawn = (design.draw(KernelFamily.PRODUCT, i) for i in range(count))
    return [(call, made_up_us(call, noise)) for call in drawn]


def test_json_trees_are_scikit_learn_s() -> None:
    """What is exported adds up to what was trained, to rounding."""
    pytest.importorskip("sklearn")
    times = made_up_times(80)
    forest = fit_forest(times, H100)
    errors = errors_of(forest, times, H100)
    assert statistics.median(errors) < 0.05  # it was trained on these


@pytest.mark.parametrize(
    "trees",
    [
        [[[0], [1.0], [0]]],  # a split without children
        [[[5, -1, -1], [1.0, 0.0, 0.0], [2, 0, 0]]],  # an unknown feature
        [[[0, -1], [1.0, 0.0], [9, 0]]],  # a child outside
        [[[-1], [], []]],
    ],
)
def test_trees_that_would_not_end_are_refused(trees: Any) -> None:
    forest = Forest(
        names=("a",), base=0.0, trees=tuple(Tree(*map(tuple, t)) for t in trees)
    )
    with pytest.raises(ConfigError, match="kernel models"):
        forest.check()
    device = DeviceCosts(
        spec=H100, host=HostTable([]), forests={KernelFamily.PRODUCT: forest}
    )
    with pytest.raises(ConfigError, match="damaged"):
        from_json(to_json(device))


@pytest.mark.parametrize("family", list(KernelFamily))
def test_the_design_is_the_same_whenever_it_is_drawn(family: KernelFamily) -> None:
    for index in range(40):
        call = design.draw(family, index)
        assert call == design.draw(family, index)
        assert design.LIMITS[Kind.CUDA].allow(call)
        assert len(row_of(call, H100, 5.0)) == len(feature_names(family))
    assert design.draw(family, 0) != design.draw(family, 0, seed=1)


def test_too_few_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="20 or more"):
        fit_forest(made_up_times(5), H100)


def test_a_device_survives_json_and_scales() -> None:
    device = DeviceCosts(
        spec=H200,
        host=HostTable([]),
        errors={KernelFamily.PRODUCT: 0.05},
        power=Power(
            limit_watts=700, idle_watts=100, joules_per_tflop=0.5, joules_per_gb=0.05
        ),
    )
    again = from_json(json.loads(json.dumps(to_json(device))))
    assert to_json(again) == to_json(device)
    with pytest.raises(ConfigError, match="schema"):
        from_json({"schema": "x"})
    with pytest.raises(ConfigError, match="no device 'h1000': expects one"):
        load_device("h1000")

"""Kernel models, host tables, power, memory curves: fitted on made-up devices."""

import json
import math
import random
import statistics
from typing import Any

import pytest

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight import design, fit, laws
from ssdtrain.tools.foresight.call import Call, Family
from ssdtrain.tools.foresight.device import (
    Device,
    from_json,
    load_device,
    to_json,
)
from ssdtrain.tools.foresight.features import names_of, row_of
from ssdtrain.tools.foresight.fit import (
    errors_of,
    fit_forest,
    score,
)
from ssdtrain.tools.foresight.host import (
    HostTable,
)
from ssdtrain.tools.foresight.overheads import (
    Phase,
    operators_of,
    summary,
)
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
    drawn = (design.draw(Family.PRODUCT, i) for i in range(count))
    return [(call, made_up_us(call, noise)) for call in drawn]


def test_a_forest_learns_what_the_roofline_misses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(laws, "NUM_STEPS", 30)
    monkeypatch.setattr(fit, "NUM_BAGS", 1)
    found = score(made_up_times(240), H100, num_folds=2)
    assert found["gmae"] < 0.08
    assert found["gmae"] < 0.4 * found["roofline_gmae"]


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
    device = Device(spec=H100, host=HostTable([]), forests={Family.PRODUCT: forest})
    with pytest.raises(ConfigError, match="damaged"):
        from_json(to_json(device))


@pytest.mark.parametrize("family", list(Family))
def test_the_design_is_the_same_whenever_it_is_drawn(family: Family) -> None:
    for index in range(40):
        call = design.draw(family, index)
        assert call == design.draw(family, index)
        assert design.LIMITS[Kind.CUDA].allow(call)
        assert len(row_of(call, H100, 5.0)) == len(names_of(family))
    assert design.draw(family, 0) != design.draw(family, 0, seed=1)


def test_too_few_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="20 or more"):
        fit_forest(made_up_times(5), H100)


def test_a_device_survives_json_and_scales() -> None:
    device = Device(
        spec=H200,
        host=HostTable([]),
        errors={Family.PRODUCT: 0.05},
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


# -- host times -----------------------------------------------------------------------


def event(
    name: str, start: float, length: float, category: str, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "ts": start,
        "dur": length,
        "cat": category,
        "tid": 1,
        "args": args,
    }


TRACE = [
    event("aten::linear", 0, 40, "cpu_op"),
    event("aten::t", 2, 3, "cpu_op"),
    event("aten::addmm", 10, 25, "cpu_op"),
    event("cudaLaunchKernel", 18, 4, "cuda_runtime", correlation=7),
    event("cudaLaunchKernel", 27, 4, "cuda_runtime", correlation=8),
    event("gemm", 100, 50, "kernel", correlation=7),
    event("add", 150, 9, "kernel", correlation=8),
    event("autograd::engine::evaluate_function: X", 60, 30, "cpu_op"),
    event("aten::mul", 65, 5, "cpu_op"),
    event("Optimizer.step#SGD.step", 95, 50, "user_annotation"),
    event("aten::add_", 100, 5, "cpu_op"),
]


def test_t1_to_t5_are_read_off_a_trace() -> None:
    seen = operators_of(TRACE, {"aten::linear"})
    names = [(one.name, one.phase) for one in seen]
    assert names == [
        ("aten::t", Phase.FORWARD),
        ("aten::addmm", Phase.FORWARD),
        ("aten::mul", Phase.BACKWARD),
        ("aten::add_", Phase.UPDATE),
    ]
    addmm = seen[1]
    assert (addmm.t1, addmm.t2, addmm.t3, addmm.t4, addmm.t5) == (5, 8, 4, 4, 5)
    assert (addmm.num_launches, addmm.device_us) == (2, 59)
    assert seen[2].t5 == 5  # launches nothing: all of its time


def test_a_table_gives_back_what_a_trace_took() -> None:
    rows = summary(operators_of(TRACE, {"aten::linear"}))
    cost = HostTable(rows).cost(Phase.FORWARD, "aten::addmm")
    assert cost.total == 5 + 25
    again = HostTable.from_dict(HostTable(rows).as_dict())
    assert again.cost(Phase.FORWARD, "aten::addmm") == cost
    assert not again.knows("aten::bmm")


# -- clock ----------------------------------------------------------------------------

"""The fit of the cost model's constants."""

import math
from dataclasses import replace

import pytest

pytest.importorskip("torch_geometric")

from hector.cost import DeviceModel
from hector.datasets.generate import GraphSpec, generate
from hector.statistics import statistics
from recipes.bench.rgnn.fit import Counts, Sample, choices, error, fit, plans_of


def made(device: DeviceModel) -> list[Sample]:
    """Steps that took exactly what `device` says."""
    found = []
    for edges in (500, 3_000_000):
        spec = GraphSpec(
            num_nodes=60,
            num_node_types=2,
            num_edges=500,
            num_edge_types=4,
            compaction_ratio=0.3,
        )
        graph = generate(spec)
        about = vars(statistics(graph)) | {"num_edges": edges, "num_nodes": edges // 8}
        for setting in ("none", "compact", "reorder", "compact+reorder"):
            key = {"model": "rgat", "task": "inference", "width": 16}
            key |= {"graph": str(edges), "dtype": "float32"}
            plans = plans_of(graph, key, setting)
            sample = Sample(key, setting, 1.0, plans, Counts(about))
            found.append(replace(sample, seconds=sample.predicted(device)))
    return found


def test_constants_are_found_again() -> None:
    true = DeviceModel(bytes_per_second=6e11, launch_seconds=2e-5)
    taken = made(true)
    fields = ("bytes_per_second", "launch_seconds")
    start = DeviceModel()
    after = fit(start, lambda d: error(d, taken), fields)
    assert error(after, taken) < 0.05 < error(start, taken)
    assert math.isclose(after.launch_seconds, 2e-5, rel_tol=0.1)
    good, count, mean = choices(true, taken)
    assert (good, count, mean) == (2, 2, 1.0)

"""Fits the cost model's constants to the times that `rgnn.layers` took of our layers.

    python -m recipes.bench rgnn.fit recipes/bench/results/rgnn/rgnn.json

The plans of every record are rebuilt from the layer and the record's setting; the
graph's counts come from the results. The constants minimize the mean squared logarithm
of predicted over measured time within a cell, found by moving one after the other:
what the model is asked is how settings compare, so an error that all settings of a cell
share counts a tenth.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hector.cost import CostModel, DeviceModel
from hector.datasets.generate import TABLE_3_3, generate, scaled
from hector.graph import HeteroGraph
from hector.ir.kernels import Plan, SegmentMapping
from hector.ir.types import Domain, Index
from hector.runtime import executables
from hector.train.model import compiled_layer
from recipes.bench.harness import records as files
from recipes.bench.harness.records import RESULTS
from recipes.bench.rgnn.pyg import layer_spec
from recipes.bench.rgnn.records import SETTING_NAMES, SETTINGS, cell_name

FIELDS = (
    "bytes_per_second",
    "gather_bytes_per_second",
    "cached_bytes_per_second",
    "run_bytes_per_second",
    "outer_factor",
    "launch_seconds",
    "parameter_launch_seconds",
    "product_seconds",
    "inference_seconds",
    "training_seconds",
    "walk_step_seconds",
)
"""What whole steps tell apart: products and empty kernels never bound one."""
WIDTH = 64
"""Of the tables."""
LOSS_PASSES = 6
"""Times that log-softmax, the likelihood and their backwards pass over the output."""
SHARED = 0.1
"""Share of a cell's mean error in what is minimized."""
STEPS = (2.0, 1.3, 1.1, 1.03)
"""Factors by which a constant is moved, coarse to fine."""


@dataclass(frozen=True)
class Counts:
    """A graph as the results describe it."""

    about: dict[str, Any]

    def rows(self, domain: Domain) -> int:
        a = self.about
        edges = int(a["num_edges"])
        return {
            Domain.NODE: int(a["num_nodes"]),
            Domain.EDGE: edges,
            Domain.SRC_PAIR: round(a["entity_compaction_ratio"] * edges),
            Domain.DST_PAIR: round(a["destination_compaction_ratio"] * edges),
            Domain.ETYPE: int(a["num_edge_types"]),
            Domain.NTYPE: int(a["num_node_types"]),
            Domain.GLOBAL: 1,
        }[domain]

    def longest(self, domain: Domain, index: Index) -> int:
        """Rows of the largest group; where the results do not say, no group of pairs is
        larger than its node's."""
        a = self.about
        if domain is not Domain.EDGE:
            return int(a["num_edge_types"])
        ends = {
            Index.SRC: ("max_out_degree", "max_out_degree"),
            Index.DST: ("max_in_degree", "max_in_degree"),
            Index.SRC_PAIR: ("max_source_pair_degree", "max_out_degree"),
            Index.DST_PAIR: ("max_destination_pair_degree", "max_in_degree"),
        }
        known, bound = ends[index]
        return int(a.get(known, a[bound]))


@dataclass(frozen=True)
class Sample:
    """A measured step and what ran in it."""

    key: dict[str, Any]
    setting: str
    seconds: float
    plans: tuple[Plan, ...]
    counts: Counts
    mapping: SegmentMapping | None = None

    def predicted(self, device: DeviceModel) -> float:
        size = 2 if self.key["dtype"] == "bfloat16" else 4
        model = CostModel(self.counts, device, size, self.mapping)
        # The benchmark's loss reads and writes the output forward and backward: the
        # same whatever runs before it.
        rows = self.counts.rows(Domain.NODE) * self.key["width"] * size
        loss = LOSS_PASSES * rows if len(self.plans) > 1 else 0
        return model.step_seconds(self.plans) + loss / device.bytes_per_second


def plans_of(graph: HeteroGraph, key: dict[str, Any], setting: str) -> tuple[Plan, ...]:
    """Forward, and in training backward: the same for a graph of any size."""
    width = key["width"]
    spec = layer_spec(key["model"], width, width)
    layer = compiled_layer(spec, graph)
    layer.set_optimization(SETTING_NAMES[setting])
    trains = key["task"] == "training"
    x = torch.zeros(graph.num_nodes, width, requires_grad=trains)
    with torch.set_grad_enabled(trains):
        layer(x, graph)
    report = executables(graph)[-1].report
    found = (report.forward, report.backward)
    return tuple(p for p in found if p is not None)


def samples(data: dict[str, Any]) -> list[Sample]:
    """Every time that was taken of our layers."""
    small: dict[str, HeteroGraph] = {}
    built: dict[tuple[object, ...], tuple[Plan, ...]] = {}
    found = []
    for r in data["cells"].values():
        key = r["key"]
        if r["status"] != "ok" or "setting" not in r:
            continue
        name = key["graph"]
        if name not in small:
            spec = TABLE_3_3[name]
            pairs = spec.compaction_ratio * spec.num_edges
            small[name] = generate(scaled(spec, 10 * spec.num_edge_types / pairs))
        which = (name, key["model"], key["task"], key["width"], r["setting"])
        if which not in built:
            built[which] = plans_of(small[name], key, r["setting"])
        counts = Counts(data["graphs"][name])
        seconds = r["ms"] / 1e3
        mapping = SegmentMapping.PROGRAM if r["mapping"] == "program" else None
        plans = built[which]
        found.append(Sample(key, r["setting"], seconds, plans, counts, mapping))
    return found


def cells_of(taken: Sequence[Sample]) -> list[dict[str, Sample]]:
    """The samples of each cell, by setting."""
    cells: dict[str, dict[str, Sample]] = {}
    for s in taken:
        cell = {k: v for k, v in s.key.items() if k != "contender"}
        cells.setdefault(json.dumps(cell, sort_keys=True), {})[s.setting] = s
    return list(cells.values())


def error(device: DeviceModel, taken: Sequence[Sample]) -> float:
    """Root of the mean squared logarithm of predicted over measured time: what a
    cell's settings share counts `SHARED`."""
    total, count = 0.0, 0
    for cell in cells_of(taken):
        logs = [math.log(s.predicted(device) / s.seconds) for s in cell.values()]
        mean = sum(logs) / len(logs)
        total += sum((x - mean) ** 2 + SHARED * mean**2 for x in logs)
        count += len(logs)
    return math.sqrt(total / count)


def fit(
    start: DeviceModel, loss: Callable[[DeviceModel], float], fields: Sequence[str]
) -> DeviceModel:
    """The constants of least loss that single moves reach."""
    best, least = start, loss(start)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in fields:
                for factor in (step, 1 / step):
                    value = getattr(best, name) * factor
                    tried = replace(best, **{name: value})
                    found = loss(tried)
                    if found < least * (1 - 1e-6):
                        best, least, moved = tried, found, True
    return best


def choices(device: DeviceModel, taken: Sequence[Sample]) -> tuple[int, int, float]:
    """(cells where the predicted best setting is within 5 % of the best measured one,
    cells with at least two settings, mean of chosen over best time)."""
    ratios = []
    for found in cells_of(taken):
        if len(found) < 2:
            continue
        chosen = min(found.values(), key=lambda s: s.predicted(device))
        ratios.append(chosen.seconds / min(s.seconds for s in found.values()))
    mean = sum(ratios) / len(ratios) if ratios else math.nan
    return sum(r <= 1.05 for r in ratios), len(ratios), mean


def write_choices(path: Path, taken: Sequence[Sample]) -> None:
    """Adds what the present model takes, of settings that were measured side by side,
    to the results: times outlive the model that chose among them."""
    data = files.read(path)
    device = DeviceModel()
    found = {}
    for cell in cells_of([s for s in taken if s.key["width"] == WIDTH]):
        if len(cell) > 1:
            chosen = min(cell.values(), key=lambda s: s.predicted(device))
            found[cell_name(chosen.key)] = chosen.setting
    data["modelled"] = dict(sorted(found.items()))
    files.write(path, data)


def main(
    results: Path = RESULTS / "rgnn" / "rgnn.json",
    /,
    *,
    write: bool = False,
) -> int:
    """Fit, and tell how good the choices are.

    Args:
        write: what the present model chooses among these times, into the results
    """
    data = files.read(results)
    if write:
        side_by_side = {f"hector-{setting}" for setting in SETTINGS}
        data["cells"] = {
            name: r
            for name, r in data["cells"].items()
            if r["key"]["contender"] in side_by_side
        }
    taken = samples(data)
    if not taken:
        print("no times of compiled layers in", results)
        return 1
    if write:
        write_choices(results, taken)
        return 0
    before = DeviceModel()
    after = fit(before, lambda d: error(d, taken), FIELDS)
    for label, device in (("before", before), ("after", after)):
        good, count, mean = choices(device, taken)
        print(
            f"{label}: error {error(device, taken):.3f} in log time over {len(taken)} "
            f"times; best setting within 5 % in {good} of {count} cells, "
            f"mean {mean:.3f}"
        )
    for name in FIELDS:
        print(f"    {name}: {getattr(before, name):.3g} -> {getattr(after, name):.3g}")
    return 0

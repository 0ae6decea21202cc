"""Capture on the meta device, JSON, edits, lifetimes against real execution."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight import edits
from ssdtrain.tools.foresight.call import KernelFamily
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.cluster import cluster_of
from ssdtrain.tools.foresight.device import bare_device
from ssdtrain.tools.foresight.graph import (
    Graph,
    data_dependencies,
    graph_from_json,
    graph_to_json,
)
from ssdtrain.tools.foresight.lowering import lower
from ssdtrain.tools.foresight.memory import estimate_peak
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.price import price, steady_us
from ssdtrain.tools.foresight.ranks import RankLayout, Spread, estimate_ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def graph_of(
    batch: int = 16, width: int = 64, optimizer: str | None = "adamw"
) -> Graph:
    with torch.device("meta"):
        model = nn.Sequential(Block(width), Block(width))
        x = torch.randn(batch, width)
        return capture(model, lambda: model(x).square().mean(), optimizer=optimizer)


def products(graph: Graph) -> list[float]:
    found = []
    for node in graph.nodes:
        found += [
            call.flops
            for call in lower(graph, node).calls
            if call.family is KernelFamily.PRODUCT
        ]
    return found


def test_products_count_as_on_paper() -> None:
    """Two products forward, four backward (two for the first: its input is kept too,
    because of the norm's weight), 2 m n k each."""
    graph = graph_of()
    each = 2 * 16 * 64 * 256
    assert products(graph) == [each] * 12
    assert {node.phase for node in graph.nodes} == set(StepPhase)
    assert {node.module for node in graph.nodes} >= {"0.norm", "0.up", "1.down"}


def test_json_round_trip() -> None:
    graph = graph_of()
    again = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    assert again.nodes == graph.nodes
    assert graph_to_json(again) == graph_to_json(graph)


def test_json_uses_chakra_names() -> None:
    node = graph_to_json(graph_of())["nodes"][0]
    assert {"id", "name", "type", "data_deps", "inputs", "outputs", "attr"} < set(node)
    assert node["type"] == "COMP_NODE"
    assert set(node["inputs"]) == {"values", "shapes", "types"}


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 99},
        {"schema": "other"},
        {"storages": {}},
        {"nodes": [{"id": 0}]},
    ],
)
def test_damaged_graphs_are_refused(change: dict[str, Any]) -> None:
    values = {**graph_to_json(graph_of()), **change}
    with pytest.raises(ConfigError):
        graph_from_json(values)


def test_what_cannot_be_captured_says_so() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        x = torch.randn(2, 4)
        with pytest.raises(ConfigError, match="meta device"):
            capture(model, lambda: model(x) * model(x).sum().item())
        with pytest.raises(ConfigError, match="needs a gradient"):
            capture(model, lambda: model(x).detach())
        with pytest.raises(ConfigError, match="optimizer expects"):
            capture(model, lambda: model(x).sum(), optimizer="adam")


def test_a_yes_that_the_host_asks_for_is_counted() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        x, mask = torch.randn(2, 4), torch.ones(2, dtype=torch.bool)

        def forward() -> torch.Tensor:
            return model(x).sum() if mask.all() else model(x).mean()

        graph = capture(model, forward)
    assert graph.notes["assumed_yes"] == "1"


def test_resizing_is_capturing_at_that_size() -> None:
    first, second, third = graph_of(8), graph_of(24), graph_of(40)
    resized = edits.resized(first, second, (8, 24), 40)
    shapes = [resized.tensors[n].shape for node in resized.nodes for n in node.outputs]
    assert shapes == [
        third.tensors[n].shape for node in third.nodes for n in node.outputs
    ]
    device = bare_device("h100")
    assert steady_us(price(resized, device).tasks) == pytest.approx(
        steady_us(price(third, device).tasks)
    )
    assert estimate_peak(resized).peak_bytes == estimate_peak(third).peak_bytes
    with pytest.raises(ConfigError, match="same operators"):
        edits.resized(first, graph_of(24, optimizer=None), (8, 24), 40)


def test_fusing_drops_what_lies_between() -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 64)
        x = torch.randn(32, 64)
        graph = capture(model, lambda: (model(x).exp() * 2 + 1).sum())
    names = [node.name for node in graph.nodes]
    start = names.index("aten::exp")
    end = names.index("aten::add") + 1
    joined = edits.fused(graph, start, end)
    assert len(joined.nodes) == len(graph.nodes) - (end - start) + 1

    def moved(graph: Graph, part: slice) -> float:
        return sum(
            call.num_bytes
            for node in graph.nodes[part]
            for call in lower(graph, node).calls
        )

    apart = moved(graph, slice(start, end))
    together = moved(joined, slice(start, start + 1))
    # exp's result is saved for backward; the product's is not, nor read again.
    assert together == apart - 3 * 32 * 64 * 4


def test_a_step_s_element_wise_chains_become_one_kernel_each() -> None:
    """A GELU by hand is one kernel in forward that reads its input and writes what is
    saved or used; products and reductions stay, and all that is read was made."""
    with torch.device("meta"):
        model = nn.Linear(64, 64)
        x = torch.randn(32, 64)

        def forward() -> torch.Tensor:
            y = model(x)
            return (0.5 * y * (1.0 + (0.8 * y).view(64, 32).tanh().view(32, 64))).sum()

        graph = capture(model, forward)
    joined = edits.fused_pointwise(graph)
    chains = [n for n in joined.nodes if n.name == "inductor::"]
    assert [n.phase for n in chains].count(StepPhase.FORWARD) == 1 < len(chains)
    assert products(joined) == products(graph)
    assert not any("tanh" in n.name for n in joined.nodes)
    size = 32 * 64 * 4
    [call] = lower(joined, chains[0]).calls
    # Reads y and 0.5 y, which another kernel made; tanh and 1 + tanh are saved for
    # backward, and the product is summed.
    assert (call.read_bytes, call.written_bytes) == (2 * size, 3 * size)
    assert estimate_peak(joined).peak_bytes <= estimate_peak(graph).peak_bytes
    device = bare_device("h100")
    before, after = (price(g, device).by_family_us for g in (graph, joined))
    assert after[KernelFamily.MEMORY] < 0.7 * before[KernelFamily.MEMORY]
    made: set[int] = {n for n, s in joined.storages.items() if s.born < 0}
    for node in joined.nodes:
        assert {joined.tensors[t].storage for t in node.inputs} <= made, node.name
        made |= {joined.tensors[t].storage for t in node.outputs}


def test_who_reads_a_view_waits_for_the_kernel_behind_it() -> None:
    """A weight's gradient is a transposed product: the view is written by nobody."""
    graph = graph_of()
    deps = data_dependencies(graph)
    assert not any(graph.nodes[d].is_view for own in deps for d in own)
    update = next(i for i, n in enumerate(graph.nodes) if n.phase is StepPhase.UPDATE)
    makers = {graph.nodes[d].name for d in deps[update]}
    assert makers == {"aten::mm", "aten::sum", "aten::native_layer_norm_backward"}


def test_backward_has_the_operators_that_run_without_a_mode() -> None:
    """Under a mode autograd adds up, and puts elements back, out of place."""
    with torch.device("meta"):
        layer = torch.nn.Linear(8, 8)
        at = torch.tensor([1, 3])
        x = torch.randn(4, 6, 6, 8)

        def forward() -> torch.Tensor:
            y = layer(x)
            return (y[:, at, at].sum() + (y * y).sum()).square()

        graph = capture(layer, forward)
    backward = [n.name for n in graph.nodes if n.phase is StepPhase.BACKWARD]
    assert "aten::_index_put_impl_" in backward and "aten::add_" in backward
    assert not {"aten::index_put", "aten::add"} & set(backward)
    [put] = [n for n in graph.nodes if n.name == "aten::_index_put_impl_"]
    [call] = lower(graph, put).calls
    # Two indices, each of a slice over images and channels.
    assert (call.sizes["rows"], call.sizes["columns"]) == (2, 4 * 8)


def test_ranks_hold_their_share_and_networks_are_slower() -> None:
    graph, device = graph_of(batch=4, width=256), bare_device("h100")
    cluster = cluster_of("nvlink:8,ib:400G", device.spec)
    found = {
        number: estimate_ranks(
            graph, device, cluster, RankLayout(spread=Spread.FSDP, num_ranks=number)
        )
        for number in (2, 4, 8, 64)
    }
    peaks = [one.peak_bytes for one in found.values()]
    assert None not in peaks and peaks == sorted(peaks, reverse=True)
    weights = sum(s.num_bytes for s in graph.storages.values() if s.is_parameter)
    # Weights, gradients and two moments are divided; gathered units are not.
    saved = found[2].peak_bytes - found[64].peak_bytes
    assert saved == pytest.approx(4 * weights * (1 / 2 - 1 / 64), rel=0.05)
    assert found[64].communication_us > 2 * found[8].communication_us
    alone = estimate_peak(graph).peak_bytes
    layout = RankLayout(spread=Spread.DDP, num_ranks=2)
    spread = estimate_ranks(graph, device, cluster, layout)
    assert spread.peak_bytes - alone == pytest.approx(weights, rel=0.05)

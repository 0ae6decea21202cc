"""Simulated ranks against real ones: the same collectives, the same virtual time."""

import json
from pathlib import Path

import pytest
import torch

from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.collectives import straight_fabric
from ssdtrain.tools.foresight.device import bare_device
from ssdtrain.tools.foresight.graph import (
    Graph,
    Node,
    Stream,
    data_dependencies,
    read_graph,
)
from ssdtrain.tools.foresight.lowering import NOTHING
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.parallel import data_parallel, fully_sharded
from ssdtrain.tools.foresight.ranks import estimate_graphs
from ssdtrain.tools.foresight.simulate import KERNEL_GAP_US, Task, simulate_ranks
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.foresight.wires import Wires
from tests.ranks import run_ranks
from tests.ssdtrain.tools.foresight import real_ranks as real


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every real rank saw and captured, both ways."""
    found = tmp_path_factory.mktemp("ranks")
    run_ranks([real.__file__, found], found, real.NUM_RANKS)
    return found


def graph_of(how: str) -> Graph:
    with torch.device("meta"):
        model = real.Model()
        x = torch.randn(real.BATCH, real.WIDTH)
        graph = capture(model, lambda: model(x), optimizer="adamw", on=Kind.CPU)
    if how == "ddp":
        return data_parallel(graph, real.BUCKET_MB * 2**20)
    return fully_sharded(graph, real.NUM_RANKS, unit_of)


def unit_of(path: str) -> str:
    words = path.split(".")
    return ".".join(words[:2]) if words[0] == "layers" else ""


def tasks_of(graph: Graph, rank: int) -> list[Task]:
    """By the made-up laws that real ranks go by."""
    tasks = []
    for node, deps in zip(graph.nodes, data_dependencies(graph), strict=True):
        runs = not node.is_view and node.name.removeprefix("aten::") not in NOTHING
        other = tuple(d for d in deps if graph.nodes[d].stream is not node.stream)
        tasks.append(
            Task(
                name=node.name,
                host_us=real.HOST_US if runs else 0.0,
                device_us=length_us(graph, node, rank) if runs else 0.0,
                stream=node.stream,
                after=other if runs else (),
                group=node.attr.get("group"),
            )
        )
    return tasks


def length_us(graph: Graph, node: Node, rank: int) -> float:
    if "num_bytes" in node.attr:
        return real.wire_us(int(node.attr["num_bytes"]))
    elements = sum(graph.tensors[n].elements for n in node.outputs)
    return real.kernel_us(node.name, elements, rank)


def check_captured(out: Path, spread: Graph) -> None:
    """What both ranks captured of the step as it ran, against the graph that was spread
    from one rank's: collectives in their order, products, and a price together."""
    graphs = [read_graph(out.with_suffix(f".graph{rank}.json")) for rank in range(2)]
    wanted = [
        (n.attr["collective"], n.attr["num_bytes"])
        for n in spread.nodes
        if "collective" in n.attr
    ]
    for graph in graphs:
        found = [n for n in graph.nodes if "collective" in n.attr]
        assert [(n.attr["collective"], n.attr["num_bytes"]) for n in found] == wanted
        assert {n.attr["ranks"] for n in found} == {2}
        assert {n.phase for n in graph.nodes} == set(StepPhase)
        names = [n.name for n in graph.nodes]
        expected = [n.name for n in spread.nodes]
        for name in ("aten::addmm", "aten::mm", "fsdp::chunk_cat"):
            assert names.count(name) == expected.count(name)
    device, wires = bare_device("h100"), Wires(fabric=straight_fabric(10.0, 100.0))
    together = estimate_graphs(graphs, device, wires)
    assert together.communication_us > 0
    assert together.step_us == pytest.approx(together.alone_us)  # nobody is late


@pytest.mark.parametrize("how", real.WAYS)
def test_simulated_ranks_are_real_ones(how: str, directory: Path) -> None:
    """Every operator of a real step, with its waits for a slower rank, in virtual time:
    the graph that was captured without ranks says the same."""
    assert real.GAP_US == KERNEL_GAP_US
    out = directory / how
    seen = [
        json.loads(out.with_suffix(f".{rank}.json").read_text())
        for rank in range(real.NUM_RANKS)
    ]
    graph = graph_of(how)
    collectives = [
        [node.attr["collective"], node.attr["num_bytes"]]
        for node in graph.nodes
        if node.stream is Stream.COMMUNICATION and "collective" in node.attr
    ]
    assert all(one["collectives"] == collectives for one in seen)
    assert len({kind for kind, _ in collectives}) == (1 if how == "ddp" else 2)
    found = simulate_ranks([tasks_of(graph, rank) for rank in range(real.NUM_RANKS)])
    for rank, one in zip(found.ranks, seen, strict=True):
        assert rank.step_us == pytest.approx(one["step_us"], rel=1e-9)
    check_captured(out, graph)
    alone = simulate_ranks([tasks_of(graph, 1)]).step_us
    assert found.ranks[0].step_us > 1.2 * simulate_ranks([tasks_of(graph, 0)]).step_us
    assert found.step_us >= alone

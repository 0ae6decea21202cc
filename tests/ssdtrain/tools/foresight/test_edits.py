"""Nodes inserted, removed, replaced, run beside others; reuse factors of look-ups."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.edits import inserted, parallelized, removed, replaced
from ssdtrain.tools.foresight.graph import Allocation, Graph, Node, Stream, TensorInfo
from ssdtrain.tools.foresight.lowering import lower
from ssdtrain.tools.foresight.reuse import BINS, distinct_share
from ssdtrain.tools.foresight.simulate import Task, simulate_ranks


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Two branches of one input, added up."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(32, 64), nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x).relu() + self.right(x).relu()

    with torch.device("meta"):
        net, x = Net(), torch.randn(8, 32)
        return capture(net, lambda: net(x).sum())


def at(graph: Graph, name: str, nth: int = 0) -> int:
    return [i for i, node in enumerate(graph.nodes) if node.name == name][nth]


def test_a_node_is_inserted_removed_and_replaced(graph: Graph) -> None:
    where = at(graph, "aten::relu")
    relu = graph.nodes[where]
    storage, tensor = max(graph.storages) + 1, max(graph.tensors) + 1
    info = replace(graph.tensors[relu.outputs[0]], storage=storage)
    extra = {
        "tensors": {tensor: info},
        "storages": {storage: Allocation(num_bytes=info.num_bytes, born=0, dies=0)},
    }
    copy = Node(
        name="aten::clone", phase=relu.phase, inputs=relu.inputs, outputs=(tensor,)
    )
    more = inserted(graph, where, (copy,), **extra)
    assert len(more.nodes) == len(graph.nodes) + 1
    assert more.storages[storage].born == more.storages[storage].dies == where
    again = removed(more, where, where + 1)
    assert again.nodes == graph.nodes and storage not in again.storages
    other = replaced(graph, where, where + 1, (replace(relu, name="aten::gelu"),))
    assert other.nodes[where].name == "aten::gelu"
    assert other.storages == removed(inserted(graph, 0, ()), 0, 0).storages


def test_what_would_leave_a_hole_is_refused(graph: Graph) -> None:
    where = at(graph, "aten::relu")
    with pytest.raises(ConfigError, match="which no node makes any more; replace it"):
        removed(graph, where, where + 1)
    with pytest.raises(ConfigError, match=r"expects nodes of 0 to \d+, got 5 to 2"):
        replaced(graph, 5, 2, ())
    used = next(iter(graph.tensors))
    info = TensorInfo(shape=(1,), dtype="fp32", stride=(1,), storage=0)
    with pytest.raises(ConfigError, match="is one of the graph's; number it anew"):
        inserted(graph, 0, (), tensors={used: info})


def test_a_branch_runs_beside_what_does_not_read_it(graph: Graph) -> None:
    first, end = at(graph, "aten::addmm"), at(graph, "aten::relu") + 1
    beside = parallelized(graph, first, end)
    assert {node.stream for node in beside.nodes[first:end]} == {Stream.SIDE}
    assert beside.nodes[end:] == graph.nodes[end:]
    with pytest.raises(ConfigError, match="a branch expects kernels, got copy on"):
        copy = replace(graph.nodes[first], name="copy", stream=Stream.COPY_OUT)
        parallelized(replaced(graph, first, first + 1, (copy,)), first, end)


def test_kernels_of_both_queues_overlap() -> None:
    """Two of 100 us beside one another, and one that waits for both."""

    def step(stream: Stream) -> float:
        tasks = [
            Task(name="left", host_us=1, device_us=100, stream=stream),
            Task(name="right", host_us=1, device_us=100),
            Task(name="sum", host_us=1, device_us=10, after=(0, 1)),
        ]
        return simulate_ranks([tasks]).step_us

    assert step(Stream.SIDE) < 120 < 205 < step(Stream.COMPUTE)


def test_a_node_may_bring_them() -> None:
    with torch.device("meta"):
        table = nn.Embedding(1000, 16)
        index = torch.zeros(4096, dtype=torch.long)
        graph = capture(table, lambda: table(index).sum())
    where = at(graph, "aten::embedding")
    factors = (0.0, 1.0, *[0.0] * (BINS - 2))
    node = replace(graph.nodes[where], attr={"reuse_factors": factors})
    known = replaced(graph, where, where + 1, (node,))
    [call] = lower(known, known.nodes[where]).calls
    assert call.sizes["distinct_rows"] == pytest.approx(4096 * distinct_share(factors))

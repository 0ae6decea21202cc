"""Edits, tasks and messages that have no meaning are named, not computed."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ssdtrain.errors import ConfigError
from ssdtrain.tools.foresight import edits
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.collectives import (
    Collective,
    all_to_all_bytes,
    bus_bytes,
    straight_fabric,
)
from ssdtrain.tools.foresight.graph import Graph, graph_from_json, graph_to_json
from ssdtrain.tools.foresight.pipeline import ChunkTimes, pipeline_tasks
from ssdtrain.tools.foresight.ranks import RankLayout
from ssdtrain.tools.foresight.simulate import Task, simulate_ranks


class Masked(nn.Module):
    """A result that is changed in place behind its maker, and a number that JSON does
    not have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.relu(self.up(x), inplace=True)
        return self.down(wide).masked_fill(x > 0, -math.inf)


def graph_of() -> Graph:
    with torch.device("meta"):
        model, x = Masked(), torch.randn(4, 4)
        return capture(model, lambda: model(x).sum(), optimizer="adamw")


GRAPH = graph_of()
CHUNK = ChunkTimes(forward_us=1.0, backward_us=1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: edits.fused(GRAPH, -3, -1), r"nodes of 0 to \d+, got -3 to -1"),
        (lambda: edits.fused(GRAPH, 0, 999), r"nodes of 0 to \d+, got 0 to 999"),
        (lambda: bus_bytes(Collective.SEND, math.nan, 2), r"0 or more bytes, got nan"),
        (lambda: all_to_all_bytes([], 4, 4), r"1 or more ranks, got none"),
        (lambda: straight_fabric(1.0, 0.0), r"bandwidth above 0, got 1.0 us and 0.0"),
        (lambda: RankLayout(num_ranks=2, slower=math.nan), r"1 or more, got nan"),
        (lambda: pipeline_tasks([[CHUNK]], 0), r"expects micro-batches, got 0"),
        (lambda: pipeline_tasks([[]], 1), r"as many chunks on each rank, got \[0\]"),
        (
            lambda: simulate_ranks([[Task(name="k", after=(0,))]]),
            r"earlier .* got \(0,\)",
        ),
        (
            lambda: simulate_ranks([[Task(name="k"), Task(name="l", after=(-1,))]]),
            r"task 1 \(l\) expects to wait for earlier tasks .* got \(-1,\)",
        ),
        (
            lambda: simulate_ranks([[Task(name="k", device_us=math.nan)]]),
            r"task 0 \(k\) expects times of 0 or more, got 0.0, 0.0 and nan us",
        ),
    ],
)
def test_what_has_no_meaning_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_numbers_that_json_does_not_have_are_written_as_text() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = json.dumps(graph_to_json(GRAPH))
    assert graph_from_json(json.loads(text, parse_constant=refuse)) == GRAPH
    assert '"value": "-inf"' in text


def test_a_fused_kernel_reads_what_it_changes_in_place() -> None:
    """`relu_` alone: its operand was made before and is read and written."""
    at = next(i for i, n in enumerate(GRAPH.nodes) if n.name == "aten::relu_")
    before = GRAPH.nodes[at]
    after = edits.fused(GRAPH, at, at + 1).nodes[at]
    assert after.inputs == after.outputs == before.inputs

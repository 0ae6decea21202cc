"""Tensor parallel steps of one rank, whose others are not there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ssdtrain.tools.cli import main
from ssdtrain.tools.foresight.call import KernelFamily
from ssdtrain.tools.foresight.capture import capture
from ssdtrain.tools.foresight.collectives import Collective
from ssdtrain.tools.foresight.graph import Graph, Stream
from ssdtrain.tools.foresight.lowering import lower
from ssdtrain.tools.foresight.overheads import StepPhase
from ssdtrain.tools.foresight.spec import Kind
from ssdtrain.tools.foresight.steps import capture_step

WIDTH, ROWS, RANKS = 32, 16, 2


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of two ranks that does nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def network(*, is_split: bool) -> nn.Sequential:
    """A layer of every rank's own, one split by columns, one by rows."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    if is_split:
        mesh = init_device_mesh("cpu", (RANKS,))
        parallelize_module(
            model, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()}
        )
    return model


def graph_of(*, is_split: bool) -> Graph:
    with torch.device("meta"):
        model, x = network(is_split=is_split), torch.randn(ROWS, WIDTH)
        return capture(model, lambda: model(x).sum(), optimizer="adamw", on=Kind.CPU)


def flops(graph: Graph) -> float:
    return sum(
        call.flops
        for node in graph.nodes
        for call in lower(graph, node).calls
        if call.family is KernelFamily.PRODUCT
    )


def views(graph: Graph, phase: StepPhase) -> float:
    own = [node for node in graph.nodes if node.phase is phase]
    return sum(float(node.attr.get("host_views", 0.0)) for node in own)


def test_a_rank_has_its_share_of_products_and_what_is_sent() -> None:
    graph, whole = graph_of(is_split=True), graph_of(is_split=False)
    # Of three equal layers two are halved; the first makes no gradient of its input.
    each = 2.0 * ROWS * WIDTH * WIDTH
    assert (flops(whole), flops(graph)) == (8 * each, (2 + 6 / 2) * each)
    sent = [node for node in graph.nodes if node.stream is Stream.COMMUNICATION]
    assert [node.phase for node in sent] == [StepPhase.FORWARD, StepPhase.BACKWARD]
    for node in sent:
        assert node.attr["collective"] == Collective.ALL_REDUCE.value
        assert (node.attr["num_bytes"], node.attr["ranks"]) == (4 * ROWS * WIDTH, RANKS)
    assert graph.parameter_bytes == whole.parameter_bytes * 2 / 3


def test_what_runs_is_what_the_meta_device_shows_of_a_rank() -> None:
    graph = graph_of(is_split=True)
    model, x = network(is_split=True), torch.randn(ROWS, WIDTH)
    ran = capture_step(lambda: model(x).sum().backward(), model, num_warm=0)
    update = [node for node in graph.nodes if node.phase is StepPhase.UPDATE]
    assert [n.name for n in ran.nodes] == [
        n.name for n in graph.nodes if n not in update
    ]
    for phase in (StepPhase.FORWARD, StepPhase.BACKWARD):
        assert views(ran, phase) == pytest.approx(views(graph, phase))


MODEL = f"""
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

def build(micro_batch):
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2)))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {{"1": ColwiseParallel()}})
    x = torch.randn(micro_batch, {WIDTH})
    return model, lambda: model(x).sum()
"""


def test_the_command_prices_a_rank_s_collectives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.py").write_text(MODEL)
    arguments = ["foresight", "predict", "--model", f"{tmp_path}/my.py:build"]
    assert main([*arguments, "--device", "h200", "--micro-batch", "16"]) == 0
    assert "the host binds it" in capsys.readouterr().out

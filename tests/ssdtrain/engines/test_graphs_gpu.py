"""CUDA graphs on a GPU: captured steps, replayed, byte for byte."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from ssdtrain.errors import CaptureError
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.engines.blocks import Block

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, ROWS, NUM_REPLAYS = 256, 512, 50
MOVES: dict[str, Any] = {"target": "host", "min_bytes": 1, "plan": "offload-all"}


def made() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.Sequential(*(Block(WIDTH) for _ in range(4)))


def inputs(number: int) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(number)
    return torch.randn(ROWS, WIDTH, device="cuda", generator=draw)


def captured(model: nn.Module, x: Tensor) -> Callable[[], list[Tensor]]:
    """Forward and backward in one graph; gives the gradients of a replay."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    grads = [p.grad for p in model.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch._foreach_zero_(grads)
        loss = model(x).square().mean()
        loss.backward()
        found = loss.detach()
    del loss  # its graph holds the nodes of another stream

    def replay() -> list[Tensor]:
        graph.replay()
        return [found.clone(), *(grad.clone() for grad in grads)]

    return replay


def warm_up(model: nn.Module, x: Tensor) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("recompute", ["auto", "off"])
def test_replays_are_byte_equal(recompute: str) -> None:
    x, model = inputs(0), made()
    warm_up(model, x)
    plain = captured(model, x)
    with ssdtrain.offload(model, **MOVES, recompute=recompute) as session:
        warm_up(model, x)
        ours = captured(model, x)
        assert session.graph_bytes > 0
        for number in range(NUM_REPLAYS):
            x.copy_(inputs(number))
            for a, b in zip(ours(), plain(), strict=True):
                assert same_bits(a, b), number
    assert same_bits(ours(), plain())


# torch's own: it holds the results of its warm-up on another stream while it captures.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_callables_are_graphed_in_two_parts() -> None:
    x, model, theirs = inputs(0), made(), made()
    with ssdtrain.offload(model, **MOVES) as session:
        warm_up(model, x)
        graphed = torch.cuda.make_graphed_callables(model, (x.requires_grad_(),))
        assert session.graph_bytes > 0
        for number in range(5):
            both = []
            for net in (graphed, theirs):
                net.zero_grad()
                y = inputs(number).requires_grad_()
                net(y).square().mean().backward()
                both.append([y.grad, *(p.grad for p in net.parameters())])
            assert same_bits(*both)


def test_a_plan_that_is_not_made_is_refused() -> None:
    x, model = inputs(0), made()
    warm_up(model, x)
    with ssdtrain.offload(model, max_overhead=0.01, target="host", min_bytes=1):
        with pytest.raises(CaptureError, match="can_capture"):
            captured(model, x)
        torch.cuda.synchronize()
        model(x).square().mean().backward()

"""The selective row of `ssdtrain fits`: attention and every second product are stored,
whatever autograd saves of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.bench.models.unseen import DiffusionBlock
from ssdtrain.tools.foresight.device import load_device
from ssdtrain.tools.foresight.spec import links_of
from ssdtrain.tools.report.build_public import Loss, Train, shape_of
from ssdtrain.tools.report.capture import Captured, Question, captured_step
from ssdtrain.tools.report.estimate import estimate
from ssdtrain.tools.report.fits import CHECKPOINTING, PLAIN, SELECTIVE, priced_ways
from ssdtrain.tools.report.selective import kept_operators

H100 = load_device("h100")
WIDTH, BATCH, LENGTH = 1024, 96, 256


def test_products_are_counted_from_the_first_on() -> None:
    names = ["aten::mm", "aten::view", "aten::addmm", "aten::mm", "aten::add"]
    names += ["aten::_scaled_dot_product_flash_attention", "aten::mm", "aten::addmm"]
    assert kept_operators(enumerate(names)) == [0, 3, 5, 7]


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DiffusionBlock(WIDTH, 16) for _ in range(6))

    def forward(self, x: Tensor, time: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x, time)
        return x.square().mean()


def diffusion() -> Captured:
    with torch.device("meta"):
        model = Diffusion().bfloat16()
        x = torch.zeros(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16)
        time = torch.zeros(BATCH, WIDTH, dtype=torch.bfloat16)
        made = estimate(
            model, lambda: model(x, time), links_of(H100.spec), H100, min_bytes=1 << 16
        )
    weights = sum(p.numel() * 2 for p in model.parameters())
    return Captured(
        profile=made.profile,
        weights=weights,
        gradients=weights,
        optimizer=0,
        stored=made.stored,
    )


def vit(tokens: int = 65536) -> Captured:
    shape = shape_of("vit-huge", Train.FULL, Loss.STOCK)
    return captured_step(Question(model="vit-huge"), shape, H100, tokens)


@pytest.mark.parametrize("captured", [diffusion, vit])
def test_it_lies_between_plain_and_checkpointing(
    captured: Callable[[], Captured],
) -> None:
    found = captured()
    ways = priced_ways(found)
    plain, again, some = (ways[name] for name in (PLAIN, CHECKPOINTING, SELECTIVE))
    saved_ms = sum(each.ms for each in found.stored)
    stored = sum(each.num_bytes for each in found.stored)
    assert plain[0] < some[0] < again[0] and again[1] < some[1] < plain[1]
    assert some[0] == pytest.approx(again[0] - saved_ms, rel=0.02)
    assert some[1] - again[1] <= stored
    assert some[1] - again[1] > 0.8 * stored


def test_its_dispatch_mode_takes_the_host_time() -> None:
    """A step that waits for the host is longer than under checkpointing."""
    ways = priced_ways(vit(4096))
    assert ways[SELECTIVE][0] > 1.1 * ways[CHECKPOINTING][0]

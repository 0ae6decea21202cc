"""The chain of layers is the stock model, cut at its joints."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ssdtrain.train.models import model_of
from ssdtrain.train.models.base import Layer, token_loss
from ssdtrain.train.settings import RunSettings

Make = Callable[..., RunSettings]
VOCAB = 384


def build(layers: list[Layer]) -> list[tuple[Layer, nn.Module]]:
    """Build the chain as one process would, tied layers once."""
    tied: dict[str, nn.Module] = {}
    built = []
    for layer in layers:
        module = tied.get(layer.tied or "") or layer.kind(*layer.arguments)
        if layer.tied:
            tied[layer.tied] = module
        built.append((layer, module))
    return built


def run(chain: list[tuple[Layer, nn.Module]], x: object) -> object:
    for layer, module in chain:
        x = module(x) if layer.forward is None else layer.forward(module, x)
    return x


def test_gpt_layers_compute_what_the_stock_model_computes(tiny: Make) -> None:
    torch.manual_seed(0)
    model = model_of(tiny(model={"dropout": 0.0}).model, VOCAB)
    whole, chain = model.whole(), build(model.layers())
    stock = whole.model.transformer
    (_, tokens), (_, positions), *blocks, (_, norm), (_, head) = chain
    assert head is tokens
    tokens.load_state_dict(stock.wte.state_dict())
    positions.wpe.load_state_dict(stock.wpe.state_dict())
    norm.load_state_dict(stock.ln_f.state_dict())
    for (_, block), original in zip(blocks, stock.h, strict=True):
        block.block.load_state_dict(original.state_dict())
    ids = torch.randint(0, VOCAB, (2, 16))
    labels = torch.randint(0, VOCAB, (2, 16))
    logits = run(chain, ids)
    assert torch.equal(logits, whole.logits(ids))
    assert torch.equal(token_loss(logits, labels), whole(ids, labels))


def test_gpt_layers_start_like_the_stock_model(tiny: Make) -> None:
    torch.manual_seed(0)
    model = model_of(tiny(model={"hidden_size": 128}).model, VOCAB)
    stock = dict(model.whole().model.transformer.h[0].named_parameters())
    chain = build(model.layers())
    for name, parameter in chain[2][1].block.named_parameters():
        expected = stock[name].detach().std().item()
        assert parameter.detach().std().item() == pytest.approx(
            expected, rel=0.1, abs=1e-6
        ), name


@pytest.mark.parametrize("how", ["none", "reentrant", "non-reentrant"])
def test_checkpointing_changes_no_gradient(tiny: Make, how: str) -> None:
    def gradients(how: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = model_of(tiny(model={"checkpointing": how}).model, VOCAB)
        whole = model.whole().train()
        torch.manual_seed(1)
        ids = torch.arange(32).view(2, 16)
        whole(ids, ids).backward()
        return [p.grad for p in whole.parameters()]

    for one, other in zip(gradients("none"), gradients(how), strict=True):
        assert torch.equal(one, other)


def test_loss_skips_ignored_labels() -> None:
    logits = torch.randn(1, 3, 5)
    labels = torch.tensor([[2, -100, 4]])
    kept = token_loss(logits[:, [0, 2]], labels[:, [0, 2]])
    assert torch.equal(token_loss(logits, labels), kept)

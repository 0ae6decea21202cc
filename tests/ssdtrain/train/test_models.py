"""The chain of layers is the stock model, cut at its joints."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ssdtrain.train.models import model_of
from ssdtrain.train.models.base import Layer, token_loss
from ssdtrain.train.models.t5 import DecoderBlock, EncoderBlock, Norm
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


def test_bert_layers_compute_what_the_stock_model_computes(tiny: Make) -> None:
    torch.manual_seed(0)
    settings = tiny(model={"family": "bert", "dropout": 0.0}).model
    model = model_of(settings, VOCAB)
    whole, chain = model.whole(), build(model.layers())
    stock = whole.model.bert
    (_, tokens), (_, first), *blocks, (_, transform), (_, head), (_, bias) = chain
    assert head is tokens
    tokens.load_state_dict(stock.embeddings.word_embeddings.state_dict())
    first.positions.load_state_dict(stock.embeddings.position_embeddings.state_dict())
    first.types.load_state_dict(stock.embeddings.token_type_embeddings.state_dict())
    first.norm.load_state_dict(stock.embeddings.LayerNorm.state_dict())
    for (_, block), original in zip(blocks, stock.encoder.layer, strict=True):
        block.block.load_state_dict(original.state_dict())
    predictions = whole.model.cls.predictions
    transform.transform.load_state_dict(predictions.transform.state_dict())
    bias.bias.data.copy_(predictions.bias.data)
    ids = torch.randint(0, VOCAB, (3, 16))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    assert torch.equal(run(chain, (ids, mask)), whole.logits(ids, mask))


def loaded_t5(tiny: Make, layers: int) -> tuple[Any, list[tuple[Layer, nn.Module]]]:
    settings = tiny(model={"family": "t5", "dropout": 0.0, "num_layers": layers}).model
    model = model_of(settings, VOCAB)
    whole, chain = model.whole(), build(model.layers())
    stock = whole.model
    chain[0][1].load_state_dict(stock.shared.state_dict())
    parts = [
        *stock.encoder.block,
        stock.encoder.final_layer_norm,
        *stock.decoder.block,
        stock.decoder.final_layer_norm,
    ]
    own = [m for _, m in chain if isinstance(m, EncoderBlock | DecoderBlock | Norm)]
    for module, original in zip(own, parts, strict=True):
        inner = module.norm if isinstance(module, Norm) else module.block
        inner.load_state_dict(original.state_dict())
    return whole, chain


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_t5_layers_compute_what_the_stock_model_computes(
    tiny: Make, layers: int
) -> None:
    torch.manual_seed(0)
    whole, chain = loaded_t5(tiny, layers)
    assert len(whole.model.decoder.block) == layers // 2
    source, target = torch.randint(0, VOCAB, (2, 16)), torch.randint(0, VOCAB, (2, 7))
    assert torch.equal(run(chain, (source, target)), whole.logits(source, target))


def test_t5_cut_anywhere_gives_every_gradient(tiny: Make) -> None:
    """At every cut each float tensor that crosses gets a gradient, the hidden state
    is last, and integers stay integers."""
    torch.manual_seed(0)
    _, chain = loaded_t5(tiny, 5)
    inputs = torch.randint(0, VOCAB, (2, 16)), torch.randint(0, VOCAB, (2, 7))
    for cut in range(1, len(chain)):
        crossing = run(chain[:cut], inputs)
        tensors = crossing if isinstance(crossing, tuple) else (crossing,)
        received = tuple(
            t.detach().requires_grad_(t.is_floating_point()) for t in tensors
        )
        behind = run(chain[cut:], received if len(received) > 1 else received[0])
        behind.sum().backward()
        assert received[-1].is_floating_point()
        for tensor in received:
            assert (tensor.grad is not None) == tensor.is_floating_point(), cut


@pytest.mark.parametrize("how", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
def test_checkpointing_changes_no_gradient(tiny: Make, family: str, how: str) -> None:
    ids = torch.arange(32).view(2, 16)
    inputs = {"gpt": (ids,), "bert": (ids, ids % 2), "t5": (ids, ids)}[family]

    def gradients(how: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        settings = tiny(model={"checkpointing": how, "family": family}).model
        chain = build(model_of(settings, VOCAB).layers())
        torch.manual_seed(1)
        given = inputs if len(inputs) > 1 else inputs[0]
        token_loss(run(chain, given), ids).backward()
        modules = {id(m): m for _, m in chain}.values()
        return [p.grad for m in modules for p in m.parameters()]

    for one, other in zip(gradients("none"), gradients(how), strict=True):
        assert torch.equal(one, other)


def test_loss_skips_ignored_labels() -> None:
    logits = torch.randn(1, 3, 5)
    labels = torch.tensor([[2, -100, 4]])
    kept = token_loss(logits[:, [0, 2]], labels[:, [0, 2]])
    assert torch.equal(token_loss(logits, labels), kept)

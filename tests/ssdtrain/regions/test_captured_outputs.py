"""Hooks inside a layer with which transformers collects attentions."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import ssdtrain
from tests.ssdtrain.bits import same_bits

SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
}


@pytest.mark.parametrize("asks", [False, True])
def test_hooks_that_collect_outputs_do_nothing_in_a_re_run(asks: bool) -> None:
    """They stay once anybody has asked, and collect in the model's forward alone."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.BertConfig(num_hidden_layers=3, **SIZES)
    torch.manual_seed(0)
    plain = transformers.BertModel(config).train()
    ids = torch.arange(24).view(2, 12) % 17
    with torch.no_grad():
        assert len(plain(ids, output_attentions=True).attentions) == 3
    ours = copy.deepcopy(plain)
    inside = [m for m in ours.encoder.layer[1].modules() if m._forward_hooks]
    assert any(module is not ours.encoder.layer[1] for module in inside)

    def step(model: Any) -> list[Any]:
        torch.manual_seed(1)
        found = model(ids, output_attentions=asks)
        loss = found.last_hidden_state.square().mean()
        if asks:
            assert len(found.attentions) == 3
            loss = loss + sum(each[..., 0].square().mean() for each in found.attentions)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    with ssdtrain.offload(
        ours, plan="keep-all", recompute="regions", min_bytes=0
    ) as session:
        for _ in range(3):
            assert same_bits(step(ours), step(plain))
        assert session.last_step is not None
        assert session.last_step.recipes["region"] > 0
        assert session.cache.regions.reasons == {}


def test_a_re_run_inside_the_forward_collects_nothing() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.LlamaConfig(num_hidden_layers=2, use_cache=False, **SIZES)
    torch.manual_seed(0)
    plain = transformers.LlamaModel(config)
    given: list[Tensor] = []
    norm = plain.norm.forward

    def penalized(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(x.square().sum(), given[-1], retain_graph=True)
        made: Tensor = norm(x)
        return made + found.sum()

    plain.norm.forward = penalized
    ids = torch.arange(16).view(2, 8) % 17

    def step() -> list[Any]:
        plain.zero_grad()
        given[:] = [plain.embed_tokens(ids).detach().requires_grad_()]
        found = plain(inputs_embeds=given[-1], output_attentions=True)
        loss = found.last_hidden_state.square().mean()
        loss = loss + sum(each.square().sum() for each in found.attentions)
        loss.backward()
        gradients = [p.grad for p in plain.parameters() if p.grad is not None]
        return [len(found.attentions), loss.detach(), *(g.clone() for g in gradients)]

    number, *expected = step()
    with ssdtrain.offload(
        plain, plan="keep-all", recompute="regions", min_bytes=64
    ) as session:
        for _ in range(3):
            found, *values = step()
            assert found == number == 2 and same_bits(values, expected)
        assert session.cache.regions.reasons == {}

"""Layers that are given an empty KV cache in training run again."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from tests.ssdtrain.bits import same_bits

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
T5: dict[str, Any] = {
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
}


def built(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if kind == "T5":
        config = transformers.T5Config(**T5)
        model = transformers.T5ForConditionalGeneration(config)
    else:
        config = getattr(transformers, f"{kind}Config")(**SIZES)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert config.use_cache
    return model.train()  # type: ignore[no-any-return]


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(2))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", ["Llama", "Mixtral", "Gemma2", "T5"])
def test_an_empty_cache_is_no_obstacle(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = built(kind)
    theirs = step(model)
    with (
        caplog.at_level(logging.WARNING),
        ssdtrain.offload(
            model, plan="keep-all", recompute="regions", min_bytes=0
        ) as session,
    ):
        for _ in range(3):
            assert same_bits(step(model), theirs)
        assert session.last_step is not None
        assert session.last_step.recipes["region"] > 0
        assert session.cache.regions.reasons == {}
    assert caplog.text.count("use_cache=False") == 1
    assert same_bits(step(model), theirs)


def test_a_cache_with_a_prefix_is_kept() -> None:
    """As prefix tuning gives: it is part of what the model computes."""
    import transformers

    model = built("Llama")
    draw = torch.Generator().manual_seed(3)
    states = [torch.randn(2, 2, 4, 8, generator=draw) for _ in range(2)]

    def one() -> list[Tensor]:
        model.zero_grad()
        cache = transformers.DynamicCache()
        for layer in range(2):
            cache.update(*states, layer)
        ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(2))
        loss = model(input_ids=ids, labels=ids, past_key_values=cache).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    theirs = one()
    assert not torch.equal(theirs[0], step(model)[0])
    with ssdtrain.offload(model, plan="keep-all", recompute="regions", min_bytes=0):
        for _ in range(3):
            assert same_bits(one(), theirs)

"""Layers that read rotary tables and a mask of attention, under a plan."""

import pytest
import torch

import ssdtrain
from ssdtrain.transfer.device import CpuDevice

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("length", [39, 20])
def test_a_table_is_not_taken_for_a_smaller_mask(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are `input` with four dimensions; a batch with padding has a mask."""
    monkeypatch.setattr(CpuDevice, "capacity_bytes", lambda device: 1 << 40)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    longest = torch.randint(3, 64, (4, 39))
    settings = {"memory_budget": 700_000, "min_bytes": 0, "target": "host"}
    with ssdtrain.offload(model, **settings) as session:
        for number in range(12):
            tokens = longest if number < 8 else longest[:, :length]
            mask = torch.ones_like(tokens)
            mask[1:, :4] = 0
            model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    report = session.steps[-1]
    assert session.plan is not None
    assert report.bytes_offloaded > 0.5 * report.bytes_saved
    for each in session.steps:
        assert not any("saved other tensors" in why for why in each.fallbacks)

"""Mixtures of experts as transformers runs them, while the routing changes."""

from typing import Any

import pytest
import torch

import ssdtrain
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.cache.plans import all_moved

SETTINGS: dict[str, Any] = {"max_overhead": 0.01, "target": "host", "min_bytes": 1}
AT_ONCE = {**SETTINGS, "plan": "offload-all", "window_bytes": 1}


def experts(grouped: bool, settings: dict[str, Any] | None) -> Any:
    """Steps of a small Qwen3 mixture of experts whose routing changes."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=1,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.set_experts_implementation("grouped_mm" if grouped else "eager")
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    session = None if settings is None else ssdtrain.offload(model, **settings)
    for step in range(6):
        if session is not None and session.plan is not None and step == 3:
            session.follow(all_moved(session))
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(64, (2, 16), generator=draw)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    reports = [] if session is None else session.steps
    if session is not None:
        session.close()
    return found, reports


@pytest.mark.parametrize("grouped", [True, False])
def test_a_mixture_of_experts_is_equal_and_keeps_its_plan(grouped: bool) -> None:
    pytest.importorskip("transformers")
    theirs, _ = experts(grouped, None)
    # In a loop over experts every size changes with the routing: no plan fits it.
    ours, reports = experts(
        grouped,
        {"max_overhead": 0.01, **SETTINGS, "plan": "auto"} if grouped else AT_ONCE,
    )
    assert same_bits(ours, theirs)
    mismatch = "unplanned: a micro-batch saved other tensors than the plan's"
    assert not any(mismatch in report.fallbacks for report in reports)
    assert reports[-1].bytes_offloaded > 0

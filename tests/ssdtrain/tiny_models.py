"""Small stock models that several tests train."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2(num_layers: int, hidden: int, sequence: int, vocabulary: int) -> nn.Module:
    """With its dropout; random weights."""
    config = GPT2Config(
        n_layer=num_layers,
        n_embd=hidden,
        n_head=2,
        n_positions=sequence,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLMLoss",
        use_cache=False,
    )
    model: Any = GPT2LMHeadModel(config)
    return model  # type: ignore[no-any-return]


def tanhs() -> nn.Module:
    """(rows, 32) to the same; saves what it makes."""
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())


def train(model: Any, parameters: Iterable[nn.Parameter], num_steps: int) -> None:
    """Steps of SGD on 8 random rows of 32."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(num_steps):
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

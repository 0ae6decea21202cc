"""Small stock models that several tests train."""

from typing import Any

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

"""Language models of transformers, small or of a size that fills a GPU's kernels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

NAMES = ("gpt2", "bert", "t5", "llama")


@dataclass(frozen=True)
class Shape:
    """Sizes shared by all four."""

    hidden: int
    num_layers: int
    num_heads: int
    vocabulary: int
    batch: int
    sequence: int


TINY = Shape(64, 2, 2, 128, 2, 32)
SMALL = Shape(256, 2, 4, 512, 4, 64)
LARGE = Shape(1024, 4, 16, 32000, 8, 512)


def config(name: str, shape: Shape) -> Any:
    """The configuration of one model, with its own dropout rates."""
    import transformers

    heads, layers, hidden = shape.num_heads, shape.num_layers, shape.hidden
    if name == "gpt2":
        return transformers.GPT2Config(
            vocab_size=shape.vocabulary,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            n_positions=shape.sequence,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLMLoss",
            use_cache=False,
        )
    if name == "bert":
        return transformers.BertConfig(
            vocab_size=shape.vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            max_position_embeddings=shape.sequence,
            loss_type="ForMaskedLMLoss",
        )
    if name == "t5":
        return transformers.T5Config(
            vocab_size=shape.vocabulary,
            d_model=hidden,
            d_kv=hidden // heads,
            d_ff=4 * hidden,
            num_layers=layers,
            num_heads=heads,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            pad_token_id=0,
            use_cache=False,
        )
    return transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=shape.sequence,
        use_cache=False,
    )


def build(name: str, shape: Shape) -> nn.Module:
    """A seeded model in training mode, fp32, on the CPU."""
    import transformers

    classes = {
        "gpt2": transformers.GPT2LMHeadModel,
        "bert": transformers.BertForMaskedLM,
        "t5": transformers.T5ForConditionalGeneration,
        "llama": transformers.LlamaForCausalLM,
    }
    torch.manual_seed(0)
    return classes[name](config(name, shape)).train()  # type: ignore[no-any-return]


def tokens(shape: Shape) -> torch.Tensor:
    """(B, S) int64, from the CPU's default generator."""
    return torch.randint(1, shape.vocabulary, (shape.batch, shape.sequence))

"""GPT: a causal language model from a `transformers` GPT2Config, random weights."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2PreTrainedModel

from ssdtrain.train.models.base import (
    TOKENS,
    Layer,
    Model,
    TokenEmbedding,
    initialise,
    run_block,
    tied_logits,
)
from ssdtrain.train.settings import Checkpointing, ModelSettings


def gpt_config(settings: ModelSettings, vocab_size: int) -> GPT2Config:
    """Return the `transformers` configuration for these settings."""
    return GPT2Config(
        vocab_size=vocab_size,
        n_positions=settings.sequence_length,
        n_embd=settings.hidden_size,
        n_layer=settings.num_layers,
        n_head=settings.num_heads,
        resid_pdrop=settings.dropout,
        embd_pdrop=settings.dropout,
        attn_pdrop=settings.dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


class GptPositions(nn.Module):
    """Adds learned positions to embedded tokens."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wpe = nn.Embedding(config.n_positions, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)
        nn.init.normal_(self.wpe.weight, std=config.initializer_range)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: float [batch, sequence, width]; returns the same shape."""
        places = torch.arange(hidden.size(1), dtype=torch.int64, device=hidden.device)
        summed: Tensor = self.drop(hidden + self.wpe(places.unsqueeze(0)))
        return summed


class GptBlock(nn.Module):
    """One GPT-2 block of `transformers`; causal without a mask (SDPA)."""

    def __init__(self, config: GPT2Config, index: int, how: Checkpointing) -> None:
        super().__init__()
        self.block = GPT2Block(config, layer_idx=index)
        self._how = how
        initialise(self.block, GPT2PreTrainedModel, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: float [batch, sequence, width]; returns the same shape."""
        result: Tensor = run_block(self._how, self.block, hidden)
        return result


class FinalNorm(nn.LayerNorm):
    """The layer norm before the output layer."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config.hidden_size, eps=config.layer_norm_epsilon)


class Gpt(Model):
    """The GPT family at one size."""

    kind = GPT2LMHeadModel
    configure = staticmethod(gpt_config)
    inputs = ("input_ids",)

    def layers(self) -> list[Layer]:
        """Embedding, positions, blocks, norm, output layer (tied)."""
        how, config = self._settings.checkpointing, self.config
        tokens = (config.vocab_size, config.n_embd, config.initializer_range)
        blocks = [
            Layer(GptBlock, (self.config, index, how))
            for index in range(self.config.n_layer)
        ]
        return [
            Layer(TokenEmbedding, tokens, tied=TOKENS),
            Layer(GptPositions, (self.config,)),
            *blocks,
            Layer(FinalNorm, (self.config,)),
            Layer(TokenEmbedding, tokens, tied=TOKENS, forward=tied_logits),
        ]

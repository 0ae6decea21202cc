"""T5: span corruption from a `transformers` T5Config, random weights.

[Note: What crosses a T5 stage] The first block of each stack computes the relative
position bias and the others use it, so it travels with the hidden state and its
gradient travels back. A pipeline needs a gradient for every float tensor that crosses
a stage: the last block of a stack therefore drops what nothing after it uses. The
hidden state is last, because DeepSpeed calls backward once for each float output and
keeps the graph for all but the last.
Test: tests/ssdtrain/train/test_models.py, test_t5_cut_anywhere_gives_every_gradient.
"""

import copy

from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.masking_utils import create_causal_mask
from transformers.models.t5.modeling_t5 import T5Block, T5LayerNorm, T5PreTrainedModel

from ssdtrain.train.models.base import (
    TOKENS,
    Layer,
    Model,
    TokenEmbedding,
    embed_first,
    initialise,
    run_block,
    tied_logits,
)
from ssdtrain.train.settings import Checkpointing, ModelSettings

MLP_RATIO = 4

State = tuple[Tensor, ...]
"""In the encoder (target ids, [bias,] hidden), in the decoder (encoded, [bias,]
hidden). ids: int64 [batch, target]; bias: float [1, heads, query, key]; hidden and
encoded: float [batch, sequence, width]."""


def t5_config(settings: ModelSettings, vocab_size: int) -> T5Config:
    """Return the configuration; decoders are half the layers, rounded down (5.4.1)."""
    decoders = settings.num_layers // 2
    return T5Config(
        vocab_size=vocab_size,
        d_model=settings.hidden_size,
        d_kv=settings.hidden_size // settings.num_heads,
        d_ff=MLP_RATIO * settings.hidden_size,
        num_layers=settings.num_layers - decoders,
        num_decoder_layers=decoders,
        num_heads=settings.num_heads,
        dropout_rate=settings.dropout,
        use_cache=False,
        attn_implementation="sdpa",
    )


def decoder_config(config: T5Config) -> T5Config:
    """Return the decoder's own view of the configuration, as the stock model does."""
    own = copy.deepcopy(config)
    own.is_decoder = True
    own.num_layers = config.num_decoder_layers
    return own


class Drop(nn.Module):
    """Dropout on the hidden state."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.drop = nn.Dropout(config.dropout_rate)

    def forward(self, state: State) -> State:
        """See State."""
        return *state[:-1], self.drop(state[-1])


class _Block(nn.Module):
    """One block of a stack; see [Note: What crosses a T5 stage]."""

    def __init__(self, config: T5Config, index: int, how: Checkpointing) -> None:
        super().__init__()
        self.block = T5Block(config, index == 0, layer_idx=index)
        self._config = config
        self._is_last = index == config.num_layers - 1
        self._how = how
        initialise(self.block, T5PreTrainedModel, config)

    def _passed(
        self, state: State, mask: Tensor | None, encoded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden state and the bias after this block."""
        _, *bias, hidden = state
        given = bias[0] if bias else None
        hidden, given, *_ = run_block(
            self._how, self.block, hidden, mask, given, encoded
        )
        return hidden, given


class EncoderBlock(_Block):
    """A block of the encoder."""

    def forward(self, state: State) -> State:
        """See State; the last block drops the bias."""
        hidden, bias = self._passed(state, None, None)
        return (state[0], hidden) if self._is_last else (state[0], bias, hidden)


class DecoderBlock(_Block):
    """A block of the decoder."""

    def forward(self, state: State) -> State | Tensor:
        """See State; the last block returns the hidden state alone."""
        mask = create_causal_mask(
            config=self._config,
            inputs_embeds=state[-1],
            attention_mask=None,
            past_key_values=None,
        )
        hidden, bias = self._passed(state, mask, state[0])
        return hidden if self._is_last else (state[0], bias, hidden)


class Norm(nn.Module):
    """Final norm and dropout of a stack; `scale` is applied after them."""

    def __init__(self, config: T5Config, scale: float | None = None) -> None:
        super().__init__()
        self.norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.drop = nn.Dropout(config.dropout_rate)
        self._scale = scale

    def forward(self, state: State) -> State | Tensor:
        """Return a state in the encoder, the hidden state alone in the decoder."""
        if isinstance(state, Tensor):
            return self._normed(state)
        *rest, hidden = state
        return (*rest, self._normed(hidden))

    def _normed(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.drop(self.norm(hidden))
        return normed if self._scale is None else normed * self._scale


class T5(Model):
    """The T5 family at one size."""

    kind = T5ForConditionalGeneration
    configure = staticmethod(t5_config)
    inputs = ("input_ids", "decoder_input_ids")

    def layers(self) -> list[Layer]:
        """Encoder, then decoder, then the output layer; one tied embedding."""
        how, config = self._settings.checkpointing, self.config
        own = decoder_config(config)
        tokens = (config.vocab_size, config.d_model, config.initializer_factor)
        tied = config.tie_word_embeddings
        scaled = getattr(config, "scale_decoder_outputs", tied)
        return [
            Layer(TokenEmbedding, tokens, tied=TOKENS, forward=embed_first),
            Layer(Drop, (config,)),
            *(Layer(EncoderBlock, (config, i, how)) for i in range(config.num_layers)),
            Layer(Norm, (config,)),
            Layer(TokenEmbedding, tokens, tied=TOKENS, forward=embed_first),
            Layer(Drop, (config,)),
            *(Layer(DecoderBlock, (own, i, how)) for i in range(own.num_layers)),
            Layer(Norm, (config, config.d_model**-0.5 if scaled else None)),
            Layer(TokenEmbedding, tokens, tied=TOKENS, forward=tied_logits),
        ]

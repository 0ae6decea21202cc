"""BERT: masked language modelling from a `transformers` BertConfig, random weights."""

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.bert.modeling_bert import (
    BertLayer,
    BertPredictionHeadTransform,
    BertPreTrainedModel,
)

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

State = tuple[Tensor, Tensor]
"""What passes from layer to layer: (mask, hidden). mask: int64 [batch, sequence], 1
where there is text; hidden: float [batch, sequence, width]."""


def bert_config(settings: ModelSettings, vocab_size: int) -> BertConfig:
    """Return the `transformers` configuration for these settings."""
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        intermediate_size=MLP_RATIO * settings.hidden_size,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout,
        max_position_embeddings=settings.sequence_length,
        pad_token_id=None,
        attn_implementation="sdpa",
    )


class BertPositions(nn.Module):
    """Adds positions and the one token type, then layer norm and dropout."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.types = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.drop = nn.Dropout(config.hidden_dropout_prob)
        initialise(self, BertPreTrainedModel, config)

    def forward(self, state: State) -> State:
        """See State."""
        mask, hidden = state
        places = torch.arange(hidden.size(1), dtype=torch.int64, device=hidden.device)
        hidden = hidden + self.types(torch.zeros_like(mask))
        hidden = hidden + self.positions(places.unsqueeze(0))
        return mask, self.drop(self.norm(hidden))


class BertBlock(nn.Module):
    """One BERT layer of `transformers`."""

    def __init__(self, config: BertConfig, index: int, how: Checkpointing) -> None:
        super().__init__()
        self.block = BertLayer(config, layer_idx=index)
        self._config = config
        self._how = how
        initialise(self.block, BertPreTrainedModel, config)

    def forward(self, state: State) -> State:
        """See State."""
        mask, hidden = state
        wide = create_bidirectional_mask(
            config=self._config, inputs_embeds=hidden, attention_mask=mask
        )
        return mask, run_block(self._how, self.block, hidden, wide)


class Transform(nn.Module):
    """The dense layer before the output layer; drops the mask."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        initialise(self.transform, BertPreTrainedModel, config)

    def forward(self, state: State) -> Tensor:
        """(mask, hidden) to hidden."""
        _, hidden = state
        transformed: Tensor = self.transform(hidden)
        return transformed


class OutputBias(nn.Module):
    """The output layer's own bias, one value for each token."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, logits: Tensor) -> Tensor:
        """logits: float [batch, sequence, vocabulary]."""
        return logits + self.bias


class Bert(Model):
    """The BERT family at one size."""

    kind = BertForMaskedLM
    configure = staticmethod(bert_config)
    inputs = ("input_ids", "attention_mask")

    def layers(self) -> list[Layer]:
        """Embedding, positions, blocks, transform, output layer (tied), bias."""
        how, config = self._settings.checkpointing, self.config
        tokens = (config.vocab_size, config.hidden_size, config.initializer_range)
        blocks = [
            Layer(BertBlock, (config, index, how))
            for index in range(config.num_hidden_layers)
        ]
        return [
            Layer(TokenEmbedding, tokens, tied=TOKENS, forward=embed_first),
            Layer(BertPositions, (config,)),
            *blocks,
            Layer(Transform, (config,)),
            Layer(TokenEmbedding, tokens, tied=TOKENS, forward=tied_logits),
            Layer(OutputBias, (config.vocab_size,)),
        ]

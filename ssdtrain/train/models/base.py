"""What every model family offers: one whole module, and the same blocks as a chain
of layers that a pipeline can cut."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ssdtrain.train.settings import Checkpointing, ModelSettings

IGNORED_LABEL = -100
"""Positions that the loss skips (the value torch and `transformers` use)."""


TOKENS = "tokens"
"""The name under which the embedding and the output layer share a weight."""


class Layer(NamedTuple):
    """One link of the chain, described and not yet built: a rank builds its own."""

    kind: type[nn.Module]
    arguments: tuple[Any, ...] = ()
    tied: str | None = None
    """Layers of the same name share one module (its `weight` is kept equal)."""
    forward: Callable[[nn.Module, Any], Any] | None = None
    """How a tied module is used here; None: its own forward."""


class Whole(nn.Module):
    """A stock `transformers` model with its loss, as users call it."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self._names = names

    def logits(self, *inputs: Tensor) -> Tensor:
        """Inputs: int64 [batch, sequence] each, in the order of the batch; returns
        float [batch, sequence, vocabulary]."""
        named = dict(zip(self._names, inputs, strict=True))
        logits: Tensor = self.model(**named, use_cache=False).logits
        return logits

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run on the inputs of a batch and, last, its labels; return the mean loss."""
        *given, labels = inputs
        return token_loss(self.logits(*given), labels)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in fp32 over the labels that are not `IGNORED_LABEL`, int64
    [batch, sequence], of logits [batch, sequence, vocabulary]."""
    flat = logits.float().view(-1, logits.size(-1))
    return functional.cross_entropy(flat, labels.view(-1), ignore_index=IGNORED_LABEL)


def run_block(how: Checkpointing, block: Callable[..., Any], *inputs: Any) -> Any:
    """Call a block, recomputed in backward as `how` says."""
    if how is Checkpointing.NONE or not torch.is_grad_enabled():
        return block(*inputs)
    return checkpoint(block, *inputs, use_reentrant=how is Checkpointing.REENTRANT)


def initialise(module: nn.Module, stock: Callable[[Any], Any], config: Any) -> None:
    """Draw a part's weights as the whole would; `stock`: its `PreTrainedModel` base."""
    module.apply(stock(config)._init_weights)


class TokenEmbedding(nn.Embedding):
    """Token embedding, shared with the output layer."""

    def __init__(self, num_rows: int, width: int, std: float) -> None:
        super().__init__(num_rows, width)
        nn.init.normal_(self.weight, std=std)


def enable_checkpointing(model: Any, how: Checkpointing) -> None:
    """Switch on the checkpointing of a stock `transformers` model."""
    if how is not Checkpointing.NONE:
        # transformers 5.2x renamed the method; the old name warns there.
        old = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", old)
        enable({"use_reentrant": how is Checkpointing.REENTRANT})


class Model(ABC):
    """One family at one size, with random weights."""

    kind: Callable[[Any], Any]
    """The stock class of `transformers`."""
    configure: Callable[[ModelSettings, int], Any]
    """Its configuration, of settings and a vocabulary's size."""
    inputs: tuple[str, ...]
    """Names of what its forward is given."""

    def __init__(self, settings: ModelSettings, vocab_size: int) -> None:
        self._settings = settings
        self.config = self.configure(settings, vocab_size)

    def whole(self) -> Whole:
        """Return the stock model and its loss."""
        model: Any = type(self).kind(self.config)
        enable_checkpointing(model, self._settings.checkpointing)
        return Whole(model, self.inputs)

    @abstractmethod
    def layers(self) -> list[Layer]:
        """Return the same network as a chain; float tensors that cross a stage come
        last, masks and ids travel as integers."""


def embed_first(
    tokens: nn.Module, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """(ids, other) to (other, embedded ids)."""
    return state[1], tokens(state[0])


def tied_logits(embedding: nn.Module, hidden: Tensor) -> Tensor:
    """Logits through the embedding's own weight (tied output layer)."""
    weight = embedding.weight
    if not isinstance(weight, Tensor):
        raise TypeError(f"expects an embedding with a weight, got {type(embedding)}")
    return functional.linear(hidden, weight)

"""The models of the evaluation, from `transformers` configurations."""

from importlib import import_module
from typing import cast

from ssdtrain.train.models.base import Model
from ssdtrain.train.settings import Family, ModelSettings

# Imported by name, so that reading settings does not load `transformers`.
_HOME = {
    Family.GPT: ("ssdtrain.train.models.gpt", "Gpt"),
    Family.BERT: ("ssdtrain.train.models.bert", "Bert"),
    Family.T5: ("ssdtrain.train.models.t5", "T5"),
}


def model_of(settings: ModelSettings, vocab_size: int) -> Model:
    """Return the model of `settings`, for a vocabulary of `vocab_size` rows."""
    module, name = _HOME[settings.family]
    return cast(Model, getattr(import_module(module), name)(settings, vocab_size))

"""Models of transformers: a tiny one of every model type."""

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from tests.ssdtrain.zoo.feeds import Feeder, feeds
from tests.ssdtrain.zoo.judge import Maker, loss_of, said
from tests.ssdtrain.zoo.tiny import tiny_config

TASKS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "RNNT",
    "TDT",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
)
"""Heads that a model is trained with, the first one that its type has; else none."""
MOST_PARAMETERS = 30_000_000
NUM_CLASSES = 3
"""Of one type, that are tried."""
PAST = 15
"""Of time series: two predictions long, less one."""


def _series(feeder: Feeder) -> dict[str, Any]:
    """Of a model that has all past values and predicts some more."""
    number = int(feeder.of("prediction_length"))
    return {
        "past_values": torch.randn(2, PAST),
        "past_time_features": torch.randn(2, PAST, 2),
        "past_observed_mask": torch.ones(2, PAST),
        "future_values": torch.randn(2, number),
        "future_time_features": torch.randn(2, number, 2),
    }


def _decisions(feeder: Feeder) -> dict[str, Any]:
    states, actions = feeder.of("state_dim"), feeder.of("act_dim")
    return {
        "states": torch.randn(2, 8, states),
        "actions": torch.randn(2, 8, actions),
        "rewards": torch.randn(2, 8, 1),
        "returns_to_go": torch.randn(2, 8, 1),
        "timesteps": torch.arange(8).repeat(2, 1),
    }


def _spectrogram(feeder: Feeder) -> dict[str, Any]:
    shape = feeder.of("max_length"), feeder.of("num_mel_bins")
    return {"input_values": torch.randn(2, *shape)}


INPUTS: dict[str, Callable[[Feeder], dict[str, Any]]] = {
    "autoformer": _series,
    "informer": _series,
    "time_series_transformer": _series,
    "decision_transformer": _decisions,
    "audio-spectrogram-transformer": _spectrogram,
}
"""All inputs of model types whose forwards take others."""


def names() -> list[str]:
    """Model types that have a class."""
    return [name for name in transformers.CONFIG_MAPPING if classes(name)]


def classes(model_type: str) -> list[str]:
    """Names of the classes of a type: with heads of `TASKS`, without, with others."""
    tables = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in TASKS]
    tables += ["MODEL_MAPPING_NAMES"]
    others = (n for n in dir(modeling_auto) if n.endswith("_MAPPING_NAMES"))
    tables += [n for n in others if n not in (*tables, "CONFIG_MAPPING_NAMES")]
    found: list[str] = []
    for table in tables:
        own = getattr(modeling_auto, table).get(model_type, ())
        found += [own] if isinstance(own, str) else list(own)
    return list(dict.fromkeys(found))


class Unfit(ValueError):
    """No class of the type runs with any of the inputs."""


def maker(model_type: str) -> tuple[Maker, str]:
    """How to make a model of this type with inputs; the name of its class.

    Raises:
        Unfit: says why.
    """
    errors: list[str] = []
    for name in classes(model_type)[:NUM_CLASSES]:
        try:
            return _of_class(model_type, name), name
        except Exception as error:
            errors.append(f"{name}: {said(error)}")
    raise Unfit("; ".join(errors))


def _of_class(model_type: str, name: str) -> Maker:
    kind = getattr(transformers, name)

    def build(cached: bool) -> Any:
        torch.manual_seed(0)
        config = tiny_config(model_type)
        if not cached:
            for each in (config, *map(config.__dict__.get, config.sub_configs)):
                if hasattr(each, "use_cache"):
                    each.use_cache = False
        return kind(config)

    model = build(True)
    number = sum(p.numel() for p in model.parameters())
    if number > MOST_PARAMETERS:
        raise Unfit(f"{number:,} parameters are too many for a test")
    torch.manual_seed(0)
    inputs = first_of(model, sets_of(model_type, model))

    def make(cached: bool) -> Any:
        return build(cached), copies(inputs)

    return make


def sets_of(model_type: str, model: Any) -> Iterable[dict[str, Any]]:
    """Inputs to try."""
    own = INPUTS.get(model_type)
    return feeds(model) if own is None else [own(Feeder(model))]


def copies(inputs: Any) -> Any:
    """Tensors that the model may change."""
    if isinstance(inputs, torch.Tensor):
        return inputs.clone()
    if isinstance(inputs, dict):
        return {key: copies(one) for key, one in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(map(copies, inputs))
    return inputs


def first_of(model: Any, sets: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Inputs with which a training step runs: the first of these. Else the error of
    those that came deepest."""
    errors = []
    model.train()
    for inputs in sets:
        try:
            loss_of(model(**copies(inputs))).backward()
        except Exception as error:
            errors.append(error)
        else:
            return inputs
    raise max(errors, key=lambda error: len(traceback.extract_tb(error.__traceback__)))

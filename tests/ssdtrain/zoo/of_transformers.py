"""Models of transformers: a tiny one of every model type."""

import traceback
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from tests.ssdtrain.zoo.feeds import feeds
from tests.ssdtrain.zoo.judge import Maker, loss_of, said
from tests.ssdtrain.zoo.tiny import CHANGES, tiny_config

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
MOST_PARAMETERS = 8_000_000
NUM_CLASSES = 3
"""Of one type, that are tried."""
INPUTS: dict[str, dict[str, Any]] = {}
"""Makers of inputs, by model type and name."""


def names() -> list[str]:
    """Model types that have a class."""
    return [name for name in transformers.CONFIG_MAPPING if classes(name)]


def classes(model_type: str) -> list[str]:
    """Names of the classes of a type: with the heads of `TASKS`, without, with others."""
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
    raise Unfit(errors[0])


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
    inputs = first_of(model, feeds(model, INPUTS.get(model_type, {})))

    def make(cached: bool) -> Any:
        return build(cached), copies(inputs)

    return make


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
